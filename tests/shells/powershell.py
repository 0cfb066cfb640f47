"""Runs the part of PowerShell that the .ps1 scripts use, over the tree of a real PowerShell grammar.

No PowerShell can be installed where the tests run, so its control flow is modelled here: what a script asks of the
file system is asked of the real one, a drive `Z:` being Linux's root as under wine; the programs it would start are
handed to the test. Whatever is no part of the modelled language raises `OutsideError`, so that the template cannot
outgrow the model unseen. The modelled part is the same in Windows PowerShell 5.1 and in 7.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tree_sitter
import tree_sitter_pwsh
from shells.powershell_values import COMPARE, Call, OutsideError, Run, bound, text, truth
from shells.wine import linux, windows
from tree_sitter import Node

LANGUAGE = tree_sitter.Language(tree_sitter_pwsh.language())
SHELL = "C:\\powershell.exe"
_QUOTES = "'‘’‚‛"


class StoppedError(Exception):
    """An error that ends a PowerShell script, which then exits with 1."""


class _ExitError(Exception):
    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


def tree(data: bytes) -> Node:
    """The tree of a script, with or without its byte-order mark."""
    return tree_sitter.Parser(LANGUAGE).parse(data.removeprefix(b"\xef\xbb\xbf")).root_node


def faults(node: Node) -> list[Node]:
    """Where the grammar does not accept the script."""
    own = [node] if node.type == "ERROR" or node.is_missing else []
    return own + [fault for child in node.children for fault in faults(child)]


def execute(
    script: Path,
    words: Sequence[str] = (),
    *,
    start: Callable[[Call], int],
    env: Mapping[str, str] | None = None,
    line: str = "powershell -File x.ps1",
    variables: Mapping[str, Any] | None = None,
    version: str = "5.1",
) -> Run:
    """Run a script as `powershell -File SCRIPT WORDS` does; `start` stands for the programs and gives their codes.

    It raises an OSError where Windows cannot start a program. `line` is the command line of this PowerShell,
    `variables` are those of the window that the script runs in, `version` is PowerShell's.

    Raises:
        OutsideError: the script uses something that the model does not know, or the grammar does not accept it.
    """
    root = tree(script.read_bytes())
    if bad := faults(root):
        raise OutsideError(f"the grammar does not accept line {bad[0].start_point[0] + 1}")
    machine = _Machine(script, words, start, dict(env or {}), line)
    major, minor = map(int, version.split("."))
    machine.variables |= {**(variables or {}), "psversiontable": {"PSVersion": {"Major": major, "Minor": minor}}}
    try:
        machine.block(root)
    except _ExitError as end:
        machine.run.code = end.code
    except StoppedError as error:
        machine.run.code, machine.run.error = 1, str(error)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # A form of a known statement with more or fewer parts than the model expects.
        raise OutsideError(repr(error)) from error
    if machine.folders:
        raise OutsideError("the script left a folder on the stack")
    return machine.run


class _Machine:
    """The state of one run; a method `_<type>` evaluates the nodes of that type."""

    def __init__(
        self, script: Path, words: Sequence[str], start: Callable[[Call], int], env: dict[str, str], line: str
    ):
        self.run = Run(env=env)
        self.start, self.line = start, line
        self.strict = False
        self.folder = "C:\\"
        self.folders: list[str] = []
        self.variables: dict[str, Any] = {
            "args": [part for word in words for part in bound(word)],
            "psscriptroot": windows(script.parent),
            "pscommandpath": windows(script),
            "pid": 1,
            "null": None,
            "true": True,
            "false": False,
            "erroractionpreference": "Continue",
        }

    def block(self, node: Node) -> None:
        for child in node.named_children:
            if child.type in ("statement_list", "statement_block", "program"):
                self.block(child)
            elif child.type != "comment" and self.value(child) is not None:
                raise OutsideError(f"a value that nothing takes: {child.text!r}")

    def value(self, node: Node) -> Any:
        known = getattr(self, f"_{node.type}", None)
        if known is None:
            raise OutsideError(f"line {node.start_point[0] + 1}: {node.type} {node.text!r}")
        return known(node)

    def _only(self, node: Node) -> Any:
        children = [child for child in node.named_children if child.type != "comment"]
        if len(children) != 1:
            raise OutsideError(f"{node.type} of several parts: {node.text!r}")
        return self.value(children[0])

    _assignment_value = _unary_expression = _parenthesized_expression = _string_literal = _only
    _integer_literal = _argument_expression = _pipeline = _only

    # ---- statements

    def _assignment_expression(self, node: Node) -> None:
        left, sign, right = node.named_children
        name = _bytes(left)
        # Elsewhere than in the outermost scope it would hide what programs set.
        known = re.fullmatch(r"\$(env:)?(?!LASTEXITCODE)\w+|\$global:LASTEXITCODE", name, re.IGNORECASE)
        if sign.text != b"=" or not known:
            raise OutsideError(f"an assignment: {node.text!r}")
        value = self.value(right)
        if not name.startswith("$env:"):
            self.variables[name[1:].lower().removeprefix("global:")] = value
        elif value is None:
            self.run.env.pop(name[5:], None)
        else:
            self.run.env[name[5:]] = text(value)

    def _if_statement(self, node: Node) -> None:
        condition, then, *others = (child for child in node.named_children if child.type != "comment")
        if truth(self.value(condition)):
            return self.block(then)
        for other in others:
            if other.type == "else_clause":
                return self.block(other.named_children[-1])
            if other.type != "elseif_clauses":
                raise OutsideError(other.type)
            for clause in other.named_children:
                condition, then = clause.named_children
                if truth(self.value(condition)):
                    return self.block(then)
        return None

    def _foreach_statement(self, node: Node) -> None:
        variable, items, body = node.named_children
        found = self.value(items)
        for item in found if isinstance(found, list) else [] if found is None else [found]:
            self.variables[_bytes(variable)[1:].lower()] = item
            self.block(body)

    def _try_statement(self, node: Node) -> None:
        body, last = node.named_children
        if last.type != "finally_clause":
            raise OutsideError(last.type)
        try:
            self.block(body)
        finally:
            self.block(last.named_children[-1])

    def _flow_control_statement(self, node: Node) -> None:
        code = self._only(node)
        if _bytes(node.children[0]) != "exit" or not isinstance(code, int):
            raise OutsideError(f"exit with {code!r}")
        raise _ExitError(code)

    # ---- values

    def _variable(self, node: Node) -> Any:
        name = _bytes(node)[1:]
        if name.lower().startswith("env:"):
            return self.run.env.get(name[4:])
        if not re.fullmatch(r"\w+", name):
            raise OutsideError(f"the variable {name}")
        if name.lower() not in self.variables and self.strict:
            raise StoppedError(f"the variable ${name} has not been set")
        return self.variables.get(name.lower())

    def _decimal_integer_literal(self, node: Node) -> int:
        return int(node.text or b"")

    def _real_literal(self, node: Node) -> float:
        return float(node.text or b"")

    def _verbatim_string_characters(self, node: Node) -> str:
        return re.sub(f"([{_QUOTES}])[{_QUOTES}]", r"\1", _bytes(node)[1:-1])

    def _expandable_string_literal(self, node: Node) -> str:
        # Between the variables stands plain text; an escape or `$x:` would mean something else.
        whole = node.text or b""
        if b"`" in whole or b'"' in whole[1:-1] or re.search(rb"\$\w+:", whole):
            raise OutsideError(f"more than variables in {whole!r}")
        made, position = "", 1
        for part in node.named_children:
            made += whole[position : part.start_byte - node.start_byte].decode() + text(self.value(part))
            position = part.end_byte - node.start_byte
        return made + whole[position:-1].decode()

    def _array_expression(self, node: Node) -> list[Any]:
        statements = node.named_children
        if not statements:
            return []
        value = self._only(statements[0])
        return value if isinstance(value, list) else [] if value is None else [value]

    def _array_literal_expression(self, node: Node) -> list[Any]:
        return [self.value(child) for child in node.named_children]

    def _additive_expression(self, node: Node) -> Any:
        left, right = (self.value(child) for child in node.named_children)
        sign = _bytes(node.children[1])
        if sign == "+" and isinstance(left, list):
            return left + (right if isinstance(right, list) else [right])
        if sign == "+" and isinstance(left, str):
            return str(left) + text(right)
        if isinstance(left, int) and isinstance(right, int):
            return left + right if sign == "+" else left - right
        raise OutsideError(f"{left!r} {sign} {right!r}")

    def _range_expression(self, node: Node) -> list[int]:
        first, last = (self.value(child) for child in node.named_children)
        return list(range(first, last + 1) if first <= last else range(first, last - 1, -1))

    def _element_access(self, node: Node) -> Any:
        items, index = (self.value(child) for child in node.named_children)
        wanted = index if isinstance(index, list) else [index]
        if not isinstance(items, list) or any(not 0 <= place < len(items) for place in wanted):
            raise OutsideError(f"{node.text!r} outside of the list")
        return [items[place] for place in wanted] if isinstance(index, list) else items[index]

    def _member_access(self, node: Node) -> Any:
        if node.text == b"[System.Environment]::CommandLine":
            return self.line
        items = self.value(node.named_children[0])
        name = _bytes(node.named_children[1])
        if isinstance(items, dict):
            return items[name]
        if name == "Count" and isinstance(items, list):
            return len(items)
        if name == "Path" and items == SHELL:
            return items
        raise OutsideError(f"{node.text!r}")

    def _expression_with_unary_operator(self, node: Node) -> Any:
        if node.children[0].type == "cast_expression":
            return self.value(node.children[0])
        if _bytes(node.children[0]) != "-not":
            raise OutsideError(f"{node.text!r}")
        return not truth(self._only(node))

    def _cast_expression(self, node: Node) -> str:
        kind, value = node.named_children
        if _bytes(kind) != "[string]":
            raise OutsideError(f"{node.text!r}")
        return str(text(self.value(value)))

    def _comparison_expression(self, node: Node) -> Any:
        left, sign, right = node.named_children
        compare = COMPARE.get(_bytes(sign))
        if compare is None or "comparison_expression" in (left.type, right.type):
            raise OutsideError(f"{node.text!r}")
        return compare(self.value(left), self.value(right))

    def _logical_expression(self, node: Node) -> bool:
        left, right = node.named_children
        sign = _bytes(node.children[1])
        if sign not in ("-and", "-or") or "logical_expression" in (left.type, right.type):
            raise OutsideError(f"without parentheses: {node.text!r}")
        first = truth(self.value(left))
        return first if first == (sign == "-or") else truth(self.value(right))

    # ---- commands

    def _pipeline_chain(self, node: Node) -> Any:
        value, *sinks = node.named_children
        if any(sink.type != "command" or sink.text != b"Out-Null" for sink in sinks):
            raise OutsideError(f"a pipeline: {node.text!r}")
        found = self.value(value)
        return None if sinks else found

    def _command(self, node: Node) -> Any:
        if node.named_children[0].type == "command_invocation_operator":
            return self._native(node)
        name = _bytes(node.named_children[0])
        words = list(self._elements(node))
        command = getattr(self, f"_do_{name.replace('-', '_').lower()}", None)
        if command is None:
            raise OutsideError(f"the command {name}")
        return command(*words)

    def _elements(self, node: Node) -> Iterator[Any]:
        parts = [part for child in node.named_children if child.type == "command_elements" for part in child.children]
        for part in parts:
            if part.type in ("command_parameter", "generic_token"):
                yield _bytes(part)
            elif part.type == "redirection":
                if part.text != b"2>$null":
                    raise OutsideError(f"{part.text!r}")
            elif part.type == "unary_expression" and re.fullmatch(rb"@\w+", part.text or b""):
                yield from self.value(part)
            elif part.type != "command_argument_sep":
                yield self.value(part)

    def _native(self, node: Node) -> None:
        sign, name = node.named_children[:2]
        program = self.value(name.named_children[0].named_children[0])
        if sign.text != b"&" or name.named_children[0].type != "path_command_name":
            raise OutsideError(f"{node.text!r}")
        words = tuple(word if isinstance(word, str) else text(word) for word in self._elements(node))
        call = Call(program, words, self.folder, dict(self.run.env))
        file = linux(program)
        try:
            if program != SHELL and (file is None or not file.is_file()):
                raise FileNotFoundError(f"the term {program} is not recognized")
            code = self.start(call)
        except OSError as error:
            # The code of the program before stays, and under Continue the script goes on.
            if self.variables["erroractionpreference"] == "Stop":
                raise StoppedError(str(error)) from error
            self.run.lines.append(str(error))
            return
        self.run.calls.append(call)
        self.variables["lastexitcode"] = code

    def _do_write_host(self, text: str) -> None:
        self.run.lines.append(text)

    def _do_read_host(self, prompt: str) -> str:
        self.run.lines.append(prompt)
        return ""

    def _do_get_process(self, option: str, number: int) -> str:
        if (option, number) != ("-Id", self.variables["pid"]):
            raise OutsideError("another Get-Process")
        return SHELL

    def _do_set_strictmode(self, option: str, version: float) -> None:
        if (option, version) != ("-Version", 2.0):
            raise OutsideError("another strict mode")
        self.strict = True

    def _do_get_variable(self, option: str, name: str, last: str) -> Any:
        if (option, last) != ("-Name", "-ValueOnly") or self.variables["erroractionpreference"] != "Stop":
            raise OutsideError("another Get-Variable")
        if name.lower() not in self.variables:
            raise StoppedError(f"cannot find a variable with the name {name}")
        return self.variables[name.lower()]

    def _do_set_variable(self, option: str, name: str, more: str, value: Any) -> None:
        if (option, more) != ("-Name", "-Value") or not re.fullmatch(r"\w+", name):
            raise OutsideError("another Set-Variable")
        self.variables[name.lower()] = value

    def _do_test_path(self, option: str, path: str, kind: str, wanted: str) -> bool:
        if (option, kind) != ("-LiteralPath", "-PathType") or wanted not in ("Container", "Leaf"):
            raise OutsideError("another Test-Path")
        file = linux(path)
        return file is not None and (file.is_dir() if wanted == "Container" else file.is_file())

    def _do_push_location(self, option: str, path: str, *rest: str) -> None:
        file = linux(path)
        if option != "-LiteralPath" or rest != ("-ErrorAction", "Stop"):
            raise OutsideError("another Push-Location")
        if file is None or not file.is_dir():
            raise StoppedError(f"cannot find path {path}")
        self.folders.append(self.folder)
        self.folder = path

    def _do_pop_location(self) -> None:
        self.folder = self.folders.pop()


def _bytes(node: Node) -> str:
    return (node.text or b"").decode()
