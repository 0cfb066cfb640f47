"""Which task of Qwen-Image a transformer seems to be for: their weights have the same names and sizes."""

from contextlib import suppress
from pathlib import Path

from wangen.generator.errors import WangenError
from wangen.generator.headers import has_clean_controls, read_header
from wangen.profiles import Model

TEXT, EDIT, EDIT_PLUS = "qwen-image", "qwen-image-edit", "qwen-image-edit-plus"


def task_warning(dit: Path | None, model: Model) -> str:
    """What to say of a transformer that seems to be for another task of Qwen-Image; empty where it does not.

    Args:
        dit: the weights; what cannot be read is for others to refuse.
        model: the profile of `--task`.
    """
    if dit is None or model.name not in (TEXT, EDIT, EDIT_PLUS):
        return ""
    with suppress(WangenError, OSError):
        if has_clean_controls(dit, read_header(dit, "--dit")):
            return _words(dit, "is Edit 2511,", EDIT_PLUS, model)
    task = _task_of(dit.name.lower().replace("-", "_"))
    return _words(dit, "is named like a model", task, model) if task else ""


def _task_of(name: str) -> str:
    """The task that a name says, if it says one.

    >>> _task_of("qwen_image_edit_2509_bf16.gguf"), _task_of("qwen_image_fp8_e4m3fn.gguf"), _task_of("dit")
    ('qwen-image-edit-plus', 'qwen-image', '')
    """
    if "qwen_image" not in name:
        return ""
    if "edit" not in name:
        return TEXT
    return EDIT_PLUS if any(month in name for month in ("2509", "2511", "plus")) else EDIT


def _words(dit: Path, what: str, task: str, model: Model) -> str:
    if task == model.name:
        return ""
    return (f"--dit {dit.name} {what} for --task {task}, and this is --task {model.name}, whose weights fit and whose "
            "input differs")  # fmt: skip
