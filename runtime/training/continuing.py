"""Continuations of held-out clips while a run goes on: sampled as samples are, measured, and written beside them."""

import json
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from wangen.generator.errors import WangenError, in_line
from wangen.generator.run_folder import SAMPLES
from wangen.generator.run_names import sample_name
from wangen.runtime.continuations import (
    Clip,
    Continuations,
    Measured,
    Reference,
    make_clips,
    quality_of,
    reference_of,
    side_by_side,
)
from wangen.runtime.sampling.output import KEY, pixels_of, write_frames
from wangen.runtime.sampling.scenes import Encoders
from wangen.runtime.sampling.videos import Decoder
from wangen.runtime.training.plan import Plan
from wangen.runtime.training.ranks import Ranks
from wangen.runtime.training.run import Run
from wangen.runtime.training.sampling import list_samples, own_check, sample_settings, sampled

if TYPE_CHECKING:
    import numpy as np

    Frames = np.ndarray[Any, np.dtype[np.uint8]]

log = logging.getLogger("wangen")

SHOWN = ("source", "the VAE's reconstruction", "continuation")
"""What a video of a continuation shows, from left to right."""
_CURE = "hold out shorter or smaller clips with --validation_config, or use --vae_cache_cpu"


class Continuing:
    """The held-out clips that a run continues; what stands beside them is decoded once and stays in host memory.

    Attributes:
        clips: none where the flags ask for none, and in a process that has no part in them.
    """

    def __init__(self, plan: Plan, ranks: Ranks) -> None:
        """Read the clips and their latents, before the transformer loads.

        Args:
            plan: of the run.
            ranks: the first of the processes continues clips; all of them do where each holds a part of the weights.

        Raises:
            WangenError: no held-out clip is longer than what is given, or one cannot be decoded.
        """
        options = plan.options
        self.clips: list[Clip] = []
        self._references: dict[int, Reference] = {}
        if options.sample_continuations and (ranks.is_first or ranks.in_step):
            assert options.condition_frames, "refused without them"
            self.clips = make_clips(
                plan.held_out, plan.model, given_frames=options.condition_frames, count=options.sample_continuations,
                seed=options.seed, steps=options.continuation_steps, guidance=options.continuation_guidance,
                frames_guide=options.condition_dropout > 0,
            )  # fmt: skip

    def make(self, run: Run, check: Callable[[], None]) -> Continuations | None:
        """Continue every clip with the trainees as they are; write the videos and their lines in `samples.jsonl`.

        Averages are sampled with where they are kept. One that does not fit into memory or is not finite is left out
        with a warning: training goes on. Not where each process holds a part of the weights.

        Args:
            run: of which everything stays as it is.
            check: as for `make_samples`.

        Returns:
            What was measured; None when there is nothing, and in a process that only went along.

        Raises:
            WangenError: a continuation cannot be made, where the weights are in parts, or the disk refused.
        """
        scenes = [clip.scene for clip in self.clips]
        latents = sampled(run, scenes, check, what="continuation", cure=_CURE)
        if not run.ranks.is_first:
            return None
        return self._measured(run, latents, own_check(run, check))

    def _measured(
        self, run: Run, latents: Mapping[int, torch.Tensor], check: Callable[[], None]
    ) -> Continuations | None:
        """Decode, write and measure what was made, by the numbers of the clips; the VAE is in memory only here."""
        decoder = Decoder(run.kind, Encoders.of(run.plan.options), run.device, _CURE)
        measured = []
        for number, part in latents.items():
            clip = self.clips[number - 1]
            try:
                if number not in self._references:
                    self._references[number] = reference_of(clip, decoder, check)
                reference, frames = self._references[number], pixels_of(decoder.decode(part, check))
                _write(run, number, clip, side_by_side(clip, reference, frames))
            except WangenError as error:
                log.warning("  continuation %d is left out: %s", number, in_line(error))
                continue
            model = quality_of(clip.source, frames, clip.given_frames)
            measured.append(Measured(number, clip.name, clip.given_frames, model, reference.vae, reference.copy))
        del decoder
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
        return Continuations(measured) if measured else None


def _write(run: Run, number: int, clip: Clip, shown: "Frames") -> None:
    folder = run.plan.options.output_dir / SAMPLES
    path = folder / sample_name(run.plan.name, run.step, number, "mp4", continued=True)
    told = {"continues": clip.name, "given_frames": clip.given_frames, "shows": SHOWN,
            "guided_by_frames": clip.scene.prompt.guided and clip.scene.given.guides}  # fmt: skip
    settings = {**sample_settings(run, clip.scene.prompt), **told}
    del settings["comfyui"]  # whose nodes take no given frames
    write_frames(path, shown, clip.scene.prompt.fps, {KEY: json.dumps(settings, sort_keys=True)})
    list_samples(folder, {path.name: settings})
