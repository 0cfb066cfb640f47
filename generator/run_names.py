"""How the files of a run are called: what writes them makes their names of these parts, what looks for them reads them.

A run leaves `NAME.safetensors` when it is done, on its way `NAME-000003.safetensors` (after an epoch) and
`NAME-step00000500.safetensors`, with `--keep_best` `NAME-best.safetensors`, and with `--ema_decay` averages of most of
them, `…-ema`. Of two experts each has its own: `NAME_high_noise…`, `NAME_low_noise…`. What a later start set aside is
`NAME-kept-step00000500.safetensors`. In several layouts each has its copies, `…-kohya`. Samples are
`NAME-step00000500-1.mp4`, and continuations of held-out clips `NAME-step00000500-continuation-1.mp4`.
"""

EXPERTS = ("high_noise", "low_noise")
BEST, AVERAGE, KEPT = "-best", "-ema", "-kept"

LAYOUTS = ("comfyui", "kohya", "diffusers")
"""What may follow the name of a LoRA that was saved in several layouts."""


def at_step(step: int) -> str:
    """Of a LoRA that was saved on the way, and of a sample, behind the run's name.

    >>> at_step(500), at_epoch(3)
    ('-step00000500', '-000003')
    """
    return f"-step{step:08d}"


def at_epoch(epoch: int) -> str:
    """Of a LoRA that was saved after so many epochs."""
    return f"-{epoch:06d}"


def sample_name(run: str, step: int, number: int, ending: str, *, continued: bool = False) -> str:
    """Of a sample, or of a continuation of a held-out clip, in the folder of samples.

    >>> sample_name("cats", 500, 1, "mp4", continued=True)
    'cats-step00000500-continuation-1.mp4'
    """
    return f"{run}{at_step(step)}-{'continuation-' if continued else ''}{number}.{ending}"


# Patterns of these parts, with a group for each thing that a name says.

EXPERT_PART = rf"(?:_(?P<expert>{'|'.join(EXPERTS)}))?"
STEP_PART = r"-step(?P<step>\d{8})"
EPOCH_PART = r"-(?P<epoch>\d{6})"
FORM_PART = rf"(?P<average>{AVERAGE})?(?P<layout>-(?:{'|'.join(LAYOUTS)}))?"

LORA_PARTS = rf"(?:(?P<kept>{KEPT}\d*)?{STEP_PART}|{EPOCH_PART}|(?P<best>{BEST}))?{FORM_PART}"
"""Behind the name of the run and of the expert."""

SAMPLE_PARTS = rf"{EXPERT_PART}{STEP_PART}-(?P<continued>continuation-)?(?P<number>\d+)\.(?:mp4|png)"
"""Behind the name of the run."""
