"""The documentation is true: its commands are run or parsed, its blocks are read, and what is not run says why."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import documented_shell as shell
import pytest
from documented import (
    CODE,
    PLACEHOLDER,
    PLAIN,
    SHELLS,
    Block,
    Session,
    all_blocks,
    blocks_of,
    commands,
    counts,
    homeless,
    inline_code,
    pages,
    sessions,
    wangen_lines,
)
from documented_places import PLACES

from wangen.generator import platforms, tomls, workspace
from wangen.generator.cli import wangen
from wangen.generator.commands import StepCommand, build, given
from wangen.generator.errors import WangenError
from wangen.generator.manifests import read_manifest
from wangen.generator.steps import STEPS

ROOT = Path(__file__).parent.parent
BLOCKS = all_blocks()
SESSIONS = sessions()
DATA = [block for block in BLOCKS if block.language in ("toml", "json") and "file" not in block.says]


@pytest.fixture(scope="session")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("docs")
    shell.programs(folder / "bin")
    (folder / "servers").mkdir()
    with shell.servers(folder / "servers") as made:
        yield made | {"TOOLS": str(folder / "bin")}


def of_session(session: Session) -> object:
    marks = [pytest.mark.slow] if session.slow else []
    return pytest.param(session, id=str(session), marks=marks)


@pytest.mark.timeout(900)  # a tutorial is many processes, one after the other
@pytest.mark.skipif(os.name == "nt", reason="the blocks are for bash")
@pytest.mark.parametrize("session", [of_session(session) for session in SESSIONS])
def test_the_commands_do_what_the_page_says(session: Session, env: dict[str, str], tmp_path: Path):
    place = tmp_path / "home"
    place.mkdir()
    PLACES[session.place](place)
    more = {name: value for name, value in env.items() if name != "TOOLS"}
    printed = shell.run(session, place, shell.environment(place, Path(env["TOOLS"]), more))
    before = ""
    for block, text in zip(session.blocks, printed, strict=True):
        if "output" in block.says or block.language == "console":
            shown = text if block.language == "console" else before
            missing = shell.unseen(block, shown)
            assert not missing, f"{block} shows this line, which was not printed:\n{missing}\nprinted was:\n{shown}"
        before = text or before


def test_every_block_says_what_it_is():
    assert [str(block) for block in BLOCKS if block.language not in CODE | PLAIN] == []


def test_every_command_is_run_or_says_why_not():
    assert [str(block) for block in homeless()] == []
    silent = [block for block in BLOCKS if any(len(reason) < 10 for reason in block.says.get("not run", []))]
    assert [str(block) for block in silent] == []


def test_every_place_is_there():
    assert {session.place for session in SESSIONS} <= PLACES.keys()


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_line_of_a_block_is_understood(page: Path):
    for block in blocks_of(page):
        if block.language in SHELLS:
            text = "\n".join(commands(block.text)) if block.language == "console" else block.text
            for words in wangen_lines(text, windows=block.language in ("bat", "powershell")):
                parse(words, str(block), whole=True)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_in_a_sentence_is_understood(page: Path):
    for number, code in inline_code(page):
        for words in wangen_lines(code) if code.startswith("wangen ") else []:
            if words and not words[0].isupper():  # not `wangen STEP …`
                parse(words, f"{page.name}:{number}", whole=False)


def parse(words: list[str], where: str, *, whole: bool) -> None:
    """Read a command line as the program does; of one with an ellipsis, or in a sentence, command and flags alone."""
    command: click.Command = wangen
    name = "wangen"
    while isinstance(command, click.Group) and words:
        name, *rest = words
        found = command.get_command(click.Context(command), name)
        assert found or name.startswith("--"), f"{where}: there is no command {name}"
        if not found:
            break
        command, words = found, rest
    if not whole or PLACEHOLDER in words:
        known = {opt for param in command.params for opt in (*param.opts, *param.secondary_opts)} | {"--help"}
        unknown = [word for word in words if word.startswith("--") and word.replace("-", "_") not in dashless(known)]
        assert unknown == [], f"{where}: {name} has no {unknown}"
        return
    try:
        with command.make_context(name, list(words)) as ctx:
            if isinstance(command, StepCommand) and not ctx.params.get("slug"):
                build(command.step, given(command.step, ctx.params))
    except (WangenError, click.ClickException) as error:
        pytest.fail(f"{where}: wangen {name} {' '.join(words)}: {error}")


OTHERS = set(
    # pip, docker, Slurm, TensorBoard, our benchmarks
    "--extra_index_url --index_url --volume --workdir --user --ipc --shm_size --time --userns --network --local_addr "
    "--ulimit --env --bind --jobs --account --constraint --mem --gres --nodelist --ntasks_per_node --logdir "
    "--arithmetic --list --only --models --help --no_".split()
)
PRINTED = {"docs/from-musubi.md", "docs/extend.md"}
"""Pages on another program's flags, and on one that is yet to be made."""


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_flag_in_a_sentence_is_one(page: Path):
    if page.relative_to(ROOT).as_posix() in PRINTED:
        return
    flags = {flag for _, code in inline_code(page) for flag in re.findall(r"(?<!\S)--[a-zA-Z][\w-]+", code)}
    assert {flag for flag in flags if flag.replace("-", "_") not in known_flags() and len(flag) > 4} == set()


def known_flags() -> set[str]:
    """Every flag of every command, the prefix of those that switch off, and other programs' flags."""
    waiting: list[click.Command] = [wangen]
    found = dashless(OTHERS)
    while waiting:
        command = waiting.pop()
        found |= dashless({opt for param in command.params for opt in (*param.opts, *param.secondary_opts)})
        waiting += command.commands.values() if isinstance(command, click.Group) else []
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_path_of_the_repository_in_a_sentence_is_there(page: Path):
    tops = "tests|generator|runtime|benchmarks|docs|templates|examples"
    named = {name for _, code in inline_code(page) for name in re.findall(rf"(?<![\w/.])(?:{tops})/[\w./*-]*", code)}
    assert {name for name in named if not any(ROOT.glob(name)) and "SHELL" not in name} == set()


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_step_of_a_script_that_a_page_names_is_one(page: Path):
    named = re.findall(r"\b(?:train|cache)_[\w…]+\.(?:sh|bat|ps1) ([a-z_]+)", page.read_text(encoding="utf-8"))
    assert set(named) - {"smoke", *(step.command for step in STEPS)} == set()


def dashless(names: set[str]) -> set[str]:
    return {name.replace("-", "_") for name in names}


@pytest.mark.parametrize("block", DATA, ids=str)
def test_every_toml_and_json_is_read(block: Block, tmp_path: Path):
    if block.language == "json":
        for line in block.text.splitlines():
            media = tmp_path / "below" / json.loads(line)["file"]
            media.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "examples" / "dataset" / "big-buck-bunny.mp4", media)
        (tmp_path / "below" / "train.jsonl").write_text(block.text, encoding="utf-8")
        _, problems = read_manifest(tmp_path / "below" / "train.jsonl")
        assert [problem.text for problem in problems] == []
    elif "[[datasets]]" in block.text:
        (tmp_path / "clips").mkdir()
        (tmp_path / "clips" / "train.jsonl").write_text('{"file": "a.mp4", "prompt": "a clip", "frames": 81}\n')
        (tmp_path / "cats.toml").write_text(block.text, encoding="utf-8")
        assert tomls.read_dataset(tmp_path / "cats.toml", tell=False)
    elif "based_on" in block.text or "[overrides" in block.text:
        text = block.text if "based_on" in block.text else f'based_on = "linux"\n{block.text}'
        (tmp_path / "profiles").mkdir()
        (tmp_path / "profiles" / "pod.toml").write_text(text, encoding="utf-8")
        assert "pod" in platforms.load(tmp_path)
    else:
        (tmp_path / "wangen.toml").write_text(block.text, encoding="utf-8")
        workspace.read(tmp_path)


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", line)).lower() for line in lines)
    return {text.strip().replace(" ", "-") for text in words}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"", text):
        target, _, anchor = "".join(link).partition("#")
        if "://" in target:
            continue
        found = (page.parent / target) if target else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{page.name} links to {target}#{anchor}"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    missing = [page.name for page in (ROOT / "docs").rglob("*.md") if f"{page.name})" not in index]
    assert [name for name in missing if name != "README.md"] == []


def test_the_numbers_in_the_index_are_true():
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert counts() in text, "write the new numbers with: python tests/documented.py"


def test_a_page_that_is_wrong_is_found(tmp_path: Path):
    """The tests above can fail: each kind of fault on a page of its own."""
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: needs a GPU card -->\n```bash\nwangen train --no_such_flag 1\n```\n```bash\nls\n```\n"
    )
    first, second = blocks_of(page)
    assert (first.is_run, second.is_run, second.place) == (False, True, "")
    with pytest.raises(pytest.fail.Exception, match="no_such_flag"):
        parse(wangen_lines(first.text)[0], "page", whole=True)
    with pytest.raises(AssertionError, match="--no-such"):
        parse(["train", "--no-such", PLACEHOLDER], "page", whole=True)
    with pytest.raises(AssertionError, match="no command trian"):
        parse(["trian"], "page", whole=False)
    shown = Block("page", 1, "text", "saved  3 files\n…\nend …\n")
    assert shell.unseen(shown, "begin\nsaved 14 files\nmore\nend of it\n") == ""
    assert shell.unseen(shown, "end of it\nsaved 14 files\n") == "end …"
    exact = Block("page", 1, "text", "saved 3 files\n", {"exactly": [""]})
    assert [shell.unseen(exact, f"saved {number} files\n") for number in (3, 14)] == ["", "saved 3 files"]
