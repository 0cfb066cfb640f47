"""Transformers of Qwen-Image that are given for another task than theirs: nothing but a word can tell."""

from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import zeros

from wangen import profiles
from wangen.generator.edit_tasks import task_warning


@pytest.mark.parametrize(
    ("name", "task", "wanted"),
    [
        ("qwen_image_fp8_e4m3fn", "qwen-image-edit", "named like a model for --task qwen-image,"),
        ("qwen_image_edit_2509_bf16", "qwen-image-edit", "named like a model for --task qwen-image-edit-plus,"),
        ("Qwen-Image-Edit-2509", "qwen-image", "named like a model for --task qwen-image-edit-plus,"),
        ("qwen_image_edit_bf16", "qwen-image-edit-plus", "named like a model for --task qwen-image-edit,"),
        ("qwen_image_edit_bf16", "qwen-image-edit", ""),
        ("my_own", "qwen-image-edit", ""),
        ("qwen_image_edit_bf16", "t2v-14B", ""),
    ],
)
def test_a_name_of_another_task_is_told(tmp_path: Path, name: str, task: str, wanted: str):
    path = tmp_path / f"{name}.safetensors"
    save_file({"x": zeros(1)}, path)
    found = task_warning(path, profiles.model(task))
    assert wanted in found
    assert bool(found) == bool(wanted)


@pytest.mark.parametrize("marked", [True, False])
def test_the_configuration_beside_it_says_more_than_its_name(tmp_path: Path, *, marked: bool):
    path = tmp_path / "my_own.safetensors"
    save_file({"x": zeros(1)}, path)
    if marked:
        (tmp_path / "config.json").write_text('{"zero_cond_t": true}')
    edit, plus = (task_warning(path, profiles.model(task)) for task in ("qwen-image-edit", "qwen-image-edit-plus"))
    assert ("is Edit 2511, for --task qwen-image-edit-plus" in edit) == marked
    assert plus == ""
