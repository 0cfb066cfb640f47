"""The sentences of `docs/security.md`: what strangers send is not executed, and nothing leaves the machine unasked."""

import ast
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from abuse import NETWORK, digests, run
from abuse_cases import line, place_of, tarred, valid
from helpers import make_image, write_tree
from report_runs import HOSTILE, step_line
from tiny import TinyRun

import wangen.generator
from wangen.generator.steps import STEPS

ROOT = Path(wangen.generator.__file__).parents[1]
SOURCES = sorted(path for name in ("generator", "runtime", "profiles", "templates")
                 for path in (ROOT / name).rglob("*.py"))  # fmt: skip
SECRETS = {
    "HF_TOKEN": "hf_SECRETsecret1",
    "WANDB_API_KEY": "SECRETsecret2",
    "MLFLOW_TRACKING_PASSWORD": "SECRETsecret3",
}

# Nothing of a file is executed.

EXECUTES = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "os.execvp", "pickle.load",
    "pickle.loads", "torch.load", "yaml.load", "marshal.load", "marshal.loads", "shelve.open", "joblib.load",
    "dill.load", "cloudpickle.load", "subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp",
}  # fmt: skip
UNSAFE = {"shell": True, "allow_pickle": True, "weights_only": False, "trust_remote_code": True}
UNPACKS = {"extractall", "extract"}
SAFELY = {"local_files_only": True, "trust_remote_code": False}
PICKLED = {"runtime/training/sharded_state.py"}
"""The one place with an unpickler, which is of its own: it knows the classes of an index of weights and no others."""


def dangers(source: str, *, may_unpickle: bool = False) -> list[str]:
    """What in a module executes, unpickles or unpacks what a file holds, by line."""
    tree = ast.parse(source)
    local = [ast.literal_eval(node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign)
             and isinstance(node.value, ast.Dict) and "local" in ast.unparse(node.targets[0])]  # fmt: skip
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            if {"pickle", "marshal", "shelve", "dill", "yaml"} & set(names) and not may_unpickle:
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        flags = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
        careful = any(flag in flags and flags[flag] is value for flag, value in UNSAFE.items())
        unpacks = isinstance(node.func, ast.Attribute) and node.func.attr in UNPACKS
        remote = called.endswith(".from_pretrained") and SAFELY not in local
        if called in EXECUTES or careful or unpacks or remote:
            found.append(f"{node.lineno}: {called}")
    return found


@pytest.mark.parametrize(
    "source",
    ["eval(text)", "torch.load(path)", "torch.load(path, weights_only=False)", "import pickle", "os.system(line)",
     "from pickle import loads", "subprocess.run(line, shell=True)", "np.load(path, allow_pickle=True)",
     "tar.extractall(folder)", "import yaml", "AutoModel.from_pretrained(folder)",
     "local = {'local_files_only': True}; AutoModel.from_pretrained(folder, **local)"],
)  # fmt: skip
def test_what_executes_is_found(source):
    assert dangers(source)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_module_executes_what_a_file_holds(path):
    name = path.relative_to(ROOT).as_posix()
    assert dangers(path.read_text(encoding="utf-8"), may_unpickle=name in PICKLED) == []


# Nothing leaves the machine.

SPEAKS = {
    "generator/processes.py": "the machine's name",
    "generator/files.py": "the machine's name",
    "generator/models/hub.py": "wangen models download, and the address of HF_ENDPOINT",
    "runtime/report/server.py": "wangen watch, on 127.0.0.1",
    "runtime/training/trackers.py": "--log_with mlflow: what its run has already",
}
"""The modules that import anything that can open a connection, and what for."""
NETWORKS = {"socket", "http", "urllib3", "requests", "httpx", "aiohttp", "huggingface_hub", "ftplib", "smtplib", "ssl",
            "xmlrpc", "websockets", "wandb", "mlflow", "telnetlib", "socketserver", "webbrowser"}  # fmt: skip


def test_only_what_must_speaks_to_a_network():
    found = {}
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if any(name in text for name in NETWORKS) else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if NETWORKS & {name.partition(".")[0] for name in names} or "urllib.request" in names:
                found[path.relative_to(ROOT).as_posix()] = sorted(names)
    assert found.keys() == SPEAKS.keys()


@pytest.mark.slow
def test_what_it_starts_takes_no_library_from_the_working_folder(tmp_path):
    (tmp_path / "json.py").write_text("open('taken', 'w').close()")
    wangen = Path(sys.executable).with_name("wangen")
    done = subprocess.run([wangen, "doctor", "--json"], cwd=tmp_path, capture_output=True, text=True)
    kinds = {finding["name"] for finding in json.loads(done.stdout)["findings"]}
    assert "shadows" in kinds
    assert "python-fails" not in kinds
    assert not (tmp_path / "taken").exists()


def test_the_guard_of_the_abuse_suite_sees_a_connection(tmp_path):
    """All of its cases run behind it."""
    work = tmp_path / "work"
    work.mkdir()
    found = run(["models", "download", "vae", "--task", "t2v-1.3B", "--dir", "models"], work)
    assert found.fault == "opens a connection"
    assert NETWORK in found.said


PLAYLISTS = {
    "hls.mp4": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://{host}/a.ts\n#EXT-X-ENDLIST\n",
    "concat.mp4": "ffconcat version 1.0\nfile http://{host}/a.mp4\n",
    "files.mp4": "ffconcat version 1.0\nfile /etc/hostname\n",
    "sdp.mov": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 9 RTP/AVP 96\n",
    "dash.mkv": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period><AdaptationSet '
                'mimeType="video/mp4"><Representation id="1" bandwidth="1"><BaseURL>http://{host}/x.mp4</BaseURL>'
                "</Representation></AdaptationSet></Period></MPD>",
}  # fmt: skip


def test_a_video_that_is_a_list_of_addresses_asks_none_of_them(tmp_path):
    """FFmpeg tells formats by content, and opens its own connections, which no guard in Python sees."""
    work = tmp_path / "work"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        host = f"127.0.0.1:{server.getsockname()[1]}"
        media = {name: text.format(host=host) for name, text in PLAYLISTS.items()}
        write_tree(work / "set", media | {f"{Path(name).stem}.txt": "a cat" for name in media})
        (work / "d.toml").write_text('[[datasets]]\nresolution = 64\nvideo_directory = "set"\ntarget_frames = [1]\n'
                                     'cache_directory = "cache"\n')  # fmt: skip
        found = run(["check", "--dataset_config", "d.toml"], work)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert (found.code, found.fault) == (1, "")
    assert found.said.count("cannot be read as a video") == len(PLAYLISTS)


# Pages.


class Page(HTMLParser):
    """What would be executed: scripts' texts and attributes that are handlers."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.executed: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_script = tag == "script"
        self.executed += [f"{name}={value}" for name, value in attrs if name.startswith("on")]
        self.executed += [str(value) for name, value in attrs if name in ("href", "src") and "script:" in str(value)]

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.executed.append(data)


def test_a_page_that_executes_is_seen():
    assert Page(HOSTILE).executed == ["alert(1)", "onerror=alert(2)"]


@pytest.fixture
def known(tiny_run: TinyRun) -> dict[str, object]:
    return place_of(tiny_run)


@pytest.mark.slow
def test_captions_and_names_are_text_in_every_page(known, tmp_path):
    work, name = tmp_path / "work", "a & 'b' onerror=alert(3) &lt;b&gt;"
    make_image(work / "set" / f"{name}.png")
    metrics = json.dumps(step_line(1, output_name=HOSTILE)) + "\n"
    write_tree(work, {f"set/{name}.txt": HOSTILE, "run/metrics.jsonl": metrics})
    (work / "d.toml").write_text('[[datasets]]\nresolution = 64\nimage_directory = "set"\ncache_directory = "cache"\n')
    sheet = ["cache_latents", "--dataset_config", "d.toml", "--vae", str(known["vae"]), "--debug_mode", "image"]
    page = ["report", "--output_dir", "run", "--dataset_config", "d.toml", "--save_path", "page.html"]
    for words in (sheet, page):
        found = run(words, work)
        assert (found.code, found.fault) == (0, ""), found.said
    pages = list(work.rglob("*.html"))
    assert len(pages) == 2
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert "alert(1)" in text
        assert not [code for code in Page(text).executed if "alert" in code]


# Secrets.


def with_secrets() -> None:
    os.environ.update(SECRETS)


def leaks(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and b"SECRETsecret" in path.read_bytes())


def test_secrets_of_the_environment_are_in_no_file_and_no_line(known, tmp_path):
    work = tmp_path / "work"
    write_tree(work, {"run/metrics.jsonl": json.dumps(step_line(1, output_name="lora")) + "\n"})
    make_image(work / "datasets" / "cats" / "a.png")
    write_tree(work, {"datasets/cats/a.txt": "a cat"})
    from wangen.runtime import cache_latents, check_cache, report, train  # once, not in each process

    assert all((cache_latents, check_cache, report, train))
    quick = [step for step in STEPS if step.command in ("check", "cache_latents", "check_cache", "train", "report")]
    commands = [["init"], ["publish", "cats"], ["check", "cats"], ["clean", "cats"]]
    lines = [line(step, valid(step, known) | {"report_dir": "told", "log_file": "log.txt"}) for step in quick]
    for words in [*commands, *lines]:
        found = run(words, work, with_secrets)
        assert found.fault == "", found.said
        assert "SECRETsecret" not in found.said
    assert len(list(work.rglob("*.report.json"))) >= len(quick)
    assert len(list(work.rglob("*.sh"))) >= 2
    assert list(leaks(work)) == []


# Paths of strangers.


def test_a_tar_of_manifests_is_read_and_never_unpacked(known, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    line_ = json.dumps({"file": "../../etc/passwd", "caption": "x"}).encode() + b"\n"
    (work / "a.tar").write_bytes(tarred({"../out.jsonl": line_, "/abs.jsonl": line_}, {"l.jsonl": "/etc/passwd"}))
    before = digests(tmp_path)
    found = run(["check", "--manifest", "a.tar"], work)
    assert (found.code, found.fault) == (1, "")
    assert "root:" not in found.said
    after = {name: digest for name, digest in digests(tmp_path).items() if bytes.fromhex(name)[-12:] != b".report.json"}
    assert after == before


def test_what_a_manifest_names_elsewhere_is_read_and_stays_as_it_is(known, tmp_path):
    """A manifest may name pictures and clips anywhere, as the manifests of raw data do; nothing is written beside."""
    work, other = tmp_path / "work", tmp_path / "other"
    make_image(other / "a.png")
    write_tree(work, {"m.jsonl": json.dumps({"file": "../other/a.png", "caption": "x"}) + "\n"})
    before = digests(other)
    for words in (
        ["check", "--manifest", "m.jsonl"],
        ["cache_latents", "--manifest", "m.jsonl", "--resolution", "64", "--device", "cpu", "--vae", str(known["vae"])],
        ["init"],
        ["publish", "cats", "--source", "m.jsonl", "--platform", "linux"],
        ["clean", "cats", "--bundle", "--caches", "--outputs"],
    ):
        found = run(words, work)
        assert found.fault == "", found.said
    assert digests(other) == before
    shutil.rmtree(work)


@pytest.mark.parametrize("name", ["/etc/passwd", "../../../../etc/passwd", "/etc/shadow", "a.png/../../../etc/passwd"])
def test_what_is_no_picture_and_no_clip_is_not_read(tmp_path, name):
    work = tmp_path / "work"
    write_tree(work, {"m.jsonl": json.dumps({"file": name, "caption": "x"}) + "\n"})
    found = run(["check", "--manifest", "m.jsonl"], work)
    assert (found.code, found.fault) == (1, "")
    assert "root:" not in found.said
