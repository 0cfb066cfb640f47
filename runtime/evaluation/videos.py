"""Paired videos: the same prompt and noise for the base and for checkpoints, each with a note of what was found of it.

A video that is there with the same settings is not made again. Its note holds what needs the latents or a model; what
can be read from the frames is read from the files, whoever made them.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wangen.generator.files import write_text
from wangen.generator.lora_config import lora_identity
from wangen.runtime.cache import digest
from wangen.runtime.evaluation.clip_score import ClipScore
from wangen.runtime.evaluation.judging import Load, loras_of, strengths_of
from wangen.runtime.evaluation.nearest import TrainingLatents
from wangen.runtime.evaluation.signals import psnr, signals, ssim
from wangen.runtime.evaluation.tables import Candidate
from wangen.runtime.evaluation_file import BASE, Memorisation, Video
from wangen.runtime.moving_shapes import read_clip
from wangen.runtime.progress import progress
from wangen.runtime.sampling.output import KEY, write_media
from wangen.runtime.sampling.sampler import ExpertWeights, Request, Sampler, make_videos
from wangen.runtime.sampling.scenes import Scene
from wangen.runtime.sampling.videos import Decoder

log = logging.getLogger("wangen")


@dataclass(frozen=True)
class Pair:
    """A prompt with a seed, to be made by the base and by checkpoints.

    Attributes:
        activity: what it shows.
        scene: made ready.
        number: of the pair, counted from 1, for the files' names.
    """

    activity: str
    scene: Scene
    number: int


@dataclass(frozen=True)
class Job:
    """One video to be made.

    Attributes:
        pair: what it shows.
        who: the checkpoint; None is the base.
        path: its file.
        settings: what decides its pixels.
    """

    pair: Pair
    who: Candidate | None
    path: Path
    settings: Mapping[str, Any] = field(hash=False)

    @property
    def note(self) -> Path:
        """Where what is found of it is kept."""
        return self.path.with_suffix(".json")

    def is_done(self) -> bool:
        """Whether file and note are there, of these settings."""
        return self.path.is_file() and self.read().get("settings") == digest(self.settings)

    def read(self) -> dict[str, Any]:
        """Its note; empty where there is none."""
        with suppress(OSError, ValueError):
            found = json.loads(self.note.read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        return {}


def plan_videos(
    pairs: Sequence[Pair], candidates: Sequence[Candidate], facts: Mapping[str, Any], folder: Path
) -> list[Job]:
    """Every video: for each pair the base's, then the checkpoints'.

    Args:
        pairs: prompts with seeds.
        candidates: whose videos are wanted.
        facts: what decides pixels beside prompt and LoRA: digests of the weights, precision.
        folder: of the files.
    """
    jobs = []
    everyone: list[Candidate | None] = [None, *candidates]
    for pair in pairs:
        prompt = asdict(pair.scene.prompt)
        prompt["image"] = prompt["image"].name if prompt["image"] else ""
        for who in everyone:
            files = [who.file, *([who.file_high_noise] if who.file_high_noise else [])] if who else []
            settings = {**facts, **prompt, "loras": [lora_identity(path) for path in files], "strength": 1.0}
            ending = "png" if pair.scene.prompt.frames == 1 else "mp4"
            name = f"{pair.number:03d}-seed{pair.scene.prompt.seed}-{who.name if who else BASE}.{ending}"
            jobs.append(Job(pair, who, folder / name, settings))
    return jobs


def make(
    jobs: Sequence[Job],
    load: Load,
    experts: Sequence[ExpertWeights],
    decoder: Decoder,
    training: TrainingLatents | None,
) -> None:
    """Make the videos that are not there, the base and all their checkpoints in memory at once, and note the nearest
    training clip of each.

    Raises:
        WangenError: the memory or the disk is full; what was made stays and is not made again.
    """
    left = [job for job in jobs if not job.is_done()]
    if not left:
        return
    wanted = list(dict.fromkeys(job.who for job in left if job.who))
    sampler: Sampler = load(
        [ExpertWeights(one.dit, loras_of(wanted, high_noise=one.high_noise), one.high_noise) for one in experts]
    )
    requests = [Request(job.pair.scene, strengths_of(job.who)) for job in left]
    with progress("videos", sum(job.pair.scene.prompt.steps for job in left)) as advance:
        made = make_videos(requests, sampler, decoder, lambda _done: advance(1, ""))
        for job, video in zip(left, made, strict=True):
            job.note.unlink(missing_ok=True)
            words = json.dumps({**job.settings, "evaluated": job.who.name if job.who else BASE}, sort_keys=True)
            write_media(job.path, video.frames, job.pair.scene.prompt.fps, {KEY: words})
            nearest = asdict(training.nearest(video.latents[0])) if training else None
            note = {"settings": digest(job.settings), "nearest": nearest}
            write_text(job.note, json.dumps(note, ensure_ascii=False) + "\n")


def describe(
    jobs: Sequence[Job], folder: Path, clip_score: ClipScore | None
) -> tuple[tuple[Video, ...], tuple[Memorisation, ...]]:
    """What the files show: signals of every video and its likeness to the base's, and the nearest training clips.

    Args:
        jobs: all of them, done.
        folder: what paths are relative to.
        clip_score: a model that compares pictures and words.

    Raises:
        WangenError: a file cannot be decoded.
    """
    videos, copies = [], []
    for pair in dict.fromkeys(job.pair.number for job in jobs):
        own = [job for job in jobs if job.pair.number == pair]
        found: dict[str, dict[str, float]] = {}
        base_frames = None
        for job in own:
            name, frames = job.who.name if job.who else BASE, read_clip(job.path)
            found[name] = signals(frames).as_record()
            if clip_score:
                found[name]["clip_score"] = clip_score(frames, job.pair.scene.prompt.prompt)
            if job.who is None:
                base_frames = frames
            elif base_frames is not None:
                found[name] |= {"psnr_to_base": min(psnr(base_frames, frames), 99.0), "ssim_to_base": ssim(base_frames, frames)}
        prompt = own[0].pair.scene.prompt
        files = {job.who.name if job.who else BASE: job.path.relative_to(folder).as_posix() for job in own}
        videos.append(Video(own[0].pair.activity, prompt.prompt, prompt.seed, files, found))
        copies += _copies(own, folder)
    return tuple(videos), tuple(copies)


def _copies(jobs: Sequence[Job], folder: Path) -> list[Memorisation]:
    """How near each video of a pair is to the training clips, against the base's of the same noise."""
    notes = {job.who.name if job.who else BASE: job.read().get("nearest") for job in jobs}
    base = notes.get(BASE)
    return [
        Memorisation(
            checkpoint=job.who.name,
            video=job.path.relative_to(folder).as_posix(),
            nearest=nearest["name"],
            distance=nearest["distance"],
            usual_distance=base["distance"] if base else None,
            suspicious=nearest["share"] is not None and nearest["share"] < COPY,
        )
        for job in jobs
        if job.who and (nearest := notes[job.who.name])
    ]
