"""`wangen watch`: who gets what from it, and what it says of a run that goes on, stalls, stops or ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from helpers import image_bytes, make_clip, write_tree
from report_runs import NO_TENSORS, evaluation, step_line, write_metrics

from wangen.generator import lock
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.steps import Watch
from wangen.runtime.evaluation_file import Video, write_evaluation
from wangen.runtime.report import live
from wangen.runtime.report.live import LiveRun, status_of
from wangen.runtime.report.run_files import read_run
from wangen.runtime.report.server import LiveServer

TOKEN = "a-token-of-the-test"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with numbers and two samples, and files that nobody may read."""
    run = write_metrics(tmp_path / "run", [step_line(step) for step in range(1, 4)])
    for step in (1, 3):
        make_clip(run / "samples" / f"cats-step{step:08d}-1.mp4", num_frames=8, seed=step)
    (run / "secret.mp4").write_bytes(b"secret")
    (tmp_path / "secret.png").write_bytes(b"secret")
    return run


@contextmanager
def served(folder: Path, **options: Any) -> Iterator[LiveServer]:
    """The server in a thread of its own."""
    with LiveServer(0, TOKEN, LiveRun(Watch(output_dir=folder, **options))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: LiveServer, path: str, *, headers: Mapping[str, str] | None = None, method: str = "GET"
) -> tuple[HTTPResponse, bytes]:
    """The answer to a request whose path is sent as it is."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.request(method, path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def told(server: LiveServer) -> dict[str, Any]:
    return json.loads(ask(server, f"/{TOKEN}/state")[1])


def html_of(state: Mapping[str, Any]) -> str:
    return "".join(block["html"] for section in state["sections"] for block in section["blocks"])


# ---- who gets what -----------------------------------------------------------------------------------------------


def test_with_the_token_there_is_the_page_and_nothing_comes_from_elsewhere(folder):
    with served(folder) as server:
        answer, body = ask(server, f"/{TOKEN}/")
        assert answer.status == 200
        assert "Step 3" in body.decode()
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert not re.search(rb"https?://", body)


@pytest.mark.parametrize(
    "path",
    ["/", "", "/state", "/wrong/", f"/{TOKEN[:-1]}/", f"/{TOKEN}x/state", f"/{TOKEN}", f"/{TOKEN}/page",
     f"/{TOKEN}/media/", f"/{TOKEN}/media/x.mp4", f"/{TOKEN}/media/secret.mp4", f"/{TOKEN}/metrics.jsonl",
     f"/{TOKEN}/media/../secret.mp4", f"/{TOKEN}/media/..%2F..%2Fsecret.png", f"/{TOKEN}/../../secret.png",
     f"/{TOKEN}/media//etc/passwd", "//evil.example/", "/%C3%A9/", "*"],
)  # fmt: skip
def test_everything_else_is_not_there(folder, path):
    with served(folder) as server:
        answer, body = ask(server, path)
        assert (answer.status, body) == (404, b"")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:80", ""])
def test_another_host_is_refused_even_with_the_token(folder, host):
    with served(folder) as server:
        assert ask(server, f"/{TOKEN}/", headers={"Host": host})[0].status == 421
        assert ask(server, f"/{TOKEN}/", headers={"Host": f"localhost:{server.server_port}"})[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_sent(folder, method):
    with served(folder) as server:
        assert ask(server, f"/{TOKEN}/", method=method)[0].status == 501


def test_it_listens_on_this_machine_alone(folder):
    with served(folder) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"
        assert server.url == f"http://127.0.0.1:{server.server_port}/{TOKEN}/"


def test_samples_are_read_by_the_names_that_the_page_has_in_parts_too(folder):
    with served(folder) as server:
        names = re.findall(r"media/[0-9a-f]{24}\.mp4", ask(server, f"/{TOKEN}/")[1].decode())
        assert len(set(names)) == 2
        whole = (folder / "samples" / "cats-step00000001-1.mp4").read_bytes()
        answer, body = ask(server, f"/{TOKEN}/{names[0]}")
        assert (answer.status, answer.headers["Content-Type"], body) == (200, "video/mp4", whole)
        answer, body = ask(server, f"/{TOKEN}/{names[0]}", headers={"Range": "bytes=10-19"})
        assert (answer.status, body) == (206, whole[10:20])
        assert answer.headers["Content-Range"] == f"bytes 10-19/{len(whole)}"
        assert ask(server, f"/{TOKEN}/{names[0]}", headers={"Range": f"bytes={len(whole)}-"})[0].status == 416
        answer, body = ask(server, f"/{TOKEN}/{names[0]}", method="HEAD")
        assert (answer.status, answer.headers["Content-Length"], body) == (200, str(len(whole)), b"")
        (folder / "samples" / "cats-step00000001-1.mp4").unlink()
        assert ask(server, f"/{TOKEN}/{names[0]}")[0].status == 404


@pytest.mark.skipif(os.name != "posix", reason="links need no rights on POSIX")
def test_a_sample_that_a_link_has_replaced_is_given_no_more(folder):
    sample = folder / "samples" / "cats-step00000001-1.mp4"
    shown = LiveRun(Watch(output_dir=folder))
    keys = re.findall(r"media/([0-9a-f]{24}\.mp4)", shown.page())
    assert sample in {shown.file(key) for key in keys}
    sample.unlink()
    sample.symlink_to(folder.parent / "secret.png")
    assert {shown.file(key) for key in keys} == {None, folder / "samples" / "cats-step00000003-1.mp4"}


def test_an_evaluation_gives_no_access_to_other_files(folder):
    named = {"base": "../secret.png", "step 3": "/etc/hostname", "step 6": "secret.mp4"}
    write_evaluation(evaluation(videos=(Video("a", "b", 1, named),)), folder / "evaluation.json")
    with served(folder) as server:
        page = ask(server, f"/{TOKEN}/")[1].decode()
        files = {ask(server, f"/{TOKEN}/{name}")[1] for name in re.findall(r"media/[0-9a-f]{24}\.\w+", page)}
        assert len(files) == 2 + 1  # the samples, and the video that lies in the folder of the run
        assert "no picture or video inside this folder" in page


# ---- what it tells -----------------------------------------------------------------------------------------------


def test_what_is_new_is_told_and_what_is_not_is_not(folder):
    with served(folder) as server:
        answer, _ = ask(server, f"/{TOKEN}/state")
        mark = answer.headers["ETag"]
        before = told(server)
        assert ask(server, f"/{TOKEN}/state", headers={"If-None-Match": mark})[0].status == 304
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(step_line(4)) + "\n" + '{"step": 5, "lo')
        answer, _ = ask(server, f"/{TOKEN}/state", headers={"If-None-Match": mark})
        assert answer.status == 200
        after = told(server)
        assert after["status"] == {"word": "running", "text": "Step 4: training."}
        digests = [{block["key"]: block["digest"] for section in state["sections"] for block in section["blocks"]}
                   for state in (before, after)]  # fmt: skip
        assert digests[0]["chart-loss"] != digests[1]["chart-loss"]
        assert digests[0]["sample-1"] == digests[1]["sample-1"]
        make_clip(folder / "samples" / "cats-step00000004-1.mp4", num_frames=8)
        assert "step 4" in html_of(told(server))


def test_it_waits_for_a_run_that_has_not_begun(tmp_path):
    with served(tmp_path) as server:
        assert told(server)["status"]["word"] == "waiting"
        write_metrics(tmp_path, [step_line(1)])
        state = told(server)
        assert state["status"]["word"] == "running"
        assert "chart-loss" in json.dumps(state)


def test_a_look_at_which_nothing_changed_reads_no_line_again(tmp_path, monkeypatch):
    begin(tmp_path, "cats", 3)
    run = LiveRun(Watch(output_dir=write_metrics(tmp_path, [step_line(1), step_line(2)])))

    class Unread(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("a long run has a million of them")

    run.state()
    monkeypatch.setitem(vars(run.run), "records", Unread(run.run.records))
    assert run.state()[1]["status"]["text"].startswith("Step 2 of 3: training")


def status_after(folder: Path, seconds: float) -> str:
    now_s = (folder / "metrics.jsonl").stat().st_mtime + seconds
    return status_of(read_run(folder, None), now_s).word


def test_a_run_that_is_silent_is_quiet_after_a_while_that_fits_its_speed(tmp_path):
    folder = write_metrics(tmp_path, [step_line(1, s_per_step=0.5)])
    assert (status_after(folder, 50), status_after(folder, 70)) == ("running", "quiet")
    folder = write_metrics(tmp_path, [step_line(1, s_per_step=20.0)])
    assert (status_after(folder, 500), status_after(folder, 700)) == ("running", "quiet")


def test_the_lock_of_the_scripts_tells_a_run_that_was_killed(tmp_path):
    folder = write_metrics(tmp_path, [step_line(1)])
    (folder / "run.lock").write_text(lock.this_process().text())
    assert status_after(folder, 1) == "running"
    me = lock.this_process()
    gone = lock.Owner(me.host, (me.run[0], 1.0), (me.step[0], 1.0))
    (folder / "run.lock").write_text(gone.text())
    assert status_after(folder, 1) == "stopped"


@pytest.mark.parametrize(("ok", "word"), [(True, "finished"), (False, "stopped")])
def test_the_report_of_training_ends_it_until_more_is_trained(tmp_path, ok, word):
    folder = write_metrics(tmp_path, [step_line(1)])
    report = folder / "train.report.json"
    report.write_text(json.dumps({"step": "train", "ok": ok, "summary": "the disk is full"}))
    assert status_after(folder, 1000) == word
    earlier = report.stat().st_mtime - 100
    os.utime(report, (earlier, earlier))
    assert status_after(folder, 1) == "running"


def begin(folder: Path, name: str, num_steps: int, **facts: Any) -> None:
    """Say that a training has begun."""
    begun = {"step": "train", "begun": "2026-01-01", "output_name": name, "num_steps": num_steps, **facts}
    (folder / "train.begun.json").write_text(json.dumps({"settings": {"output_name": "cats"}, **begun}))


def test_of_a_run_that_has_begun_it_says_how_many_steps_are_left_and_what_they_take(tmp_path):
    begin(tmp_path, "cats", 200)
    assert status_of(read_run(tmp_path, None), time.time()).text == "Step 0 of 200: training."
    write_metrics(tmp_path, [step_line(1, s_per_step=9.0), step_line(2, s_per_step=3.0)])
    run = read_run(tmp_path, None)
    wanted = "Step 2 of 200: training; the steps that are left take about 19 min 48 s."
    assert status_of(run, time.time()).text == wanted
    assert run.settings == {"output_name": "cats"}


@pytest.mark.parametrize(("total", "rate"), [(10**400, 1.0), (1e300, 1e300), ("7", 1.0), (7, 1e308), (7, -1e308)])
def test_a_start_that_says_nonsense_says_nothing_of_the_time(tmp_path, total, rate):
    write_metrics(tmp_path, [step_line(step, s_per_step=rate) for step in (1, 2)])
    begin(tmp_path, "cats", total)
    assert re.fullmatch(r"Step 2( of 7)?: training\.", status_of(read_run(tmp_path, None), time.time()).text)


def test_experts_that_are_trained_one_after_the_other_have_their_own_steps(tmp_path):
    low = [step_line(step, output_name="cats_low_noise", expert="low_noise") for step in (1, 2, 3)]
    high = step_line(1, output_name="cats_high_noise", expert="high_noise", s_per_step=2.0)
    write_metrics(tmp_path, [*low, high])
    begin(tmp_path, "cats_high_noise", 3)
    said = status_of(read_run(tmp_path, None), time.time()).text
    assert said == "high-noise, step 1 of 3: training; the steps that are left take about 4.0 s."


def test_a_start_is_newer_than_the_report_of_the_one_before_and_than_another_run(tmp_path):
    folder = write_metrics(tmp_path, [step_line(1)])
    report = folder / "train.report.json"
    report.write_text(json.dumps({"step": "train", "ok": True, "settings": {"output_name": "cats"}}))
    past = time.time() - 100
    os.utime(report, (past, past))
    os.utime(folder / "metrics.jsonl", (past, past))
    assert status_of(read_run(folder, None), time.time()).word == "finished"
    begin(folder, "cats", 5)
    assert status_of(read_run(folder, None), past + 1).text.startswith("Step 1 of 5: training")
    begin(folder, "dogs", 7, settings={"output_name": "dogs"})
    assert status_of(read_run(folder, None), time.time()).text == "Step 0 of 7: training."
    assert status_of(read_run(folder, "cats"), time.time()).word == "finished"


def test_a_copy_of_a_finished_run_is_finished(tmp_path):
    folder = write_metrics(tmp_path, [step_line(1), step_line(2)])
    for steps, word in ((2, "finished"), (1, "running")):
        report = {"step": "train", "ok": True, "settings": {"output_name": "cats"}, "counts": {"steps": steps}}
        (folder / "train.report.json").write_text(json.dumps(report))
        os.utime(folder / "train.report.json", (1e9, 1e9))
        assert status_of(read_run(folder, None), time.time()).word == word


def test_the_dataset_is_looked_at_again_when_training_is_started_again(tmp_path):
    folder = write_metrics(tmp_path / "run", [step_line(1)])
    toml = tmp_path / "cats.toml"
    write_tree(tmp_path / "cats", {"a.txt": "a first caption", "a.png": image_bytes(format="PNG")})
    toml.write_text(f'[[datasets]]\nimage_directory = "{tmp_path / "cats"}"\ncache_directory = "{tmp_path / "c"}"\n'
                    'resolution = [64, 64]\ncaption_extension = ".txt"\n')  # fmt: skip
    with served(folder, dataset_config=toml) as server:
        assert "a first caption" in html_of(told(server))
        (tmp_path / "cats" / "a.txt").write_text("a second caption")
        begin(folder, "cats", 5)
        assert "a second caption" in html_of(told(server))


@pytest.mark.parametrize("seconds", [-50, 0])
def test_a_start_that_has_ended_since_is_its_report(tmp_path, seconds):
    """Of a run whose process was killed between its report and the removal of what it said at its start."""
    folder = write_metrics(tmp_path, [step_line(1)])
    begin(folder, "cats", 5)
    report = {"step": "train", "ok": True, "settings": {"output_name": "cats", "seed": 3}}
    (folder / "train.report.json").write_text(json.dumps(report))
    now = (folder / "train.report.json").stat().st_mtime
    os.utime(folder / "train.begun.json", (now + seconds, now + seconds))
    os.utime(folder / "train.report.json", (now, now))
    run = read_run(folder, None)
    assert status_of(run, time.time()).word == "finished"
    assert run.settings["seed"] == 3


@pytest.mark.parametrize("text", ["[1]", "{", '"begun"'])
def test_a_start_that_is_none_is_no_start(tmp_path, text):
    folder = write_metrics(tmp_path, [step_line(1)])
    (folder / "train.begun.json").write_text(text)
    run = read_run(folder, None)
    assert (run.name, status_of(run, time.time()).text) == ("cats", "Step 1: training.")


def test_a_run_that_has_begun_has_its_name_before_its_first_line(tmp_path):
    (tmp_path / "dogs.safetensors").write_bytes(NO_TENSORS)
    begin(tmp_path, "cats", 5)
    assert read_run(tmp_path, None).name == "cats"
    assert read_run(tmp_path, "cats").settings == {"output_name": "cats"}


def test_a_finished_run_stays_finished_when_another_one_follows_in_its_folder(tmp_path):
    folder = write_metrics(tmp_path, [step_line(1), step_line(1, output_name="dogs")])
    (folder / "cats.safetensors").write_bytes(NO_TENSORS)
    (folder / "train.report.json").write_text(json.dumps({"step": "train", "settings": {"output_name": "dogs"}}))
    assert status_of(read_run(folder, "cats"), time.time()).word == "finished"


# ---- the command -------------------------------------------------------------------------------------------------


def test_wrong_flags_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        live.run(Watch(output_dir=tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="0 to 65535"):
        live.run(Watch(output_dir=tmp_path, port=70000))
    with pytest.raises(UsageError, match="contradict each other"):
        live.run(Watch(output_dir=tmp_path, dataset_config=Path("a.toml"), manifest=Path("a.jsonl")))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(WangenError, match="cannot be used"):
        live.run(Watch(output_dir=tmp_path, port=taken.getsockname()[1]))


@pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX")
def test_ctrl_c_is_the_good_end_of_it_and_it_needs_no_torch(folder):
    code = (
        "import sys\nfor name in ('torch', 'diffusers', 'transformers'): sys.modules[name] = None\n"
        "from wangen.generator.entry import entry\nentry()"
    )
    words = [sys.executable, "-c", code, "watch", "--output_dir", str(folder)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        url = next(match[0] for line in process.stderr if (match := re.search(r"http://127\.0\.0\.1:\d+/\S+", line)))
        assert len(url.split("/")[3]) >= 32
        connection = HTTPConnection(url.split("/")[2], timeout=10)
        connection.request("GET", "/" + url.split("/")[3] + "/")
        assert connection.getresponse().status == 200
        connection.close()
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(10) == 0
        assert "ended; cats has 3 steps" in rest
        assert "Traceback" not in rest
