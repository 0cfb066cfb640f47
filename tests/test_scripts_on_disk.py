"""Scripts that are there already: values of knobs are kept, other edits stay, what is not ours is left alone."""

from dataclasses import replace

import pytest
from shells.bundles import bundle, prompts, put, steps

from wangen.generator.publish.texts import script_text
from wangen.generator.scripts import invalid_knobs, merge, parsed_steps, read_knobs, read_steps, render, untouched

SHELLS = ("sh", "bat", "ps1")
EDITS = {"sh": ("SEED='42'", "SEED=7  # mine"), "bat": ('set "SEED=42"', "set SEED=7"), "ps1": ("'42'", "7")}


def publish(path, bundle, shell, name):
    """Make or renew one script; what was done with it."""
    assert path.suffix == f".{shell}"
    text = script_text(path, bundle, name)
    if text.data:
        put(text.target, text.data)
    assert text.mode == (0o755 if shell == "sh" else 0o644)
    return text.state


def edit(path, old, new):
    text = path.read_bytes()
    assert old.encode() in text
    path.write_bytes(text.replace(old.encode(), new.encode(), 1))


@pytest.mark.parametrize("shell", SHELLS)
def test_publishing_twice_changes_nothing(shell, tmp_path):
    path = tmp_path / f"train_red_house.{shell}"
    assert publish(path, bundle(shell), shell, "train") == "new"
    before = path.stat().st_mtime_ns
    assert publish(path, bundle(shell), shell, "train") == "same"
    assert path.stat().st_mtime_ns == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_changed_knob_is_kept_and_the_rest_is_renewed(shell, tmp_path):
    path = tmp_path / f"train_red_house.{shell}"
    publish(path, bundle(shell), shell, "train")
    edit(path, *EDITS[shell])
    assert untouched(path.read_bytes())
    for rank in (32, 64):
        new = bundle(shell, steps("other", network_dim=rank), version="0.2.0")
        assert publish(path, new, shell, "train") == "changed"
        knobs = read_knobs(path.read_bytes())
        assert (knobs["SEED"], knobs["NETWORK_DIM"]) == ("7", str(rank))
    assert not path.with_name(path.name + ".new").exists()


@pytest.mark.parametrize(("shell", "mine"), [("sh", "SEED=7  # mine"), ("ps1", "$SEED = '7'# mine")])
def test_a_remark_behind_a_knob_stays(shell, mine, tmp_path):
    path = tmp_path / f"train_red_house.{shell}"
    publish(path, bundle(shell), shell, "train")
    edit(path, {"sh": "SEED='42'", "ps1": "$SEED = '42'"}[shell], mine)
    for rank in (32, 64):
        new = bundle(shell, steps("other", network_dim=rank))
        assert publish(path, new, shell, "train") == "changed"
        (line,) = [line for line in path.read_text("utf-8-sig").splitlines() if line.endswith("# mine")]
        assert "SEED" in line
        assert read_knobs(path.read_bytes())["SEED"] == "7"
    assert publish(path, new, shell, "train") == "same"


@pytest.mark.parametrize("shell", SHELLS)
def test_another_edit_stays_and_the_new_text_goes_beside_it(shell, tmp_path):
    path = tmp_path / f"train_red_house.{shell}"
    publish(path, bundle(shell), shell, "train")
    edit(path, "wangen: step 1 of", "MINE: step 1 of")
    mine = path.read_bytes()
    assert not untouched(mine)
    assert publish(path, bundle(shell), shell, "train") == "kept"
    assert path.read_bytes() == mine
    assert path.with_name(path.name + ".new").read_bytes() == render(bundle(shell), shell, "train")


def test_the_new_text_beside_an_edited_script_has_the_users_knobs(tmp_path):
    path = tmp_path / "train_red_house.sh"
    publish(path, bundle("sh"), "sh", "train")
    edit(path, *EDITS["sh"])
    edit(path, "wangen: step 1 of", "MINE: step 1 of")
    assert publish(path, bundle("sh"), "sh", "train") == "kept"
    assert path.with_name(path.name + ".new").read_bytes() == render(bundle("sh"), "sh", "train", {"SEED": "7"})


@pytest.mark.parametrize("line", ["export CUDA_VISIBLE_DEVICES=1", "SEED='$(date)'", "SEED="])
def test_other_lines_among_the_knobs_are_an_edit(line, tmp_path):
    path = tmp_path / "train_red_house.sh"
    publish(path, bundle("sh"), "sh", "train")
    edit(path, "SEED='42'", line)
    assert publish(path, bundle("sh"), "sh", "train") == "kept"


WRONG = {"sh": "SEED='4 2'", "bat": 'set "SEED=4&2"', "ps1": "$SEED = '4"}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_line_that_sets_no_knob_is_named(shell, tmp_path):
    path = tmp_path / f"train_red_house.{shell}"
    publish(path, bundle(shell), shell, "train")
    assert invalid_knobs(path.read_bytes()) == []
    line = next(line for line in path.read_text(encoding="utf-8-sig").splitlines() if "SEED" in line and "42" in line)
    edit(path, line, f"  {WRONG[shell]} ")
    mine = path.read_bytes()
    assert invalid_knobs(mine) == [WRONG[shell]]
    assert publish(path, bundle(shell), shell, "train") == "kept"
    assert path.read_bytes() == mine


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"echo mine\n"])
def test_a_file_without_knobs_has_no_wrong_ones(data):
    assert invalid_knobs(data) == []


@pytest.mark.parametrize("data", [b"", b"echo mine\n", b"\xff\xfe", b"#!/bin/bash\n# wangen-digest: 0\n"])
def test_a_file_that_is_not_ours_is_never_overwritten(data, tmp_path):
    path = tmp_path / "train_red_house.sh"
    path.write_bytes(data)
    assert publish(path, bundle("sh"), "sh", "train") == "kept"
    assert path.read_bytes() == data


def test_a_changed_knob_that_is_gone_keeps_the_old_script(tmp_path):
    path = tmp_path / "cache_red_house.sh"
    publish(path, bundle("sh"), "sh", "cache")
    edit(path, "SEED='42'", "SEED='7'")
    fewer = bundle("sh", steps()[:3])
    assert merge(path.read_bytes(), fewer, "sh", "cache")[1]
    assert publish(path, fewer, "sh", "cache") == "kept"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_knob_that_gets_another_name_keeps_its_value(shell, tmp_path):
    """BLOCKS_TO_SWAP is that of training alone no more when a step that generates comes, and is again when it goes."""
    path = tmp_path / f"train_red_house.{shell}"
    alone = steps(blocks_to_swap=0)
    with_more = (*alone, *prompts("a house"))
    publish(path, bundle(shell, alone), shell, "train")
    ours = {"sh": "SWAP='0'", "bat": "SWAP=0", "ps1": "SWAP = '0'"}[shell]
    edit(path, ours, ours.replace("0", "20"))
    for made, name in ((with_more, "BLOCKS_TO_SWAP_TRAIN"), (alone, "BLOCKS_TO_SWAP")):
        assert publish(path, bundle(shell, made), shell, "train") == "changed"
        assert read_knobs(path.read_bytes())[name] == "20"
        swapped = {words[0]: "--blocks_to_swap 20" in " ".join(words) for words in read_steps(path.read_bytes(), shell)}
        assert [step for step, is_swapped in swapped.items() if is_swapped] == ["train"]
    assert not path.with_name(path.name + ".new").exists()


def test_the_new_text_beside_a_script_with_a_line_of_its_own_has_the_users_knobs(tmp_path):
    """Only the shell knows what stands for the variable of somebody's own."""
    path = tmp_path / "train_red_house.sh"
    publish(path, bundle("sh", steps(blocks_to_swap=0)), "sh", "train")
    edit(path, "SWAP='0'", "SWAP='20'")
    edit(path, '--seed "$SEED"', '--seed "$MYSEED"')
    assert publish(path, bundle("sh", steps(blocks_to_swap=0)), "sh", "train") == "kept"
    assert read_knobs(path.with_name(f"{path.name}.new").read_bytes())["BLOCKS_TO_SWAP"] == "20"


def test_knobs_that_become_one_and_differ_keep_the_old_script(tmp_path):
    path = tmp_path / "train_red_house.sh"
    check, latents, text, judge, train = steps()
    apart = (check, latents, replace(text, num_workers=2), judge, train)
    publish(path, bundle("sh", apart), "sh", "train")
    edit(path, "NUM_WORKERS_CACHE_TEXT='2'", "NUM_WORKERS_CACHE_TEXT='7'")
    assert merge(path.read_bytes(), bundle("sh", steps()), "sh", "train")[1]
    edit(path, "NUM_WORKERS_CACHE_LATENTS='4'", "NUM_WORKERS_CACHE_LATENTS='7'")
    made, stays = merge(path.read_bytes(), bundle("sh", steps()), "sh", "train")
    assert (stays, read_knobs(made)["NUM_WORKERS"]) == (False, "7")


@pytest.mark.parametrize("shell", SHELLS)
def test_line_ends_that_an_editor_changed_are_mended(shell, tmp_path):
    path = tmp_path / f"train_red_house.{shell}"
    publish(path, bundle(shell), shell, "train")
    original = path.read_bytes()
    plain = original.replace(b"\r\n", b"\n")
    path.write_bytes(plain.replace(b"\n", b"\r\n") if shell == "sh" else plain)
    assert publish(path, bundle(shell), shell, "train") == "changed"
    assert path.read_bytes() == original


def test_one_knob_of_precision_is_that_of_caching_and_of_training():
    """Training encodes prompts and decodes samples; lines that disagree are a problem for `wangen check`."""
    latents, text, check, train = steps("eps=1e-6")[1:]
    text, train = replace(text, t5_dtype="bfloat16"), replace(train, vae_dtype="float32", t5_dtype="bfloat16")
    data = render(bundle("sh", (latents, text, check, train)), "sh", "train")
    for old, new in (
        (b"VAE_DTYPE='float32'", b"VAE_DTYPE='bfloat16'"),
        (b"T5_DTYPE='bfloat16'", b"T5_DTYPE='float32'"),
    ):
        assert data.count(old) == 1
        data = data.replace(old, new)
    found = dict(parsed_steps(data, "sh"))
    assert {found[name].vae_dtype for name in ("cache_latents", "check_cache", "train")} == {"bfloat16"}
    assert {found[name].t5_dtype for name in ("cache_text", "train")} == {"float32"}
