"""`wangen doctor`: what it says of machines of every kind, and that it only looks."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from doctor_machines import MACHINES, machine, wsl
from helpers import read_tree, write_tree

from wangen.generator import doctor, reference
from wangen.generator.cli import main
from wangen.generator.doctor import examine, trials
from wangen.generator.doctor.catalogue import KINDS
from wangen.generator.doctor.facts import THIS, Trial
from wangen.generator.doctor.system import VARIABLES
from wangen.generator.setup import hardware


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_has_what_is_the_matter_with_it_and_nothing_else(name):
    facts, expected = MACHINES[name]
    findings = examine(facts)
    assert {finding.name for finding in findings if finding.level != "ok"} == expected
    for finding in findings:
        if finding.level != "ok":
            assert finding.cure, finding
            assert (finding.level, finding.what != "") == (KINDS[finding.name].level, True)


def test_every_kind_of_finding_is_one_of_some_machine():
    assert set().union(*(expected for _, expected in MACHINES.values())) == set(KINDS)


def test_the_page_of_the_docs_has_every_kind_of_finding_with_its_cure():
    page = reference.DOCTOR_PAGE.read_text(encoding="utf-8")
    assert page == reference.doctor_page(page), "run python -m wangen.generator.reference"
    for kind in KINDS.values():
        assert f"| `{kind.name}` |" in page
        assert kind.cure.replace("|", r"\|") in page
    for name in VARIABLES:
        assert f"`{name}`" in page


@pytest.mark.parametrize(
    ("name", "why", "said"),
    [
        ("torch for the cpu", THIS, '"torch" --index-url https://download.pytorch.org/whl/cu128'),
        ("torch for the cpu", "the bundle's scripts take it", "setup_wangen"),
        ("torch for cuda, amd card", THIS, "whl/rocm"),
        ("driver of 2022", THIS, "newest driver"),
        ("half installed", THIS, 'pip install ".[runtime]"'),
        ("half installed", "the bundle's scripts take it", "run the setup script"),
        ("dll is missing", "the bundle's scripts take it", "Visual C++"),
        ("killed for memory", THIS, "free memory"),
        ("torchvision of another torch", THIS, 'pip install ".[runtime]"'),
    ],
)
def test_the_cure_is_the_line_for_this_machine(name, why, said):
    facts, _ = MACHINES[name]
    facts = replace(facts, python=replace(facts.python, why=why))
    (problem,) = [finding for finding in examine(facts) if finding.level == "problem"]
    assert said in problem.cure
    assert "this script" not in problem.cure


def test_problems_come_last_and_each_says_where_and_what_to_do():
    lines = [str(finding) for finding in examine(machine(place={"free": 1, "file_system": "nfs"}))]
    assert lines[-1].splitlines() == [
        "  problem  1 bytes are free",
        "           where: /ai",
        f"           do:    {KINDS['disk-full'].cure}",
    ]
    assert lines[-2].startswith("  note     workspace: a network drive (nfs)")
    assert lines[0].startswith("  ok ")


def test_a_name_that_steers_the_terminal_is_shown_as_it_is():
    (line,) = [
        str(finding)
        for finding in examine(machine(place={"cloud": "Dropbox", "path": Path("/a\x1b[31m\nb")}))
        if finding.name == "cloud"
    ]
    assert r"/a\x1b[31m\nb" in line


def test_folders_on_one_disk_are_said_once():
    facts = wsl(place={"file_system": "9p", "mount": "/mnt/c"})
    twice = [finding for finding in examine(facts) if finding.name == "wsl-drive"]
    assert len(twice) == 1


FAKE = """
import json, os, signal, sys
sys.stdout.write("a library's own words\\n")
for name in sys.argv[3:]:
    print(json.dumps({"trial": name}), flush=True)
    if name == "cards":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "vae":
        raise ValueError("no convolution")
    if name == "speed":
        import time
        time.sleep(60)
    print(json.dumps({"trial": name, "found": {"name": name}}), flush=True)
"""


@pytest.fixture
def fake(tmp_path):
    """An interpreter whose trials crash, fail and hang."""
    (tmp_path / "fake.py").write_text(FAKE)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/fake.py" "$@"\n')
    python.chmod(0o755)
    return str(python)


posix = pytest.mark.skipif(os.name == "nt", reason="the interpreter is a shell script")


@pytest.mark.slow
@posix
def test_what_crashes_fails_or_hangs_leaves_the_other_trials(fake):
    made = trials.run(fake, ("torch", "cards", "vae", "speed", "video"), limit_s=3)
    assert made == {
        "torch": Trial(found={"name": "torch"}),
        "cards": Trial(crash="signal SIGSEGV", error="no message"),
        "vae": Trial(error="ValueError: no convolution"),
        "speed": Trial(crash="it was still at it after 3 seconds"),
        "video": Trial(found={"name": "video"}),
    }


@posix
def test_without_a_torch_only_what_needs_none_is_tried(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    python.chmod(0o755)
    made = trials.run(str(python))
    assert set(made) == {"torch", "video"}
    assert made["torch"].error == "ModuleNotFoundError: No module named 'torch'"


def test_an_interpreter_that_cannot_be_started_is_a_finding(tmp_path):
    path = tmp_path / "python"
    assert trials.interpreter(path, "", (), "cuda").starts == f"{path} does not run: No such file or directory"
    assert trials.run(str(path))["torch"].failed


@posix
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'Fatal: no encodings' >&2; echo >&2; exit 3", "exit code 3 Fatal: no encodings"),
        ("echo nonsense", "its answer cannot be read"),
    ],
)
def test_an_interpreter_that_is_broken_says_why(tmp_path, script, reason):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    assert trials.interpreter(path, "", (), "cuda").starts == f"{path} does not run: {reason}"


def test_a_file_that_hides_a_library_is_found(quick, capsys):
    for name in ("torch.py", "json.py", "cats.py", "torch.txt", "email/cats.txt", "av/__init__.py"):
        (quick / name).parent.mkdir(exist_ok=True)
        (quick / name).touch()
    assert doctor._shadows(quick) == ("av", "json.py", "torch.py")


KERNELS = {
    "flash_attn/__init__.py": "import ctypes\ndef flash_attn_func(*inputs, **order): ctypes.string_at(0)\n",
    "xformers/__init__.py": "",
    "xformers/ops.py": "def memory_efficient_attention(query, key, value): return value * 2\n",
    "sageattention.py": "from torch.nn.functional import scaled_dot_product_attention as attend\n"
    "def sageattn(query, key, value, **how): return attend(query, key, value).detach()\n",
}


@pytest.mark.slow
@posix
def test_real_trials_with_a_kernel_that_crashes_and_one_that_is_wrong(tmp_path, monkeypatch):
    write_tree(tmp_path, KERNELS)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    kernels = ("attention sdpa", "attention xformers", "attention sage", "attention flash3")
    made = trials.run(sys.executable, ("torch", "cards", *kernels, "vae", "lock", "attention flash", "video"))
    assert {name for name, trial in made.items() if trial.failed} == {"attention flash"}
    assert made["attention flash"].crash == "signal SIGSEGV"
    assert made["attention xformers"].found == {"installed": True, "runs": False, "reason": "its output is wrong"}
    assert made["attention sage"].found == {"installed": True, "runs": True, "reason": ""}
    assert made["attention flash3"].found == {"installed": False}
    assert made["attention sdpa"].found["runs"]
    assert made["vae"].found["finite"]
    assert made["video"].found == {"num_frames": 5, "ffmpeg": True}
    findings = {finding.name for finding in examine(machine(trials=made))}
    assert {"attention-crash", "attention-package"} <= findings


def test_every_trial_is_one_of_the_runtimes():
    from wangen.runtime.doctor import TRIALS

    assert tuple(TRIALS) == trials.TRIALS


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """No process is started for PyTorch, and the working folder is a fresh one."""
    found = {"torch": Trial(found={"version": "2.9.1+cpu", "cuda": None, "hip": None})}
    monkeypatch.setattr(trials, "run", lambda python: found)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_outside_of_a_workspace_it_looks_at_this_folder_and_leaves_it_as_it_is(quick, capsys):
    (quick / "a.txt").write_text("a")
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == 1
    assert found["ok"] is (code == 0)
    assert [place["what"] for place in found["facts"]["places"]] == ["this folder"]
    assert found["facts"]["places"][0]["write_rate"] > 0
    assert {finding["level"] for finding in found["findings"]} <= {"ok", "note", "problem"}
    assert read_tree(quick) == {"a.txt": b"a"}


def test_inside_a_workspace_it_looks_at_its_roots(quick, capsys):
    root = quick / "ai"
    lines = ['platforms = ["linux"]', "[platform.linux]", f"root = '{root}'", f"models = '{quick}/weights'"]
    (quick / "wangen.toml").write_text("\n".join(lines))
    before = read_tree(quick)
    capsys.readouterr()
    main(["doctor", "--json"])
    places = json.loads(capsys.readouterr().out)["facts"]["places"]
    assert [place["what"] for place in places] == ["workspace", "bundle for linux", "models for linux"]
    assert places[1]["wanted"] == str(root)
    assert places[1]["path"] == str(quick)  # what is not there yet is looked at where it would be made
    assert read_tree(quick) == before


def test_a_workspace_that_cannot_be_read_is_a_finding(quick, capsys):
    (quick / "wangen.toml").write_text("platfroms = []\n")
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "  problem  unknown key" in shown
    assert f"           where: {quick / 'wangen.toml'}\n           do:    did you mean platforms?" in shown


def test_a_folder_that_is_no_workspace_is_wrong_usage(quick, capsys):
    assert main(["doctor", "--workspace", "nowhere"]) == 2
    assert "no wangen.toml" in capsys.readouterr().err


@posix
def test_a_folder_that_is_gone_is_said(quick, capsys):
    gone = quick / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert main(["doctor"]) == 1
    assert "do:    go to another folder" in capsys.readouterr().err


@posix
@pytest.mark.slow
def test_a_driver_that_hangs_is_asked_once(quick, monkeypatch, capsys):
    tool = quick / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{quick}:{os.environ['PATH']}")
    monkeypatch.setattr(hardware, "_TOOL_TIMEOUT_S", 1)
    assert main(["doctor"]) == 1
    assert "the NVIDIA driver does not answer: nvidia-smi gave no answer within 1 seconds" in capsys.readouterr().out


def test_the_python_is_that_of_the_scripts(quick, monkeypatch):
    assert main(["init", "."]) == 0
    target = doctor._native(doctor.workspaces.read(quick))
    monkeypatch.delenv("WANGEN_PYTHON", raising=False)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    assert trials.choose(target, "/this", quick)[0] == Path("/this")
    inside = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    own = target.folder.joinpath("venv", *inside)
    own.parent.mkdir(parents=True)
    own.touch()
    assert trials.choose(target, "/this", quick) == (own, "the bundle's scripts take it", ())
    monkeypatch.setenv("WANGEN_PYTHON", "/none")  # the scripts stop at it, too
    assert trials.choose(target, "/this", quick) == (Path("/none"), "WANGEN_PYTHON names it", ())


def test_in_a_bundle_it_takes_the_bundles_environment(quick, monkeypatch):
    for name in ("WANGEN_PYTHON", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    own = quick.joinpath(".venv", *(("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")))
    own.parent.mkdir(parents=True)
    own.touch()
    assert trials.choose(None, "/this", quick) == (Path("/this"), THIS, ())  # any folder's is nothing to wangen
    (quick / "setup_wangen.sh").touch()
    assert trials.choose(None, "/this", quick) == (own, "the bundle's scripts take it", ())
    own.unlink()
    assert trials.choose(None, "/this", quick)[2][1] == str(own)


def test_nothing_of_the_environment_but_the_known_variables_is_shown(quick, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    main(["doctor", "--json"])
    assert "hf_secret" not in capsys.readouterr().out
