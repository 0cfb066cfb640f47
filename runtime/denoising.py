"""Sampling: noise -> latents along diffusers' schedulers, with one transformer or two experts.

The loop is that of diffusers' Wan pipelines, but it asks a velocity model instead of a module of the library: so it
runs whatever holds the weights (the fast path, a quantised base, swapped blocks), and needs no VAE beside it. The tests
compare it with `WanPipeline` and `WanImageToVideoPipeline`.
Letters in shapes: C channels, F h w the latent's frames, height and width, L tokens of text.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch

from wangen.runtime.flow import noised
from wangen.runtime.models.inputs import Controls

Guide = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""From the velocities of the prompt and of the negative prompt, and the scale, to that of the step."""


class Scheduler(Protocol):
    """What a sampler of diffusers offers.

    Attributes:
        timesteps: (steps,) in [0, 1000], falling.
        sigmas: (steps + 1,) noise levels; the last is 0.
    """

    timesteps: torch.Tensor
    sigmas: torch.Tensor

    def set_timesteps(self, num_inference_steps: int, device: torch.device | None = None) -> None:
        """Make the schedule."""

    def set_begin_index(self, begin_index: int) -> None:
        """Begin at this step, without a search for it."""

    def step(
        self, model_output: torch.Tensor, timestep: torch.Tensor, sample: torch.Tensor, *, return_dict: bool
    ) -> tuple[torch.Tensor, ...]:
        """From one noise level to the next."""


class Velocity(Protocol):
    """Predicts velocities; `VelocityModel` of the families' contract does."""

    def __call__(
        self,
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        texts: Sequence[torch.Tensor],
        *,
        condition: torch.Tensor | None = None,
        image_tokens: torch.Tensor | None = None,
        controls: Controls | None = None,
    ) -> torch.Tensor:
        """(B, C, F, h, w) for noisy latents, timesteps (B,) or (B, tokens), and B embeddings (L, dim)."""


@dataclass(frozen=True)
class Stage:
    """The part of the way that one transformer goes.

    Attributes:
        velocity: the transformer.
        guidance: classifier-free guidance; at 1 or below the negative prompt is not asked.
        lowest_timestep: it works at this timestep, in [0, 1000], and above.
        enter: called before its first step, for example to bring it onto the device.
    """

    velocity: Velocity
    guidance: float
    lowest_timestep: float = 0.0
    enter: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Given:
    """What a video is made from beside its text.

    Attributes:
        condition: (1, 4 + C, F, h, w) of image-to-video, from the cache's loader or `sampling`.
        image_tokens: (1, N, dim) CLIP's view of the first frame.
        clean: (1, C, k, h, w) the first k latent frames, which stay as they are and have timestep 0 (TI2V).
        controls: the latents of control images, (C, F, h, w) each, of models that edit.
        guides: the unconditional prediction of guidance lacks the clean frames as well: there they are noised like the
            others, as `--condition_dropout` trains it.
    """

    condition: torch.Tensor | None = None
    image_tokens: torch.Tensor | None = None
    clean: torch.Tensor | None = None
    controls: tuple[torch.Tensor, ...] = ()
    guides: bool = False

    def to(self, device: torch.device) -> "Given":
        """The same on a device."""
        condition, image_tokens, clean = (
            None if part is None else part.to(device) for part in (self.condition, self.image_tokens, self.clean)
        )
        controls = tuple(control.to(device) for control in self.controls)
        return Given(condition, image_tokens, clean, controls, self.guides)

    @property
    def named(self) -> dict[str, Any]:
        """What a velocity model is given by name: the conditions that there are."""
        controls = [self.controls] if self.controls else None
        named = {"condition": self.condition, "image_tokens": self.image_tokens, "controls": controls}
        return {name: value for name, value in named.items() if value is not None}


def flow_scheduler(
    solver: Literal["unipc", "dpm++", "euler"], shift: float, terminal: float | None = None
) -> Scheduler:
    """A sampler with Wan's flow settings.

    UniPC is that of the published pipelines. DPM++ (2M, as in Wan's own code; https://arxiv.org/abs/2211.01095) has
    its noise levels: 0.999 (1 - i/n), shifted, which Wan's own code begins at 1. Euler of n steps begins them at the
    sigmas 1, 1 - 1/n … 1/n, shifted, as `get_sampling_sigmas` of Wan's own code and the scheduler `simple` of ComfyUI
    do; the library's default ends higher, for it shifts the last one twice.

    Args:
        solver: UniPC, DPM++ or Euler.
        shift: of the schedule, above 0.
        terminal: of Euler the last noise level above 0, to which the schedule is stretched.
    """
    from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    class Euler(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]  # the library is untyped
        def set_timesteps(self, num_inference_steps: int, device: torch.device | None = None) -> None:
            even = torch.linspace(1, 0, num_inference_steps + 1)[:-1]
            super().set_timesteps(sigmas=even.tolist(), device=device)

    class Dpm(DPMSolverMultistepScheduler):  # type: ignore[misc]
        def set_timesteps(self, num_inference_steps: int, device: torch.device | None = None) -> None:
            with warnings.catch_warnings():  # it asks numpy for a tensor, in a way that is to go
                warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
                super().set_timesteps(num_inference_steps, device=device)

    if solver == "euler":
        return cast(Scheduler, Euler(shift=shift, shift_terminal=terminal))
    assert terminal is None, "refused with another solver"
    multistep = UniPCMultistepScheduler if solver == "unipc" else Dpm
    scheduler = multistep(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=shift
    )
    return cast(Scheduler, scheduler)


def initial_noise(shape: Sequence[int], seed: int) -> torch.Tensor:
    """The noise of a seed, (1, C, F, h, w) in float32: torch's own of that seed on the CPU, as ComfyUI draws it.

    >>> initial_noise((1, 1, 1, 1, 2), 7).shape
    torch.Size([1, 1, 1, 1, 2])
    """
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def guided(prompted: torch.Tensor, negative: torch.Tensor, scale: float) -> torch.Tensor:
    """The velocity v_negative + scale (v_prompt - v_negative) (https://arxiv.org/abs/2207.12598)."""
    return negative + scale * (prompted - negative)


@torch.no_grad()
def denoise(
    stages: Sequence[Stage],
    noise: torch.Tensor,
    scheduler: Scheduler,
    num_steps: int,
    texts: Sequence[torch.Tensor],
    *,
    given: Given = Given(),
    per_token: Callable[[torch.Tensor, torch.Tensor, Sequence[int]], torch.Tensor] | None = None,
    guide: Guide = guided,
    on_step: Callable[[int], None] = lambda _number: None,
) -> torch.Tensor:
    """Denoise with classifier-free guidance; of several stages the first that reaches down to the timestep works.

    Args:
        stages: the transformers, that of the highest noise first; the last must reach down to 0.
        noise: (1, C, F, h, w), on the device to compute on.
        scheduler: from `flow_scheduler`, fresh.
        num_steps: sampling steps.
        texts: the prompt's embedding (L, dim), and the negative prompt's if a stage has guidance above 1.
        given: what the video is made from beside the text, on the same device.
        per_token: `Family.timesteps_per_token`, needed where first frames are given clean.
        guide: `Family.guided`.
        on_step: called after each step with how many are done.

    Returns:
        (1, C, F, h, w) in float32, normalised.
    """
    scheduler.set_timesteps(num_steps, device=noise.device)
    scheduler.set_begin_index(0)
    latents, current = noise.float(), None
    for number, timestep in enumerate(scheduler.timesteps.tolist()):
        stage = next(stage for stage in stages if timestep >= stage.lowest_timestep)
        if stage is not current:
            stage.enter()
            current = stage
        inputs = _with_first(latents, given.clean)
        timesteps = torch.tensor([float(timestep)])  # in host memory: a model may look at them
        without = None
        if given.clean is not None:
            if given.guides and stage.guidance > 1:
                sigma = scheduler.sigmas[number : number + 1].to(noise.device)
                first = noised(given.clean.float(), noise[:, :, : given.clean.shape[2]].float(), sigma)
                without = _with_first(latents, first), timesteps
            assert per_token is not None, "clean frames have a timestep of their own"
            timesteps = per_token(timesteps, inputs, [given.clean.shape[2]])
        velocity = _guided(stage, (inputs, timesteps), without, texts, given, guide)
        latents = scheduler.step(velocity, scheduler.timesteps[number], latents, return_dict=False)[0]
        on_step(number + 1)
    return _with_first(latents, given.clean)


def _guided(
    stage: Stage,
    inputs: tuple[torch.Tensor, torch.Tensor],
    without: tuple[torch.Tensor, torch.Tensor] | None,
    texts: Sequence[torch.Tensor],
    given: Given,
    guide: Guide,
) -> torch.Tensor:
    """The velocity with classifier-free guidance, in float32.

    Both pairs are latents and timesteps: with what is given, and as the negative prompt sees them where that differs.
    """
    prompted = stage.velocity(*inputs, texts[:1], **given.named).float()
    if stage.guidance <= 1:
        return prompted
    negative = stage.velocity(*(without or inputs), texts[1:2], **given.named).float()
    return guide(prompted, negative, stage.guidance)


def _with_first(latents: torch.Tensor, first: torch.Tensor | None) -> torch.Tensor:
    """Latents whose first frames are these."""
    if first is None:
        return latents
    return torch.cat([first.to(latents), latents[:, :, first.shape[2] :]], dim=2)
