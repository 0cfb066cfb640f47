"""The text of a script: made from a template, sealed with a digest, in the bytes that its shell needs, and read back.

Run scripts and setup scripts share it. In the head of each stands a digest over everything but the values of the knobs,
by which an edit by hand is seen later.
"""

import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from wangen.generator import quoting
from wangen.generator.errors import WangenError
from wangen.generator.quoting import Word

if TYPE_CHECKING:
    from jinja2 import Template

_BLOCK = re.compile(r"^(?:#|rem) >>> knobs.*?^(?:#|rem) <<< knobs$", re.DOTALL | re.MULTILINE)
_DIGEST = re.compile(r"^((?:#|rem) wangen-digest: )([0-9a-f]{32})$", re.MULTILINE)
_PUBLISHED = re.compile(r"(?:#|rem) .* \(published: ([A-Za-z0-9._,+-]+)\)")
_NAME = r"(?P<name>[A-Z][A-Z0-9_]*)"
_QUOTED = r"""(?P<quote>["']?)(?P<value>[A-Za-z0-9._,+-]+)(?P=quote)"""
_KNOB_LINES = {
    "sh": re.compile(rf"{_NAME}={_QUOTED}[ \t]*(?P<remark>[ \t]#.*)?"),
    "bat": re.compile(rf'set +(?P<quote>")?{_NAME}=(?P<value>[A-Za-z0-9._,+-]+)(?(quote)"[ \t]*)', re.IGNORECASE),
    "ps1": re.compile(rf"\${_NAME}[ \t]*=[ \t]*{_QUOTED}(?P<remark>[ \t]*#.*)?[ \t]*"),
}
_BOM = b"\xef\xbb\xbf"


@cache
def template(name: str, shell: str) -> "Template":
    """The template `<name>.<shell>.j2`; a name in it that has no value is an error."""
    from jinja2 import Environment, StrictUndefined

    source = files("wangen.templates").joinpath(f"{name}.{shell}.j2").read_text(encoding="utf-8")
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(source)


def places(root: str | None, venv: tuple[str, ...], shell: str) -> dict[str, Any]:
    r"""Where the root and the environments are, as the template writes them.

    `root` is empty when the bundle may be moved. For a .bat these are texts to stand between double quotes, and `base`
    is the root with its last backslash: a variable of the script when the bundle may be moved.

    Raises:
        WangenError: the shell cannot carry a folder.
    """
    for folder in (root or "", *venv):
        quoting.refuse_control(folder, shell)
    if shell == "bat":
        base = quoting.bat_inside(root.rstrip("\\") + "\\") if root else "%WG_BASE%"
        venvs = [("" if _absolute(v) else base) + quoting.bat_inside(v.replace("/", "\\")) for v in venv]
        return {"base": base, "root": quoting.bat_inside(root or ""), "venvs": venvs}
    if shell == "ps1":
        literal = quoting.ps1_literal
        venvs = [
            literal(v) if _absolute(v) else "($WgRoot + {})".format(literal("\\" + v.replace("/", "\\"))) for v in venv
        ]
        return {"root": literal(root) if root else "", "venvs": venvs}
    folders = [
        quoting.sh_word(Word(v)) if v.startswith("/") else f'"$WG_ROOT"/{quoting.sh_word(Word(v))}' for v in venv
    ]
    return {"root": quoting.sh_word(Word(root)) if root else "", "venvs": folders}


def _absolute(windows_path: str) -> bool:
    return re.match(r"[A-Za-z]:[\\/]|[\\/]{2}", windows_path) is not None


def seal(text: str, shell: str) -> bytes:
    """The bytes of a script whose head holds `wangen-digest:` and 32 zeros, with the digest in their place."""
    return _encode(_DIGEST.sub(lambda line: line[1] + digest(text, shell), text, count=1), shell)


def is_sealed(text: str, shell: str) -> bool:
    """Whether nothing but values of knobs was changed since the script was sealed."""
    found = _DIGEST.search(text)
    return found is not None and found[2] == digest(text, shell)


def _encode(text: str, shell: str) -> bytes:
    if shell == "sh":
        return text.encode()
    return (_BOM if shell == "ps1" else b"") + text.replace("\n", "\r\n").encode()


def decode(data: bytes) -> str:
    """A script's text with LF at the line ends and without a byte order mark.

    Raises:
        WangenError: it is not UTF-8.
    """
    try:
        text = data.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        raise WangenError(f"the script is not UTF-8: {error.reason}", cure="publish it again") from error
    # A bash script may hold a carriage return in a quoted text, where it means itself; one whose first line ends in
    # it was converted as a whole by an editor.
    converted = not text.startswith("#!") or text.partition("\n")[0].endswith("\r")
    return text.replace("\r\n", "\n") if converted else text


def shell_of(text: str) -> str:
    """The shell of a script of ours, from its first line."""
    return "sh" if text.startswith("#!") else "bat" if text.startswith("@echo") else "ps1"


def settings(text: str, shell: str) -> list[tuple[str, re.Match[str] | None]]:
    """The lines in the block of knobs that are no remark and not empty; None beside one that is no setting."""
    block = _BLOCK.search(text)
    lines = block[0].split("\n") if block else []
    remarks = re.compile(r"\s*(#.*|rem( .*)?)?", re.IGNORECASE)
    return [(line, _KNOB_LINES[shell].fullmatch(line)) for line in lines if not remarks.fullmatch(line)]


def published_knobs(data: bytes) -> dict[str, str]:
    """The values that the block of knobs had when it was written: each stands at the end of the remark above."""
    text = decode(data)
    block = _BLOCK.search(text)
    found: dict[str, str] = {}
    value = ""
    for line in block[0].split("\n") if block else []:
        remark = _PUBLISHED.fullmatch(line)
        setting = _KNOB_LINES[shell_of(text)].fullmatch(line)
        value = remark[1] if remark else value
        if setting:
            found[setting["name"].upper()] = value
    return found


def with_remarks(data: bytes, old: bytes) -> bytes:
    """A script whose knobs have the remarks that stand behind their values in another; a .bat can have none.

    Raises:
        WangenError: a script is not UTF-8.
    """
    text, before = decode(data), decode(old)
    shell = shell_of(text)
    if shell == "bat":
        return data
    pairs = (setting for _, setting in settings(before, shell_of(before)) if setting)
    remarks = {knob["name"]: knob["remark"] for knob in pairs if knob["remark"]}

    def behind(block: re.Match[str]) -> str:
        lines = ((line, _KNOB_LINES[shell].fullmatch(line)) for line in block[0].split("\n"))
        return "\n".join(line + remarks.get(knob["name"], "") if knob else line for line, knob in lines)

    return _encode(_BLOCK.sub(behind, text, count=1), shell)


def digest(text: str, shell: str) -> str:
    """Digest over a script with its knobs' values and the digest itself blanked."""

    def blank(block: re.Match[str]) -> str:
        settings = ((_KNOB_LINES[shell].fullmatch(line), line) for line in block[0].split("\n"))
        return "\n".join(f"{knob['name'].upper()}=" if knob else line for knob, line in settings)

    plain = _DIGEST.sub(r"\1", _BLOCK.sub(blank, text, count=1), count=1)
    return hashlib.sha256(plain.encode()).hexdigest()[:32]
