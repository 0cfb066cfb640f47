"""`wangen models download`: what it fetches, finds there and refuses; against a real HTTP server on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import local_hub
import pytest
from helpers import read_tree, write_tree
from hub_files import CONTENTS, FILES, FP8_NAME, LARGE, left
from local_hub import download, running
from parity import VECTORS

from wangen.generator.cli import main

pytestmark = pytest.mark.slow

pytest_plugins = ("hub_fixtures",)

DIT = next(name for name in FILES if "t2v_1.3B" in name)


def test_a_task_is_fetched_whole_and_then_never_again(tmp_path):
    with running(FILES) as hub:
        done = download(hub.endpoint, tmp_path, "t2v-1.3B", more={"HF_TOKEN": "hf_secret"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    expected = {name.rpartition("/")[2]: content for name, content in FILES.items() if "/google/" not in name}
    expected |= {f"google/umt5-xxl/{name.rpartition('/')[2]}": FILES[name] for name in FILES if "/google/" in name}
    assert read_tree(tmp_path / "models") == expected
    assert {asked.token for asked in hub.asked if "/resolve/" in asked.path} == {"Bearer hf_secret"}
    assert {asked.token for asked in hub.asked if "/cdn/" in asked.path} == {None}, "the token went to another host"

    again = download(hub.endpoint, tmp_path, "t2v-1.3B", "tokenizer")  # the server is gone
    assert again.returncode == 0, again.stderr
    assert "everything is there" in again.stdout


def test_what_is_there_under_another_known_name_is_not_fetched(tmp_path):
    (tmp_path / "models/deep").mkdir(parents=True)
    (tmp_path / "models/deep/wan_2.1_vae.safetensors").write_bytes(CONTENTS["vae"].read_bytes())
    with running(FILES) as hub:
        done = download(hub.endpoint, tmp_path, "vae", "--task", "t2v-14B")
        assert (done.returncode, hub.asked) == (0, []), done.stderr
    assert "there: vae of t2v-14B" in done.stdout


def test_a_file_named_by_itself_is_compared_with_the_hub_and_not_fetched_again(tmp_path, large):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / FP8_NAME).write_bytes(LARGE)
    done = download(large.endpoint, tmp_path, FP8_NAME)
    assert done.returncode == 0, done.stderr
    assert "compared with the hub's checksum" in done.stdout
    assert large.bodies() == []


def test_a_file_named_by_itself_is_looked_for_in_all_folders(tmp_path, large):
    write_tree(tmp_path, {f"models/text_encoders/{FP8_NAME}": LARGE})
    done = download(large.endpoint, tmp_path, FP8_NAME, "--dry_run")
    assert done.returncode == 0, done.stderr
    assert f"there: {Path('models/text_encoders', FP8_NAME)}" in done.stdout.replace(f"{tmp_path}{os.sep}", "")
    assert "to fetch" not in done.stdout


def test_a_link_in_its_place_stays(tmp_path, large):
    link = tmp_path / "models" / FP8_NAME
    link.parent.mkdir()
    try:
        link.symlink_to(tmp_path / "gone")
    except OSError:
        pytest.skip("no links can be made here")
    done = download(large.endpoint, tmp_path, FP8_NAME)
    assert done.returncode == 1
    assert "mend its rights or the link" in done.stderr
    assert link.is_symlink()


@pytest.mark.parametrize("content", [LARGE[:-1] + b"x", LARGE[:1000]], ids=["other bytes", "cut short"])
def test_another_file_in_its_place_is_refused_and_stays(tmp_path, large, content):
    path = tmp_path / "models" / FP8_NAME
    path.parent.mkdir()
    path.write_bytes(content)
    done = download(large.endpoint, tmp_path, FP8_NAME)
    assert done.returncode == 1
    assert "this is not the hub's" in done.stderr
    assert "move it away" in done.stderr
    assert path.read_bytes() == content
    assert large.bodies() == []


@pytest.mark.parametrize(
    ("status", "found", "cure"),
    [
        (401, "does not give this file to everybody", "HF_TOKEN"),
        (403, "does not give this file to everybody", "HF_TOKEN"),
        (404, "the hub has no such file", "look for it at https://huggingface.co/"),
        (503, "fails with answer 503", "run the same line again"),
    ],
)
def test_an_answer_of_the_hub_in_words(tmp_path, status, found, cure):
    with running(FILES) as hub:
        hub.status[DIT] = status
        done = download(hub.endpoint, tmp_path, "dit", "--task", "t2v-1.3B")
    assert done.returncode == 1
    assert found in done.stderr
    assert cure in done.stderr
    assert "Traceback" not in done.stderr
    assert left(tmp_path / "models") == []


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the connection to http://127.0.0.1:9 failed"),
        ({"HF_ENDPOINT": "nowhere"}, "HF_ENDPOINT is no address: 'nowhere'"),
        ({"HF_ENDPOINT": "http://127.0.0.1:port"}, "HF_ENDPOINT is no address"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    ],
)
def test_no_hub_in_words(tmp_path, more, words):
    done = download("http://127.0.0.1:9", tmp_path, "t2v-1.3B", more=more)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_fetches_nothing(tmp_path):
    with running(FILES) as hub:
        done = download(hub.endpoint, tmp_path, "t2v-1.3B", "--dry_run")
        assert (done.returncode, hub.bodies()) == (0, []), done.stderr
    assert f"to fetch: {DIT} (6.3 MB)" in done.stdout
    assert "this was a dry run" in done.stdout
    assert not (tmp_path / "models").exists()


def test_shards_come_with_their_index_and_are_gone_on_with(tmp_path):
    folder, repo = VECTORS / "dit_t2v21_e2e/sharded", "Wan-AI/Wan2.1-T2V-14B"
    files = {f"{repo}/{name}": content for name, content in read_tree(folder).items()}
    index = "diffusion_pytorch_model.safetensors.index.json"
    with running(files) as hub:
        hub.status[f"{repo}/diffusion_pytorch_model-00002-of-00002.safetensors"] = 503
        failed = download(hub.endpoint, tmp_path, f"{repo}/{index}")
        assert failed.returncode == 1
        hub.status.clear()
        done = download(hub.endpoint, tmp_path, f"{repo}/{index}")
        assert done.returncode == 0, done.stderr
    assert read_tree(tmp_path / "models") == {
        f"Wan2.1-T2V-14B/{name}": read_tree(folder)[name] for name in read_tree(folder)
    }

    found = subprocess.run(
        [sys.executable, "-m", "wangen.runtime", "models", "where", "t2v-14B"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert str(Path("models/Wan2.1-T2V-14B", index)) in found.stdout


def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path):
    repo, index = "Wan-AI/Wan2.1-T2V-14B", "diffusion_pytorch_model.safetensors.index.json"
    with running({f"{repo}/{index}": b'{"weight_map": {"a": "../../evil.safetensors"}}'}) as hub:
        done = download(hub.endpoint, tmp_path, f"{repo}/{index}")
    assert done.returncode == 1
    assert "not a file beside it" in done.stderr
    assert left(tmp_path / "models") == []


def test_a_file_of_another_kind_under_the_name_is_not_touched(tmp_path):
    path = tmp_path / "models/Wan2.1_VAE.pth"
    path.parent.mkdir()
    path.write_bytes((VECTORS / "vae22/Wan2.2_VAE.pth").read_bytes())
    with running(FILES) as hub:
        done = download(hub.endpoint, tmp_path, "t2v-1.3B")
        assert (done.returncode, hub.asked) == (1, [])
    assert "a Wan 2.2 VAE" in done.stderr
    assert path.read_bytes() == (VECTORS / "vae22/Wan2.2_VAE.pth").read_bytes()


def test_without_a_connection_it_is_said_what_is_wanted_and_nothing_is_made(tmp_path):
    for words in (["--dry_run"], []):
        done = download("http://127.0.0.1:9", tmp_path, "t2v-1.3B", *words)
        assert done.returncode == 1
        for name in FILES:
            assert name in done.stdout
        assert "wanted: vae of t2v-1.3B: " in done.stdout
        assert "run the same line again" in done.stderr
        assert "where it stopped" not in done.stderr
        assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["t2v-13B"], "did you mean t2v-1.3B?"),
        (["dit"], "dit of which task?"),
        (["clip", "--task", "t2v-14B"], "t2v-14B takes no clip"),
        ([], "what is to be fetched?"),
        (["vae", "--task", "t3v"], "there is no task 't3v'"),
        (["Wan2.1_VAE.safetensors"], "did you mean"),
        (["diffusion_pytorch_model.safetensors.index.json"], "Wan-AI/Wan2.1-T2V-14B/diffusion_pytorch_model"),
    ],
)
def test_words_that_mean_nothing(tmp_path, monkeypatch, capsys, words, found):
    monkeypatch.chdir(tmp_path)
    assert main(["models", "download", *words]) == 2
    assert found in capsys.readouterr().err


def test_without_huggingface_hub_it_is_said_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["models", "download", "tokenizer"]) == 1
    said = capsys.readouterr().err
    assert "the library huggingface_hub is not installed" in said
    assert 'pip install ".[runtime]"' in said


def test_a_broken_file_that_is_no_download_is_named_and_stays(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path, {"models/Wan2.1_VAE.safetensors": b"half a file"})
    assert main(["models", "download", "vae", "--task", "t2v-1.3B"]) == 1
    said = capsys.readouterr().err
    assert "in the place of vae of t2v-1.3B" in said
    assert "move it away" in said
    assert (tmp_path / "models/Wan2.1_VAE.safetensors").read_bytes() == b"half a file"


def test_a_file_that_the_workspace_names_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, capsys):
    platform = "windows" if os.name == "nt" else "linux"
    text = f'platforms = ["{platform}"]\n[platform.{platform}]\nvae = "my vae.pth"\n'
    write_tree(tmp_path, {"wangen.toml": text, "datasets/.keep": ""})
    monkeypatch.chdir(tmp_path)
    assert main(["models", "download", "vae"]) == 1
    said = capsys.readouterr().err
    assert "wangen.toml names a file for vae that is not there" in said
    assert "my vae.pth" in said


def test_a_file_that_the_workspace_names_as_a_download_is_called_is_fetched(tmp_path):
    platform = "windows" if os.name == "nt" else "linux"
    text = f"platforms = ['{platform}']\n[platform.{platform}]\nvae = 'Wan2.1_VAE.pth'\n"
    write_tree(tmp_path, {"wangen.toml": text, "datasets/.keep": ""})
    with running(FILES) as hub:
        done = download(hub.endpoint, tmp_path, "vae")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"published/{platform}/models/Wan2.1_VAE.pth").read_bytes() == CONTENTS["vae"].read_bytes()


@pytest.mark.parametrize("there", [True, False])
def test_a_tokenizer_that_the_workspace_names_is_not_fetched(tmp_path, there):
    write_tree(tmp_path, {"wangen.toml": f"[steps.cache_text]\ntokenizer = '{(tmp_path / 'mine').as_posix()}'\n"})
    write_tree(tmp_path, {"datasets/.keep": "", **({"mine/tokenizer.json": "{}"} if there else {})})
    with running(FILES) as hub:
        done = download(hub.endpoint, tmp_path, "t2v-1.3B")
    assert done.returncode == (0 if there else 1), done.stderr
    assert ("wangen.toml names a tokenizer that is not there" in done.stderr) == (not there)
    assert not any("umt5-xxl/tokenizer" in asked.path for asked in hub.asked)


def test_in_a_workspace_files_go_where_its_scripts_look(tmp_path):
    workspace = tmp_path / "work"
    (workspace / "datasets").mkdir(parents=True)
    (workspace / "wangen.toml").write_text('model = "t2v-1.3B"\nplatforms = ["windows", "linux"]\n')
    with running(FILES) as hub:
        done = download(hub.endpoint, workspace, "vae")
    assert done.returncode == 0, done.stderr
    platform = "windows" if os.name == "nt" else "linux"
    assert read_tree(workspace / f"published/{platform}/models") == {"Wan2.1_VAE.pth": CONTENTS["vae"].read_bytes()}


def test_the_local_hub_answers_as_huggingface_hub_expects(tmp_path):
    """The library's own download accepts this server, so that the server is no invention of these tests."""
    code = (
        "from huggingface_hub import hf_hub_download; print(hf_hub_download('Wan-AI/Wan2.1-T2V-14B', 'Wan2.1_VAE.pth'))"
    )
    with running(FILES) as hub:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False,
            env=local_hub.environment(hub.endpoint, tmp_path),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == CONTENTS["vae"].read_bytes()
