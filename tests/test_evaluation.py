"""The parts of `evaluate`: intervals, signals of clips, nearest training clips, tables and the ranking."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from report_runs import evaluation
from safetensors.torch import save_file

from wangen.generator.errors import UsageError, WangenError
from wangen.runtime.evaluation import nearest
from wangen.runtime.evaluation.candidates import find_candidates
from wangen.runtime.evaluation.clip_score import ClipScore
from wangen.runtime.evaluation.intervals import paired_difference
from wangen.runtime.evaluation.judging import Judging, Points
from wangen.runtime.evaluation.nearest import TrainingClip, TrainingLatents
from wangen.runtime.evaluation.prompts import _by_turns
from wangen.runtime.evaluation.signals import brightness, psnr, signals, ssim
from wangen.runtime.evaluation.tables import Candidate, by_activity, by_timestep, joined, ranking, whole
from wangen.runtime.evaluation.trained import given_frames
from wangen.runtime.evaluation.videos import Job, describe
from wangen.runtime.evaluation.warnings import forgotten, warnings_of
from wangen.runtime.evaluation_file import Video
from wangen.runtime.sampling.output import write_media
from wangen.runtime.training.validation import Losses


def clip(seed: int = 0, frames: int = 9, size: int = 32) -> np.ndarray:
    """Noise that drifts from left to right, (T, H, W, 3) uint8."""
    picture = np.random.default_rng(seed).integers(40, 200, (size, size + frames, 3), dtype=np.uint8)
    return np.stack([picture[:, start : start + size] for start in range(frames)])


def losses(values: list[list[float]], sigmas: tuple[float, ...] = (0.25, 0.75)) -> Losses:
    return Losses(tuple(f"item {number}" for number in range(len(values))), sigmas, 0, tuple(map(tuple, values)))


@pytest.mark.slow
def test_an_interval_holds_the_true_difference_as_often_as_it_says():
    draws = np.random.default_rng(0)
    held = 0
    for trial in range(200):
        first = draws.normal(1.0, 0.5, 40)
        second = first + draws.normal(-0.1, 0.2, 40)  # items differ much more than what is asked
        found = paired_difference(first.tolist(), second.tolist(), trial)
        held += found.low <= -0.1 <= found.high
        assert found.low < found.mean < found.high
    assert 180 <= held <= 198


@pytest.mark.slow
def test_the_best_of_ten_without_any_effect_is_rarely_called_better():
    """Each alone is in some 5 %; of ten the lowest would be in some 30 %."""
    generator = np.random.default_rng(5)
    found = {1: 0, 10: 0}
    for trial in range(60):
        tried = generator.normal(size=(10, 20))
        for comparisons in found:
            differences = [paired_difference([0.0] * 20, one.tolist(), trial, comparisons=comparisons) for one in tried]
            found[comparisons] += min(differences, key=lambda one: one.mean).is_lower
    assert found[10] <= 8 < 10 < found[1]


def test_pairing_sees_what_the_spread_of_the_items_would_hide():
    hard = [float(number) for number in range(20)]
    found = paired_difference(hard, [number - 0.01 - 0.001 * (number % 3) for number in hard], 0)
    assert found.is_lower
    assert not found.is_higher
    assert found == paired_difference(hard, [number - 0.01 - 0.001 * (number % 3) for number in hard], 0)
    alone = paired_difference([1.0], [0.5], 0)
    assert (alone.mean, alone.low, alone.high, alone.is_lower) == (-0.5, None, None, False)
    with pytest.raises(ValueError, match="no items"):
        paired_difference([], [], 0)


@pytest.mark.slow
def test_items_of_one_file_are_drawn_together():
    """Under no difference at all, an interval that took them for independent would too often leave 0 out."""
    draws = np.random.default_rng(1)
    wrong = {"files": 0, "items": 0}
    for trial in range(150):
        of_file = np.repeat(draws.normal(0, 1, 12), 6)
        second = of_file + draws.normal(0, 0.1, 72)
        files = [f"file {number // 6}" for number in range(72)]
        for name, groups in (("files", files), ("items", None)):
            found = paired_difference([0.0] * 72, second.tolist(), trial, groups)
            wrong[name] += found.is_lower or found.is_higher
            assert found.mean == pytest.approx(second.mean())
    assert wrong["files"] < 0.15 * 150 < 0.35 * 150 < wrong["items"]


def test_a_file_of_many_items_counts_for_as_many():
    """Twenty files of nine items that are better, twenty of one that is not."""
    groups = [f"{number}" for number in range(20) for _ in range(9)] + [f"other {number}" for number in range(20)]
    found = paired_difference([1.0] * 200, [0.0] * 180 + [1.0] * 20, 0, groups)
    assert found.mean == pytest.approx(-0.9)
    assert found.low < -0.9 < found.high < -0.75


def test_signals_tell_collapsed_clips_from_sound_ones():
    sound = signals(clip())
    assert sound.frozen == sound.black == 0
    frozen = signals(np.repeat(clip()[:1], 9, axis=0))
    assert (frozen.frozen, frozen.motion, frozen.flicker) == (1.0, 0.0, 0.0)
    black = signals((clip() // 20).astype(np.uint8))
    assert black.black == 1.0
    half = clip()
    half[4:] = 0
    assert signals(half).black == pytest.approx(5 / 9)
    blown = signals(np.where(clip() > 120, 255, 0).astype(np.uint8))
    assert blown.blown > 0.2 > sound.blown
    smooth = (clip().astype(np.float32) + np.roll(clip(), 1, 1) + np.roll(clip(), 1, 2) + np.roll(clip(), 2, 1)) / 4
    assert signals(smooth.astype(np.uint8)).sharpness < 0.5 * sound.sharpness
    flickering = clip().astype(np.int16)
    flickering[::2] += 40
    assert signals(flickering.clip(0, 255).astype(np.uint8)).flicker > 30 > 3 > sound.flicker
    brighter = np.stack([frame // 2 + 5 * number for number, frame in enumerate(np.repeat(clip()[:1], 9, axis=0))])
    assert signals(brighter.astype(np.uint8)).flicker < 1  # a steady change is none
    assert signals(clip(frames=1)).motion == 0


def test_likeness_follows_the_formulas():
    first = clip()
    noise = np.random.default_rng(1).integers(-20, 21, first.shape)
    second = (first.astype(int) + noise).clip(0, 255).astype(np.uint8)
    error = np.square(first.astype(float) - second.astype(float)).mean()
    assert psnr(first, second) == pytest.approx(10 * math.log10(255**2 / error), rel=1e-6)
    assert psnr(first, first) == math.inf
    assert ssim(first, first) == pytest.approx(1.0, abs=1e-6)
    one, other = (brightness(each).astype(float) for each in (first, second))
    places = np.arange(11) - 5
    row = np.exp(-(places**2) / (2 * 1.5**2))
    window = np.outer(row, row) / np.outer(row, row).sum()
    found = []
    for frame in range(len(one)):
        for top in range(0, 22, 3):
            for left in range(0, 22, 3):
                a, b = (each[frame, top : top + 11, left : left + 11] for each in (one, other))
                mean_a, mean_b = (window * a).sum(), (window * b).sum()
                var_a, var_b = (window * a * a).sum() - mean_a**2, (window * b * b).sum() - mean_b**2
                both = (window * a * b).sum() - mean_a * mean_b
                top_part = (2 * mean_a * mean_b + 2.55**2) * (2 * both + 7.65**2)
                found.append(top_part / ((mean_a**2 + mean_b**2 + 2.55**2) * (var_a + var_b + 7.65**2)))
    assert ssim(first[..., ::1], second) == pytest.approx(np.mean(found), abs=0.01)


def clips_of(latents: list[torch.Tensor], sources: str = "abcdefgh") -> TrainingLatents:
    read = [TrainingClip(f"clip {number}", sources[number], lambda one=one: one) for number, one in enumerate(latents)]
    return TrainingLatents(read)


def test_a_copy_of_a_training_clip_is_told_from_a_new_one():
    generator = torch.Generator().manual_seed(0)
    latents = [torch.randn(16, 3, 8, 8, generator=generator) for _ in range(6)]
    training = clips_of(latents)
    copy = training.nearest(latents[4] + 0.05 * torch.randn(16, 3, 8, 8, generator=generator))
    assert copy.name == "clip 4"
    assert copy.is_copy
    assert copy.distance == pytest.approx(0.05, rel=0.1)
    new = training.nearest(torch.randn(16, 3, 8, 8, generator=generator))
    assert not new.is_copy
    assert new.share == pytest.approx(1.0, abs=0.1)
    larger = torch.nn.functional.interpolate(latents[2][None], scale_factor=2, mode="trilinear")[0]
    assert training.nearest(larger).name == "clip 2"
    alone = clips_of(latents[:1]).nearest(latents[0])
    assert (alone.distance, alone.share, alone.is_copy) == (0.0, None, False)


def test_clips_of_one_file_say_nothing_of_how_far_files_are_apart():
    generator = torch.Generator().manual_seed(0)
    latents = [torch.randn(16, 2, 8, 8, generator=generator) for _ in range(3)]
    twice = [latent + 0.1 * torch.randn(16, 2, 8, 8, generator=generator) for latent in latents]
    copy = latents[1] + 0.1 * torch.randn(16, 2, 8, 8, generator=generator)
    found = clips_of([*latents, *twice], "abcabc").nearest(copy)
    assert found.is_copy
    assert found.share < 0.2


def test_large_latents_are_compared_in_less_detail(monkeypatch):
    monkeypatch.setattr(nearest, "MOST_NUMBERS", 500)
    latents = [torch.randn(16, 2, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    training = clips_of(latents)
    assert training.nearest(latents[3]).name == "clip 3"
    assert training._rows[1].shape == (4, 16 * 2 * 2 * 2)


def test_checkpoints_are_ranked_by_their_held_out_loss():
    base = losses([[1.0, 2.0], [3.0, 4.0], [2.0, 2.0]])
    found = {
        "early": losses([[0.9, 1.9], [2.9, 3.9], [1.9, 1.9]]),
        "middle": losses([[0.7, 1.8], [2.5, 3.7], [1.8, 1.7]]),
        "late": losses([[1.2, 2.1], [3.4, 4.0], [2.1, 2.4]]),
    }
    candidates = [Candidate(name, step, Path(f"{name}.safetensors")) for step, name in enumerate(found)]
    ranked = ranking(base, found, candidates, ["x", "y", "z"], Path())
    assert [(one.name, one.rank, one.step) for one in ranked] == [("middle", 1, 1), ("early", 2, 0), ("late", 3, 2)]
    best, _, worst = ranked
    assert best.delta == pytest.approx(-0.3)
    assert best.ci_low < best.delta < best.ci_high < 0
    assert worst.ci_low > 0
    rows = by_timestep(base, found)
    assert [row.name for row in rows] == ["250.0", "750.0"]
    assert rows[0].base == pytest.approx(2.0)
    assert rows[1].losses["late"] == pytest.approx(8.5 / 3)
    jump, run = by_activity(base, found, ["run", "jump", "run"])
    assert (jump.name, jump.num_items, run.num_items) == ("jump", 1, 2)
    assert jump.base == 3.5
    assert run.losses["early"] == pytest.approx(1.65)
    assert whole("others", base, found).losses["late"] == pytest.approx(15.2 / 6)


def test_losses_of_two_experts_are_joined_by_noise_level():
    low, high = losses([[1.0, 2.0], [3.0, 4.0]], (0.2, 0.6)), losses([[5.0], [6.0]], (0.9,))
    both = joined([high, low])
    assert both.sigmas == (0.2, 0.6, 0.9)
    assert both.values == ((1.0, 2.0, 5.0), (3.0, 4.0, 6.0))
    with pytest.raises(ValueError, match="different items"):
        joined([low, losses([[5.0]], (0.9,))])
    with pytest.raises(ValueError, match="different points"):
        whole("x", low, {"a": high})


def clip_model(folder: Path) -> Path:
    """A tiny CLIP with random weights, and a processor that knows single letters."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    letters = [*"abcdefghijklmnopqrstuvwxyz", *(f"{letter}</w>" for letter in "abcdefghijklmnopqrstuvwxyz")]
    vocabulary = {word: number for number, word in enumerate([*letters, "<|startoftext|>", "<|endoftext|>"])}
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=[])
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    ends = {"bos_token_id": len(letters), "eos_token_id": len(letters) + 1, "pad_token_id": len(letters) + 1}
    torch.manual_seed(0)
    model = CLIPModel(
        CLIPConfig(
            text_config={**small, **ends, "vocab_size": len(vocabulary), "max_position_embeddings": 77},
            vision_config={**small, "image_size": 32, "patch_size": 16},
            projection_dim=8,
        )
    )
    model.save_pretrained(folder)
    size = {"shortest_edge": 32}
    CLIPProcessor(CLIPImageProcessor(size=size, crop_size={"height": 32, "width": 32}), tokenizer).save_pretrained(
        folder
    )
    return folder


def test_the_clip_score_is_the_mean_cosine_of_frames_and_words(tmp_path):
    score = ClipScore(clip_model(tmp_path / "clip"), torch.device("cpu"))
    frames = clip(frames=20, size=48)
    found = score(frames, "a red cat")
    from transformers import CLIPModel, CLIPProcessor

    model = CLIPModel.from_pretrained(tmp_path / "clip").eval()
    processor = CLIPProcessor.from_pretrained(tmp_path / "clip")
    cosines = []
    for index in (0, 3, 5, 8, 11, 14, 16, 19):
        with torch.no_grad():
            each = model(**processor(text=["a red cat"], images=[frames[index]], return_tensors="pt"))
        cosines.append(torch.cosine_similarity(each.image_embeds, each.text_embeds).item())
    assert found == pytest.approx(100 * np.mean(cosines), abs=1e-3)
    assert score(frames, "zzz") != pytest.approx(found, abs=1e-3)
    with pytest.raises(WangenError, match="no model folder"):
        ClipScore(tmp_path, torch.device("cpu"))
    (tmp_path / "clip/config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(WangenError, match="no CLIP model"):
        ClipScore(tmp_path / "clip", torch.device("cpu"))


def test_the_two_loras_of_a_moment_are_found_whatever_their_run_is_called(tmp_path: Path):
    for number, expert in enumerate(("high_noise", "low_noise")):
        keys = (f"diffusion_model.blocks.0.ffn.0.lora_{half}.weight" for half in "AB")
        file = tmp_path / f"test_low_noise_only_{expert}.safetensors"
        told = {"wangen.expert": expert, "ss_steps": "2", "wangen.run_steps": str(number + 3)}
        save_file({key: torch.full((2, 2), number + 1.0) for key in keys}, file, told)
    (found,) = find_candidates([tmp_path], [], experts=True)
    assert (found.name, found.step, found.file_steps) == ("test_low_noise_only", 4, (3, 4))
    one, best, other = (tmp_path / f"{name}.safetensors" for name in ("one", "best", "other"))
    for path, told in ((one, {"ss_steps": "3"}), (best, {"ss_steps": "3", "wangen.judged_at": "a"}), (other, {})):
        save_file({f"diffusion_model.blocks.0.ffn.0.lora_{half}.weight": torch.ones(2, 2) for half in "AB"}, path, told)
    assert [found.name for found in find_candidates([one, best, other], [], experts=False)] == ["one", "other"]


def test_what_speaks_against_the_best_is_said_where_it_does():
    hard = [[1.0 + number, 2.0 + number] for number in range(6)]

    def less(by: float) -> Losses:
        return losses([[value - by * (1 + number % 2) for value in row] for number, row in enumerate(hard)])

    def said(step_3: float, step_6: float, groups: str, **changes: object) -> str:
        judged = replace(evaluation(), **{"videos": (), "memorisation": (), **changes})
        return "\n".join(warnings_of(judged, less(0), {"step 3": less(step_3), "step 6": less(step_6)}, list(groups)))

    assert said(0.1, 0.3, "abcdef") == ""
    assert said(0.3, 0.3, "abcdef") == "step 6 cannot be told from step 3: look at the videos of both"
    assert "step 6, the best, has a higher held-out loss" in said(-0.5, -0.3, "abcdef")
    assert said(0.1, 0.3, "aabbcd").startswith("only 4 files held out (clips of one video are one)")
    calm = {"frozen": 0.0, "black": 0.0, "motion": 1.0, "flicker": 1.0}
    for name, base, own, words in (
        ("frozen", 0.2, 0.9, "1 video of step 6 is frozen where the base's is not"), ("frozen", 0.9, 0.9, ""),
        ("motion", 1.0, 0.4, "move less than half as much as the base's"), ("motion", 1.0, 0.6, ""),
        ("motion_to_training", 1.0, 0.4, "less than half as much as the training clips"),
        ("flicker", 1.0, 2.5, "flicker more than twice as much"), ("flicker", 1.0, 1.9, ""),
    ):  # fmt: skip
        pair = {"base": {**calm, name: base}, "step 6": {**calm, name: own}}
        found = said(0.1, 0.3, "abcdef", videos=(Video("a", "a", 1, {}, pair),)).splitlines()
        assert (len(found), words in "".join(found)) == (bool(words), True), name
    assert len(list(forgotten("step 6", {"base": less(0), "step 6": less(-0.1)}, list("abcdef")))) == 1
    assert not list(forgotten("step 6", {"base": less(0), "step 6": less(0.1)}, list("abcdef")))


def test_each_expert_is_judged_in_its_own_range():
    points = Points(2, 0.9, 0, 0)
    assert points.sigmas(high_noise=True) == pytest.approx((0.925, 0.975))
    assert points.sigmas(high_noise=False) == pytest.approx((0.225, 0.675))


def test_what_was_judged_before_counts_at_the_same_points_and_if_it_is_whole(tmp_path: Path):
    def judging(**changes: Any) -> Any:
        points = replace(Points(2, 0.9, 0, 0), **changes)
        return Judging(None, (), None, points, {}, tmp_path)  # type: ignore[arg-type]

    changes = ({}, {"num_timesteps": 3}, {"boundary": 0.8}, {"seed": 1}, {"condition_frames": 1})
    assert len({judging(**change)._file(None, []) for change in changes}) == len(changes)
    items = [SimpleNamespace(entries=[SimpleNamespace(key="a")])]
    for values, known in (([[1.0, 2.0]], True), ([[1.0, 2.0]] * 2, False), ([[1.0]], False)):
        judging()._file(None, items).write_text(json.dumps(losses(values).as_facts()), encoding="utf-8")
        assert (judging()._known(None, items) is not None) == known


def test_the_frames_of_the_last_training_are_those_that_are_given(tmp_path: Path):
    def lora(name: str, before: int, last: int) -> Path:
        told = {"wangen.fingerprint": json.dumps({"condition_frames": str(last)}),
                "wangen.trained_before": json.dumps([{"condition_frames": str(before)}])}  # fmt: skip
        save_file({"a": torch.zeros(1)}, tmp_path / f"{name}.safetensors", told)
        return tmp_path / f"{name}.safetensors"

    first, second = lora("first", 1, 5), lora("second", 9, 5)
    assert given_frames([first, second]) == 5
    with pytest.raises(UsageError, match=r"first\.safetensors with 5, third\.safetensors with 1"):
        given_frames([first, lora("third", 5, 1)])


def test_what_only_one_expert_has_is_left_out_where_there_are_pairs(tmp_path: Path, caplog):
    names = ("a_high_noise", "a_low_noise", "a_low_noise-step00000002")
    for number, name in enumerate(names):
        keys = (f"diffusion_model.blocks.0.ffn.0.lora_{half}.weight" for half in "AB")
        save_file({key: torch.full((2, 2), number + 1.0) for key in keys}, tmp_path / f"{name}.safetensors")
    (found,) = find_candidates([tmp_path], [], experts=True)
    assert found.name == "a"
    assert "left out, without one of the other expert: a_low_noise-step00000002.safetensors" in caplog.text
    (tmp_path / "a_high_noise.safetensors").unlink()
    found = find_candidates([tmp_path], [], experts=True)
    assert [(one.name, one.file_high_noise) for one in found] == [("a_low_noise-step00000002", None),
                                                                  ("a_low_noise", None)]  # fmt: skip
    for path in tmp_path.glob("*.safetensors"):
        path.rename(path.with_name(path.name.replace("low", "high")))
    found = find_candidates([tmp_path], [], experts=True)
    assert {one.file for one in found} == {None}
    assert "a_high_noise is judged with the high-noise expert's LoRA alone" in caplog.text
    (tmp_path / "a_high_noise.safetensors").rename(tmp_path / "b_low_noise.safetensors")
    with pytest.raises(WangenError, match="none of these LoRAs of two experts belong together"):
        find_candidates([tmp_path], [], experts=True)


def test_activities_take_turns_and_a_caption_counts_again_with_other_pictures():
    def item(name: str, label: str, caption: str, *controls: str) -> SimpleNamespace:
        told = SimpleNamespace(caption=caption, label=label)
        return SimpleNamespace(name=name, sample=SimpleNamespace(item=told),
                               controls=[SimpleNamespace(content_key=key) for key in controls])  # fmt: skip

    items = [item("a", "run", "he runs"), item("b", "run", "he runs"), item("c", "run", "she runs"),
             item("d", "", "a hat", "x"), item("e", "", "a hat", "y"), item("f", "", "a hat", "y")]  # fmt: skip
    assert [one.name for one in _by_turns(items)] == ["a", "d", "c", "e"]  # type: ignore[arg-type, attr-defined]


def test_a_note_of_other_training_clips_tells_nothing_and_motion_is_that_of_the_training(tmp_path: Path):
    def job(who: Candidate | None, frames: np.ndarray) -> Job:
        name = who.name if who else "base"
        prompt: Any = SimpleNamespace(prompt="a cat", seed=1, controls=())
        made = Job("walk", prompt, 1, who, tmp_path / f"{name}.mp4", {"seed": 1})
        write_media(made.path, torch.from_numpy(frames).permute(3, 0, 1, 2) / 127.5 - 1, 8, {})
        return made

    training = TrainingLatents([TrainingClip("its name now", "a", lambda: torch.ones(1), "key")], "digest")
    jobs = [job(None, clip()), job(Candidate("own", 1, Path("own.safetensors")), clip(1))]
    near = {"name": "one", "distance": 0.1, "share": 0.2, "key": "key"}
    for told, found in (("digest", near | {"name": "its name now"}), ("another", {})):
        note = {"training": told, "settings": jobs[0].digest, "nearest": near}
        jobs[0].note.write_text(json.dumps(note), encoding="utf-8")
        assert jobs[0].nearest(training) == found
    ((video,), _) = describe(jobs, tmp_path, None, 50.0, None)
    for own in video.signals.values():
        assert own["motion_to_training"] == pytest.approx(own["motion"] / 50.0)
