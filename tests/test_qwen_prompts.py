"""Qwen-Image's prompts: embeddings of texts and of pictures beside them are the pipelines', streamed or whole."""

import weakref
from pathlib import Path

import pytest
import tiny_qwen as tiny_qwen_module
import torch
from safetensors.torch import load_file, save_file
from tiny_qwen import TinyQwen, picture, pipeline_of, smaller
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLDecoderLayer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from wangen import profiles
from wangen.generator.errors import WangenError
from wangen.generator.geometry import area_size
from wangen.runtime.models import family
from wangen.runtime.models.qwen_image_edit import pictures as pictures_module
from wangen.runtime.models.qwen_image_edit import streamed
from wangen.runtime.models.qwen_image_edit.text_encoder import load_text_encoder, positions

QWEN = family(profiles.model("qwen-image-edit"))
CPU = torch.device("cpu")
PROMPT = "make  the sky green,\nplease"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "single"),
    [("qwen-image", False), ("qwen-image", True), ("qwen-image-edit", True), ("qwen-image-edit-plus", False)],
)
def test_the_embedding_is_that_of_the_pipeline(tiny_qwen: TinyQwen, task: str, single: bool):
    model, pipeline = profiles.model(task), pipeline_of(task, tiny_qwen)
    pictures = {0: [], 1: [picture((300, 200))], 3: [picture((300, 200)), picture((120, 200), 3)]}[model.max_controls]
    encoder = QWEN.load_prompt_encoder(
        tiny_qwen.weights(single=single)["t5"],
        None,
        dtype=torch.float32,
        device=CPU,
        fp8=False,
        plain=True,
        model=model,
    )
    for prompt in (PROMPT, "", " "):
        (ours,) = encoder.encode([prompt], pictures=[pictures])
        if task == "qwen-image":
            theirs, mask = pipeline.encode_prompt(prompt)
        else:
            shown = as_the_pipeline_shows(pipeline, pictures, (1024, 1024) if model.max_controls == 1 else (384, 384))
            theirs, mask = pipeline.encode_prompt(prompt, image=shown if model.max_controls > 1 else shown[0])
        assert mask is None  # of one prompt nothing is masked
        assert torch.equal(ours, theirs[0])


def as_the_pipeline_shows(pipeline, pictures, area):
    """What `__call__` of the edit pipelines does to pictures before `encode_prompt`."""
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    sizes = [calculate_dimensions(area[0] * area[1], one.width / one.height) for one in pictures]
    return [pipeline.image_processor.resize(one, height, width)
            for one, (width, height) in zip(pictures, sizes, strict=True)]  # fmt: skip


def test_pictures_have_places_in_the_prompt_which_the_pipeline_of_this_version_leaves_out(tiny_qwen: TinyQwen):
    """diffusers' issue 14194: told nothing, the text encoder takes a picture for text and the embedding is another."""
    pipeline = pipeline_of("qwen-image-edit", tiny_qwen)
    shown = as_the_pipeline_shows(pipeline, [picture((300, 200))], (384, 384))[0]
    told, _ = pipeline.encode_prompt(PROMPT, image=shown)
    del pipeline.text_encoder.forward
    untold, _ = pipeline.encode_prompt(PROMPT, image=shown)
    assert told.shape == untold.shape
    assert (told - untold).abs().max() > 0.1


@pytest.mark.parametrize("sizes", [[(4, 6)], [(8, 2), (4, 4)]])
def test_positions_are_those_of_the_library(tiny_qwen: TinyQwen, sizes: list[tuple[int, int]]):
    encoder = load_text_encoder(tiny_qwen.single["t5"])
    parts = [torch.zeros(7, dtype=torch.long)]
    for height, width in sizes:
        parts += [torch.ones(height * width // 4, dtype=torch.long), torch.zeros(3, dtype=torch.long)]
    kinds = torch.cat(parts)
    grids = torch.tensor([(1, *size) for size in sizes])
    wanted, _ = encoder.get_rope_index(kinds[None], mm_token_type_ids=kinds[None], image_grid_thw=grids)
    assert torch.equal(positions(kinds.bool(), sizes), wanted[:, 0])


STREAMED = [("a bird", []), ("", [picture((300, 200))]), (PROMPT, [picture((300, 200)), picture((120, 200), 3)])]
"""Prompts of three lengths, with no, one and two pictures."""


def prompt_encoder(path: Path, *, plain: bool, fp8: bool = False, dtype: torch.dtype = torch.float32):
    return QWEN.load_prompt_encoder(
        path, None, dtype=dtype, device=CPU, fp8=fp8, plain=plain, model=profiles.model("qwen-image-edit-plus")
    )


@pytest.mark.slow
@pytest.mark.parametrize("group_tokens", [1, 600, 2**16])
@pytest.mark.parametrize(("fp8", "dtype"), [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)])
def test_streamed_layers_give_the_same_bits(tiny_qwen: TinyQwen, monkeypatch, fp8, dtype, group_tokens: int):
    smaller(monkeypatch, "qwen-image-edit-plus")
    monkeypatch.setattr(streamed, "GROUP_TOKENS", group_tokens)
    prompts, pictures = zip(*STREAMED, strict=True)
    for path in (tiny_qwen.single["t5"], tiny_qwen.folder):
        whole, parts = (prompt_encoder(path, plain=plain, fp8=fp8, dtype=dtype) for plain in (True, False))
        wanted = whole.encode(prompts, pictures=pictures)
        assert len({tuple(one.shape) for one in wanted}) == len(STREAMED)
        for _ in range(2):  # nothing is left over from the first time
            found = parts.encode(prompts, pictures=pictures)
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert parts.encode([]) == []


def test_no_more_than_two_streamed_layers_are_in_memory(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tiny_qwen_module, "NUM_LAYERS", 6)
    tiny = tiny_qwen_module.write_tiny_qwen(tmp_path)
    alive, most, read = weakref.WeakSet(), [], []
    fill = streamed.fill

    def counted(module: torch.nn.Module, *words, **names) -> None:
        if isinstance(module, Qwen2_5_VLDecoderLayer):
            alive.add(module)
            read.append(module.self_attn.layer_idx)
            most.append(len(alive))
        fill(module, *words, **names)

    monkeypatch.setattr(streamed, "fill", counted)
    encoder = prompt_encoder(tiny.single["t5"], plain=False)
    assert not alive
    told = []
    encoder.encode(["a bird", "two birds", "birds"], lambda done, total: told.append((done, total)))
    assert read == list(range(6))
    assert told == [(number, 6) for number in range(1, 7)]
    assert max(most) <= 2
    assert not alive


def test_a_damaged_layer_is_refused_before_anything_is_streamed(tiny_qwen: TinyQwen, tmp_path: Path):
    tensors = load_file(tiny_qwen.single["t5"])
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:-1].contiguous()
    path = tmp_path / "qwen_2.5_vl_7b.safetensors"
    save_file(tensors, path)
    (tmp_path / "tokenizer.json").write_bytes((tiny_qwen.folder / "processor" / "tokenizer.json").read_bytes())
    with pytest.raises(WangenError, match=r"1 of another shape \(language_model\.layers\.1\.mlp\.up_proj"):
        prompt_encoder(path, plain=False)


def test_a_prompt_with_the_token_of_pictures_is_refused(tiny_qwen: TinyQwen):
    encoder = prompt_encoder(tiny_qwen.single["t5"], plain=True)
    with pytest.raises(WangenError, match="stands for a part of a control image"):
        encoder.encode(["a house <|image_pad|>"], pictures=[[picture((64, 64))]])


def test_a_prompt_that_is_too_long_for_the_transformer_is_refused(tiny_qwen: TinyQwen):
    encoder = prompt_encoder(tiny_qwen.single["t5"], plain=True)
    with pytest.raises(WangenError, match="tokens with its control images, and the transformer takes 3968") as error:
        encoder.encode(["x " * 3000], pictures=[[picture((64, 64))]])
    assert error.value.cure == "shorten the caption"


def test_long_prompts_are_cut_where_the_pipeline_cuts_them(tiny_qwen: TinyQwen, caplog: pytest.LogCaptureFixture):
    pipeline, model = pipeline_of("qwen-image", tiny_qwen), profiles.model("qwen-image")
    encoder = QWEN.load_prompt_encoder(
        tiny_qwen.single["t5"], None, dtype=torch.float32, device=CPU, fp8=False, plain=True, model=model
    )
    (ours,) = encoder.encode(["a long story " * 60])
    theirs, _ = pipeline.encode_prompt("a long story " * 60, max_sequence_length=512)
    assert ours.shape == (512, 256)
    assert "a text longer than Qwen-Image's 512 tokens, what follows is not seen: 'a long story a long" in caplog.text
    assert torch.allclose(ours, theirs[0], atol=1e-5)


@pytest.mark.parametrize("size", [(384, 384), (300, 211), (40, 30), (500, 400)])
def test_patches_are_those_of_the_library(size: tuple[int, int], monkeypatch):
    """With an 80th of the most pixels, which the last of the pictures exceeds."""
    assert (pictures_module.MIN_PIXELS, pictures_module.MAX_PIXELS) == (3136, 12845056)
    monkeypatch.setattr(pictures_module, "MAX_PIXELS", 12845056 // 80)
    wanted = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 12845056 // 80})(
        images=[picture(size)], return_tensors="pt"
    )
    values, grid = pictures_module.patches(picture(size))
    assert [1, *grid] == wanted["image_grid_thw"][0].tolist()
    assert torch.allclose(values, wanted["pixel_values"], atol=1e-5)


@pytest.mark.parametrize("size", [(300, 200), (1920, 1080), (333, 777), (64, 64)])
def test_areas_are_those_of_the_pipelines(size: tuple[int, int]):
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    for area in ((1024, 1024), (384, 384)):
        assert area_size(size, area) == calculate_dimensions(area[0] * area[1], size[0] / size[1])
