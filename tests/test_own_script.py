"""What `check` says of the script that runs it: its bytes, its block of knobs, the lines of its other steps."""

from pathlib import Path

import pytest
from shells.bundles import PLATFORMS, bundle, steps

from wangen.generator.errors import WangenError
from wangen.generator.own_script import read_own_script
from wangen.generator.scripts import render

GOLDEN = sorted((Path(__file__).parent.parent / "examples" / "published").rglob("*_*.*"))
SCRIPTS = [path for path in GOLDEN if path.suffix[1:] in PLATFORMS and not path.name.startswith("setup")]
WRITE = "with letters, digits and . _ , + - as its value, or publish again"
SEED = {"sh": b"SEED='42'", "bat": b'set "SEED=42"', "ps1": b"$SEED = '42'"}


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Read a script that is changed by hand, as `check` in it does."""

    def reading(shell, *changes, data=None):
        path = tmp_path / f"train_red_house.{shell}"
        data = data or render(bundle(shell, steps("eps=1e-6")), shell, "train")
        for old, new in changes:
            assert old in data
            data = data.replace(old, new, 1)
        path.write_bytes(data)
        monkeypatch.setenv("WANGEN_SCRIPT", str(path))
        return read_own_script()

    return reading


def told(own):
    """What is wrong, without the file's name."""
    return [str(finding).partition(": ")[2] for finding in own.findings]


def faults(own):
    """What is wrong with the lines of the steps."""
    return [f"{where.split(', ')[1]}: {step.found}" for where, step in own.steps if isinstance(step, WangenError)]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_script_as_it_was_published_is_right(path, monkeypatch):
    monkeypatch.setenv("WANGEN_SCRIPT", str(path))
    own = read_own_script()
    assert (own.findings, own.warnings, faults(own), len(own.steps) > 1) == ([], [], [], True)


@pytest.mark.parametrize("shell", PLATFORMS)
def test_a_misspelt_knob_is_named_and_the_steps_are_judged_without_it(shell, read):
    misspelt = SEED[shell].replace(b"SEED", b"SEEED")
    other = {"sh": b"MIXED_PRECISION='", "bat": b'set "MIXED_PRECISION=', "ps1": b"$MIXED_PRECISION = '"}[shell]
    own = read(shell, (SEED[shell], misspelt), (other + b"bf16", other + b"fp16"))
    assert told(own) == [
        "no step uses the knob SEEED; did you mean SEED?",
        f"the knob SEED is not set; write it into the block of knobs, {WRITE}",
    ]
    (fault,) = faults(own)
    assert fault.startswith("train: --mixed_precision fp16: use bf16")
    assert len(own.steps) == 5


@pytest.mark.parametrize("shell", PLATFORMS)
def test_a_knob_that_is_taken_out_and_one_that_nobody_asks_for(shell, read):
    """One that no step uses is no error: its step may have been taken out, and the script's list names it."""
    mine = SEED[shell].replace(b"SEED", b"QQQ")
    own = read(shell, (SEED[shell], mine))
    assert [warning.partition(": ")[2] for warning in own.warnings] == ["no step uses the knob QQQ"]
    assert told(own) == [f"the knob SEED is not set; write it into the block of knobs, {WRITE}"]
    line = next(line for line in render(bundle(shell), shell, "train").splitlines() if SEED[shell] in line + b"\n")
    own = read(shell, (line, line + b"\r\n" * (shell == "bat") + b"\n" * (shell != "bat") + mine.strip()))
    assert (told(own), len(own.warnings)) == ([], 1)
    assert told(read(shell, (SEED[shell], b""))) == [
        f"the knob SEED is not set; write it into the block of knobs, {WRITE}"
    ]


def test_a_knob_in_a_line_that_sets_none_is_told_once(read):
    own = read("bat", (b'"SEED=42"', b'"SEED = 7"'), (b'"NETWORK_DIM=16"', b'"NETWORK_DIM=0"'))
    assert told(own) == ["no knob is set by 'set \"SEED = 7\"'; write letters, digits and . _ , + - as its value"]
    assert faults(own) == ["train: --network_dim must be above 0, got 0"]


def test_a_blank_behind_a_value_is_part_of_it_for_cmd(read):
    own = read("bat", (b'set "ATTENTION=auto"', b"set ATTENTION=sdpa "))
    assert told(own) == ["no knob is set by 'set ATTENTION=sdpa'; write letters, digits and . _ , + - as its value"]
    assert told(read("bat", (b'set "ATTENTION=auto"', b'set "ATTENTION=sdpa" \t'))) == []
    assert told(read("bat", (b'set "ATTENTION=auto"', b"set ATTENTION=sdpa"))) == []


def test_a_bat_that_an_editor_spoilt_is_named(read):
    data = render(bundle("bat"), "bat", "train")
    assert told(read("bat", data=b"\xef\xbb\xbf" + data)) == [
        "this file begins with a byte order mark, which spoils its first line; "
        "save it as UTF-8 without a byte order mark"
    ]
    own = read("bat", data=data.replace(b"\r\n", b"\n"))
    assert told(own) == [
        "this .bat file has LF line ends; cmd needs CRLF, and misses labels without; "
        "save it with Windows (CRLF) line ends"
    ]
    assert len(own.steps) == 5


def test_a_ps1_without_its_mark_is_told_to_whom_it_concerns(read):
    data = render(bundle("ps1", steps("é")), "ps1", "train")
    own = read("ps1", data=data.removeprefix(b"\xef\xbb\xbf"))
    assert own.findings == []
    (warning,) = own.warnings
    assert "Windows PowerShell reads this file in another code page" in warning
    assert warning.endswith("save it as UTF-8 with BOM")
    assert read("ps1", data=data).warnings == []
