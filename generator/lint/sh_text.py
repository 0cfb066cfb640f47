"""Pieces of a bash script that have an inside of their own: substitutions, arithmetic, quotes with escapes."""

import re

from wangen.generator.lint.script import HERE, UNKNOWN, Word, base_name

KNOWN = re.findall(
    r"\S+",
    "HOME PATH USER LOGNAME PWD OLDPWD SHELL TMPDIR TEMP TMP HOSTNAME LANG LC_ALL UID EUID RANDOM SECONDS TERM "
    "DISPLAY VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV LD_LIBRARY_PATH CUDA_HOME CUDA_VISIBLE_DEVICES HF_HOME "
    "HF_TOKEN BASH_VERSION PYTHONPATH OSTYPE LINENO PPID IFS SLURM_JOB_ID SLURM_NODEID SLURM_PROCID "
    "SLURM_ARRAY_TASK_ID SLURM_SUBMIT_DIR SLURM_NNODES SLURM_TMPDIR WANGEN_PYTHON BASH_SOURCE FUNCNAME "
    "PIPESTATUS OPTARG OPTIND REPLY MAPFILE EPOCHSECONDS BASHPID BASH_REMATCH SHLVL COLUMNS LINES",
)
_NEAR = 300
"""Characters in which `((` finds its end: more is no arithmetic that anybody writes."""
_REMARK = re.compile(r"(?<![^\s;|&(])#[^\n]*")
_HERE_DOCUMENT = re.compile(r"<<-?[ \t]*(?:\\?([A-Za-z_][\w.+-]*)|'([^'\n]+)'|\"([^\"\n]+)\")")
_CHANGED = re.compile(r"([A-Za-z_]\w*)\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_ESCAPE = re.compile(r"\\(?:([abeEfnrtv])|([0-7]{1,3})|x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|(.))", re.DOTALL)
_LETTERS = dict(zip("abeEfnrtv", "\a\b\033\033\f\n\r\t\v", strict=True))


def join_fields(fields: list[str], parts: list[str]) -> None:
    """Append the words of a variable: the first and the last one grow together with their neighbours."""
    if parts:
        fields[-1] += parts[0]
        fields += parts[1:]


def substituted(inside: str) -> str:
    """What a command's output is taken for: the script's own folder, or unknown; remarks alone have none.

    >>> substituted("`# rank`"), substituted("ls -t | head -1") == UNKNOWN
    ('', True)
    """
    if all(line.lstrip()[:1] in ("", "#") for line in inside.strip("`").split("\n")):
        return ""
    return HERE if re.search(r"dirname|BASH_SOURCE|\$0", inside) else UNKNOWN


def arithmetic(text: str, position: int) -> str:
    """The `((…))` that begins at a position; empty for none.

    >>> arithmetic("((N = (1 + 2) * 3)) || exit", 0), arithmetic("((ls) | wc)", 0)
    ('((N = (1 + 2) * 3))', '')
    """
    near = text[position : position + _NEAR]
    if not near.startswith("((") or "))" not in near:
        return ""
    inside = near[: closing(near, 0)]
    return inside if inside.endswith("))") else ""


def changed(arithmetic: str) -> list[str]:
    """The variables that `((…))` or `let` sets.

    >>> changed("N = 2 * M, i++, a == b")
    ['N', 'i']
    """
    return [first or second for first, second in _CHANGED.findall(arithmetic)]


def set_by(words: list[str]) -> list[str]:
    """The variables that a command of the shell's own sets.

    >>> set_by(["printf", "-v", "STAMP", "%(%F)T"]), set_by(["let", "N=4"])
    (['STAMP'], ['N'])
    """
    name, *rest = words or [""]
    if name in ("read", "mapfile", "readarray", "getopts"):
        return rest
    if name == "printf" and rest[:1] == ["-v"]:
        return rest[1:2]
    return [found for word in rest for found in changed(word)] if name == "let" else []


def takes_in(words: list[str]) -> bool:
    """Whether a command reads another script into this one, which may set any variable: all but an environment do.

    >>> takes_in(["source", ".env"]), takes_in([".", "venv/bin/activate"])
    (True, False)
    """
    return len(words) > 1 and words[0] in ("source", ".") and not re.search(r"(?:^|/)(?:activate|conda\.sh)$", words[1])


def unescaped(text: str) -> str:
    r"""What stands between the quotes of `$'…'` as the program gets it.

    >>> unescaped("it\\'s\\t\\x41")
    "it's\tA"
    """

    def one(match: re.Match[str]) -> str:
        letter, octal, short, long, other = match.groups()
        if letter or other:
            return _LETTERS.get(letter) or (other if other in "'\"\\?" else match[0])
        return chr(int(octal, 8) if octal else int(short or long, 16))

    return _ESCAPE.sub(one, text)


def given_text(words: list[Word]) -> tuple[list[Word], str]:
    """The words in front of `eval` or `bash -c`, as `srun`, and the text that it runs; both are empty for neither.

    >>> given_text([Word(text, 1) for text in ("srun", "bash", "-c", "python a.py")])[1]
    'python a.py'
    """
    texts = [word.text for word in words]
    if texts[:1] == ["eval"]:
        return [], " ".join(texts[1:])
    for place in range(len(texts) - 2):
        if base_name(texts[place]) in ("bash", "sh") and re.fullmatch(r"-[a-z]*c", texts[place + 1]):
            return words[:place], texts[place + 2]
    return [], ""


def closing(text: str, start: int) -> int:
    """The position behind the bracket that closes the one at `start`.

    In a substitution of commands, `(` without a second one, remarks and here-documents have no quotes and brackets.
    """
    pairs = {"(": ")", "{": "}"}
    opening, depth, position, quote = text[start], 0, start, ""
    commands = opening == "(" and not text.startswith("((", start)
    documents: list[str] = []
    while position < len(text):
        character = text[position]
        if character == "\\" and quote != "'":
            position += 1
        elif quote:
            quote = "" if character == quote else quote
        elif commands and (remark := _REMARK.match(text, position)):
            position = remark.end() - 1
        elif commands and not text.startswith("<<<", position) and (found := _HERE_DOCUMENT.match(text, position)):
            documents.append(found[1] or found[2] or found[3])
            position = found.end() - 1
        elif documents and character == "\n":
            position = behind(text, position + 1, documents) - 1
            documents = []
        elif character in "'\"":
            quote = character
        elif character == opening:
            depth += 1
        elif character == pairs[opening]:
            depth -= 1
            if not depth:
                return position + 1
        position += 1
    return len(text)


def behind(text: str, position: int, documents: list[str]) -> int:
    """The position of the line behind the here-documents that begin at `position` and end at these words."""
    for end in documents:
        match = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(text, position)
        position = min(match.end() + 1, len(text)) if match else len(text)
    return position
