"""Paired videos: the same prompt and noise for the base and for checkpoints, as `generate` makes and repeats them.

A video that is there with the same settings is not made again. Beside it lies a note of what needs its latents; what
can be read from the frames is read from the files.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from wangen.generator.files import write_text
from wangen.generator.sample_prompts import SamplePrompt
from wangen.generator.steps import Generate
from wangen.runtime.cache import digest
from wangen.runtime.evaluation.clip_score import ClipScore, spread
from wangen.runtime.evaluation.judging import LORAS_AT_ONCE, Load, loras_of, strengths_of
from wangen.runtime.evaluation.nearest import Neighbour, TrainingLatents
from wangen.runtime.evaluation.signals import MOST_DB, psnr, signals, ssim
from wangen.runtime.evaluation.tables import Candidate, name_of
from wangen.runtime.evaluation_file import BASE, Memorisation, Video
from wangen.runtime.loader import CachedSample
from wangen.runtime.media import open_image, target_frames
from wangen.runtime.progress import progress
from wangen.runtime.sampling.output import KEY, read_frames, write_media
from wangen.runtime.sampling.repeat import identities, made_on, video_settings
from wangen.runtime.sampling.resume import is_made
from wangen.runtime.sampling.sampler import ExpertWeights, Request, Sampler, make_videos
from wangen.runtime.sampling.sampler import Video as Made
from wangen.runtime.sampling.scenes import Scene
from wangen.runtime.sampling.videos import Decoder

MOTION_CLIPS = 16
"""So many training clips say how much they move."""


@dataclass(frozen=True)
class Job:
    """One video.

    Attributes:
        activity: what it shows.
        prompt: with its seed.
        number: of the prompt with its seed, counted from 1.
        who: the checkpoint; None is the base.
        path: its file.
        settings: what decides its pixels, as `generate` stores it.
    """

    activity: str
    prompt: SamplePrompt
    number: int
    who: Candidate | None
    path: Path
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Whose video it is."""
        return name_of(self.who)

    @property
    def digest(self) -> str:
        """Of the settings."""
        return _digest(self.settings)

    @property
    def note(self) -> Path:
        """What is kept of its latents."""
        return self.path.with_suffix(".json")

    def is_done(self, training: TrainingLatents | None) -> bool:
        """Whether it is there, made with these settings and compared with these training clips."""
        return is_made(self.path, self.settings) and self.nearest(training) != {}

    def nearest(self, training: TrainingLatents | None) -> dict[str, Any] | None:
        """The nearest training clip by its note; None where there are none, `{}` where it is not known."""
        if training is None:
            return None
        with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
            note = json.loads(self.note.read_text(encoding="utf-8"))
            if note["training"] == training.digest and note["settings"] == self.digest:
                found = dict(note["nearest"])
                return found | {
                    "name": training.names.get(found.get("key", ""), found["name"])
                }  # it may be renamed since
        return {}


def plan_videos(
    prompts: Sequence[tuple[str, SamplePrompt]], candidates: Sequence[Candidate], options: Generate, device: str,
    folder: Path,
) -> list[Job]:  # fmt: skip
    """Every video: for each prompt the base's, then the checkpoints'.

    Args:
        prompts: activities and prompts, with their seeds.
        candidates: whose videos are wanted.
        options: of `generate`, resolved, without LoRAs.
        device: its kind.
        folder: of the files.

    Raises:
        WangenError: a file cannot be read.
    """
    everyone: list[Candidate | None] = [None, *candidates]
    own = {name_of(who): with_loras(options, [who] if who else []) for who in everyone}
    told = {name: {**identities(each), **made_on(device)} for name, each in own.items()}
    jobs = []
    for number, (activity, prompt) in enumerate(prompts, start=1):
        ending = "png" if prompt.frames == 1 else "mp4"
        for who in everyone:
            name = name_of(who)
            path = folder / f"{number:03d}-seed{prompt.seed}-{name}.{ending}"
            settings = {**video_settings(own[name], prompt), **told[name]}
            jobs.append(Job(activity, prompt, number, who, path, settings))
    return jobs


def with_loras(options: Generate, some: Sequence[Candidate]) -> Generate:
    """The flags with which `generate` takes the LoRAs of checkpoints, each as it was trained."""
    low = tuple(who.file for who in some if who.file)
    high = tuple(who.file_high_noise for who in some if who.file_high_noise)
    return replace(options, lora_weight=low, lora_multiplier=(1.0,) * len(low), lora_weight_high_noise=high,
                   lora_multiplier_high_noise=(1.0,) * len(high))  # fmt: skip


def make(
    jobs: Sequence[Job],
    scenes_of: Callable[[Sequence[SamplePrompt]], Sequence[Scene]],
    load: Load,
    experts: Sequence[ExpertWeights],
    decoder: Decoder,
    training: TrainingLatents | None,
) -> int:
    """Make the videos that are not there; returns how many.

    Args:
        jobs: all of them.
        scenes_of: makes prompts ready; called before the transformers load.
        load: makes a sampler.
        experts: the transformers.
        decoder: the VAE.
        training: clips that videos are compared with.

    Raises:
        WangenError: the memory or the disk is full; what was made stays and is not made again.
    """
    left = [job for job in jobs if not job.is_done(training)]
    if not left:
        return 0
    scenes = dict(zip(map(id, left), scenes_of([job.prompt for job in left]), strict=True))
    everyone = list(dict.fromkeys(job.who for job in left))
    with progress("videos", sum(job.prompt.steps for job in left)) as advance:
        for start in range(0, len(everyone), LORAS_AT_ONCE):
            some = everyone[start : start + LORAS_AT_ONCE]
            sampler = load([replace(one, loras=loras_of(some, high_noise=one.high_noise)) for one in experts])
            own = [job for job in left if job.who in some]
            requests = [Request(scenes[id(job)], strengths_of(job.who)) for job in own]
            _write(own, make_videos(requests, sampler, decoder, lambda _done: advance(1, "")), sampler, training)
            del sampler  # before the next one loads
    return len(left)


def _write(jobs: Sequence[Job], videos: Iterable[Made], sampler: Sampler, training: TrainingLatents | None) -> None:
    """Write each video as soon as it is made, with its note."""
    for job, video in zip(jobs, videos, strict=True):
        words = json.dumps({**job.settings, "attention": sampler.attention}, sort_keys=True)
        write_media(job.path, video.frames, job.prompt.fps, {KEY: words})
        if training:
            nearest = asdict(training.nearest(video.latents[0]))
            note = {"settings": job.digest, "training": training.digest, "nearest": nearest}
            write_text(job.note, json.dumps(note, ensure_ascii=False) + "\n")


def usual_motion(items: Sequence[CachedSample]) -> float | None:
    """The mean motion of clips that were trained on, of some spread over all; None where nothing moves.

    Raises:
        WangenError: a clip cannot be decoded.
    """
    clips = [item.sample for item in items if item.sample.count > 1]
    chosen = [clips[place] for place in spread(len(clips), MOTION_CLIPS)]
    found = [signals(target_frames(sample).transpose(1, 2, 3, 0)).motion for sample in chosen]
    return fmean(found) if any(found) else None


def describe(
    jobs: Sequence[Job],
    folder: Path,
    training: TrainingLatents | None,
    motion: float | None,
    clip_score: ClipScore | None,
) -> tuple[tuple[Video, ...], tuple[Memorisation, ...]]:
    """What the files show: signals of every video and its likeness to the base's, and the nearest training clips.

    Args:
        jobs: all of them, made.
        folder: what paths are relative to.
        training: clips that videos were compared with.
        motion: `usual_motion` of what was trained on.
        clip_score: a model that compares pictures and words.

    Raises:
        WangenError: a file cannot be decoded.
    """
    videos, copies = [], []
    for number in dict.fromkeys(job.number for job in jobs):
        base, *others = [job for job in jobs if job.number == number]
        base_frames, found = read_frames(base.path), {}
        for job in (base, *others):
            name, frames = job.name, base_frames if job is base else read_frames(job.path)
            found[name] = signals(frames).as_record()
            if clip_score:
                found[name]["clip_score"] = clip_score(frames, base.prompt.prompt)
            if motion and len(frames) > 1:
                found[name]["motion_to_training"] = found[name]["motion"] / motion
            if name != BASE:
                found[name]["psnr_to_base"] = min(psnr(base_frames, frames), MOST_DB)
                found[name]["ssim_to_base"] = ssim(base_frames, frames)
        files = {job.name: job.path.relative_to(folder).as_posix() for job in (base, *others)}
        controls = tuple(path.relative_to(folder).as_posix() for path in _shown_controls(base))
        videos.append(Video(base.activity, base.prompt.prompt, base.prompt.seed, files, found, controls))
        copies += _copies(base, others, folder, training)
    return tuple(videos), tuple(copies)


def _shown_controls(base: Job) -> list[Path]:
    """Copies of the control images beside the pictures made of them, no larger than these, for the page.

    Raises:
        WangenError: a control image cannot be decoded, or the disk refused.
    """
    copies = []
    for number, control in enumerate(base.prompt.controls, 1):
        picture = open_image(control, base.prompt.background)
        picture.thumbnail((base.prompt.width, base.prompt.height))
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[:, None] / 127.5 - 1
        path = base.path.with_name(f"{base.number:03d}-seed{base.prompt.seed}-control{number}.png")
        write_media(path, pixels, 1, {"wangen.control": control.name})
        copies.append(path)
    return copies


def _copies(base: Job, others: Sequence[Job], folder: Path, training: TrainingLatents | None) -> list[Memorisation]:
    """How near each video is to the training clips, against the base's of the same noise."""
    usual = base.nearest(training)
    return [
        Memorisation(
            checkpoint=job.name,
            video=job.path.relative_to(folder).as_posix(),
            nearest=nearest["name"],
            distance=nearest["distance"],
            usual_distance=usual["distance"] if usual else None,
            suspicious=Neighbour(**nearest).is_copy,
        )
        for job in others
        if (nearest := job.nearest(training))
    ]


def _digest(settings: Mapping[str, Any]) -> str:
    """Of settings as JSON gives them back; which kernel `auto` means is known only when the model is loaded."""
    kept = {name: value for name, value in settings.items() if name != "attention"}
    return digest(json.loads(json.dumps(kept)))
