"""`wangen lint`: what is wrong with an existing run script, line by line, and what to write instead.

A script is read by its shell's rules, every call in it by its own trainer's rules; nothing is run. The rules are
functions from the script to findings, listed in this package's modules.
"""

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wangen import profiles
from wangen.generator.errors import UsageError, WangenError, bytes_text, many
from wangen.generator.files import naming, read_file
from wangen.generator.lint import bat, exits, experts, flags, order, own, ps1, sh, shell, toml, tools, writing
from wangen.generator.lint.kinds import Finding
from wangen.generator.lint.script import HERE, MORE, UNKNOWN, Call, Script, Shell, base_name, find_calls
from wangen.generator.tomls import load

if TYPE_CHECKING:
    from wangen.generator.lint.fix import Fixed

Rule = Callable[[Script], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    *writing.RULES,
    *exits.RULES,
    *shell.RULES,
    *order.RULES,
    *flags.RULES,
    *experts.RULES,
    *own.RULES,
    *toml.RULES,
)
_READERS = {"bat": bat.read, "ps1": ps1.read, "sh": sh.read}
_SHELLS: dict[str, Shell] = {".bat": "bat", ".cmd": "bat", ".ps1": "ps1", ".sh": "sh", ".bash": "sh", ".sbatch": "sh"}
_WIDTH = 100

_QWEN = "qwen_image_"
_FOR_QWEN = (
    'say model = "qwen-image-edit-plus" (2509, 2511), "qwen-image-edit" or "qwen-image" in wangen.toml and publish the '
    "dataset; docs/qwen-image.md says which flag becomes which"
)

MAX_BYTES = 50_000
"""Scripts that people write have a few thousand; reading takes the shells' time per character, and more."""


def read(path: Path) -> Script:
    """A script taken apart: its commands, and its calls with their flags.

    Raises:
        UsageError: there is no such file, or it is no .bat, .ps1 or .sh.
    """
    shell = _SHELLS.get(path.suffix.lower())
    if shell is None:
        raise UsageError("this is no script that lint reads", where=str(path), cure="give a .bat, .ps1 or .sh file")
    try:
        data = read_file(path)
    except OSError as error:
        raise UsageError(f"cannot read the script: {error.strerror}", where=str(path), cure="check the path") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"this is too long for a script: {bytes_text(len(data))}", where=str(path),
                         cure=f"give a script of at most {bytes_text(MAX_BYTES)}")  # fmt: skip
    return parse(path, shell, data)


def parse(path: Path, shell: Shell, data: bytes) -> Script:
    """As `read`, for bytes at hand; `path` says where relative paths start."""
    content = _decoded(data)
    if shell != "sh" or not content.startswith("#!") or content.partition("\n")[0].endswith("\r"):
        content = content.replace("\r\n", "\n")
    script = Script(path, shell, data, content.split("\n"))
    script.commands, script.functions = _READERS[shell](content)
    find_calls(script)
    for call in script.calls:
        tools.read_flags(call)
        _read_config(script, call)
    return script


def _decoded(data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace").removeprefix("\ufeff")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace")


def _read_config(script: Script, call: Call) -> None:
    """Take in a `--config_file`; when it cannot be seen from here, the call has more flags than are known."""
    if call.given("config_file") is None:
        return
    value = call.value("config_file") or ""
    path = toml.locate(script, call, value) or profiles.config_files().get(value)
    try:
        values = load(path) if path else None
    except WangenError:
        values = None
    if values is None:
        call.more = True
    else:
        tools.add_config(call, values)


def lint(script: Script) -> list[Finding]:
    """Everything that is wrong with a script, by file and line.

    Raises:
        UsageError: the script calls neither musubi-tuner's Wan scripts nor wangen's steps.
    """
    if not script.calls:
        seen = (
            f"; {script.foreign[0][1]}.py in line {script.foreign[0][0]} works for HunyuanVideo"
            if script.foreign
            else ""
        )
        names = (base_name(word.text) for command in script.commands for word in command.words)
        if name := next((name for name in names if name.startswith(_QWEN)), ""):
            raise UsageError(f"{name} works for Qwen-Image, and scripts for Wan are what is read here",
                             where=str(script.path), cure=_FOR_QWEN)  # fmt: skip
        raise UsageError(f"nothing in this script calls musubi-tuner's Wan scripts or a step of wangen{seen}",
                         where=str(script.path), cure="give the script that caches or trains")  # fmt: skip
    found = [_readable(finding) for rule in RULES for finding in rule(script)]
    return sorted(dict.fromkeys(found), key=lambda finding: (finding.file, finding.line))


def _readable(finding: Finding) -> Finding:
    """A finding without the signs that stand for unknown texts, and without control characters."""

    def plain(text: str) -> str:
        text = text.replace(HERE, ".").replace(UNKNOWN, "…").replace(MORE, "…")
        return "".join(c if c.isprintable() or c == "\u00a0" else ascii(c)[1:-1] for c in text)

    return replace(finding, found=plain(finding.found), cure=plain(finding.cure))


def failed(findings: list[Finding]) -> bool:
    """Whether there is an error among the findings."""
    return any(finding.severity == "error" for finding in findings)


def text(script: Script, findings: list[Finding]) -> str:
    """The findings for people: at most 100 columns, one line with the counts at the end."""
    lines = []
    for finding in findings:
        place = f"{finding.file or script.path.name}:{finding.line}"
        lines.append(f"{place}: {finding.severity}: {finding.kind}")
        for words in (finding.found, f"-> {finding.cure}"):
            lines += _wrapped(words, "    ")
    for call in script.calls:
        name = call.value("dataset_config") or ""
        if name and toml.locate(script, call, name) is None:
            lines.append(
                f"note: the TOML of line {call.line_of('dataset_config')} cannot be seen from here and was not read"
            )
            break
    errors = sum(finding.severity == "error" for finding in findings)
    counts = f"{many(errors, 'error')}, {many(len(findings) - errors, 'warning')}"
    return "\n".join([*lines, f"{counts} in {many(len(script.calls), 'call')}"])


def json_text(script: Script, findings: list[Finding], more: Mapping[str, Any] | None = None) -> str:
    """The findings for programs."""
    found = [finding.as_dict() | {"file": finding.file or script.path.name} for finding in findings]
    return json.dumps({"script": str(script.path), "findings": found, **(more or {})}, indent=2, ensure_ascii=False)


def run(path: Path, *, fix: bool = False, as_json: bool = False) -> int:
    """The command: print the findings, write the bundle when asked to; returns the exit code.

    Raises:
        WangenError: the script cannot be read or calls no step; the bundle cannot be made.
    """
    import click

    script = read(path)
    findings = lint(script)
    code = int(failed(findings))
    shown = json_text(script, findings) if as_json else text(script, findings)
    if not fix:
        click.echo(shown)
        return code
    from wangen.generator.lint.fix import fix as write_bundle

    try:
        done = write_bundle(read(path))
    except WangenError:
        click.echo(shown)  # what is wrong with the script is worth as much when no bundle comes of it
        raise
    left = [finding for made in done.scripts for finding in lint(_made(made))]
    if as_json:
        names = ("written", "kept", "changed", "left_out")
        click.echo(json_text(script, findings, {name: getattr(done, name) for name in names}))
    else:
        click.echo("\n".join([shown, *_done(done, left)]))
    return int(failed(left))


def _done(done: "Fixed", left: list[Finding]) -> Iterator[str]:
    """What `--fix` did, in lines of at most 100 columns."""
    lines = [f"written: {name}" for name in done.written]
    lines += [f"kept: {name} is the user's own; the new text is {name}.new" for name in done.kept]
    lines += [f"changed: {line}" for line in done.changed]
    lines += [f"left out: {line}" for line in done.left_out]
    lines += [f"look at {found.file or 'the new script'}:{found.line}: {found.found}; {found.cure}" for found in left]
    for line in lines:
        yield from _wrapped(line, "")


def _wrapped(words: str, first: str) -> list[str]:
    return textwrap.wrap(words, _WIDTH, initial_indent=first, subsequent_indent="    ", break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


def _made(path: Path) -> Script:
    with naming(path):
        return parse(path, _SHELLS[Path(path.name.removesuffix(".new")).suffix], path.read_bytes())
