"""Rules about how a script runs its steps: exit codes, environments, folders."""

import re
from collections.abc import Iterator

from wangen.generator.lint.kinds import Finding
from wangen.generator.lint.script import HERE, UNKNOWN, Call, Command, Script, base_name
from wangen.generator.lint.tools import find

_APPLICATIONS = {
    "comfyui": "ComfyUI", "python_embeded": "ComfyUI", "stable-diffusion-webui": "the WebUI", "sd-webui": "the WebUI",
    "webui_forge": "Forge", "kohya_ss": "kohya_ss", "sd-scripts": "sd-scripts", "onetrainer": "OneTrainer",
    "ai-toolkit": "ai-toolkit", "fluxgym": "FluxGym", "invokeai": "InvokeAI", "swarmui": "SwarmUI",
    "simpletuner": "SimpleTuner", "diffusion-pipe": "diffusion-pipe", "fooocus": "Fooocus",
}  # fmt: skip
_RUNNERS = {"uv", "uvx", "poetry", "conda", "mamba", "micromamba", "pixi", "pipenv", "hatch", "rye", "docker", "podman"}
_PYTHON = {"python", "python3", "py", "accelerate", "torchrun", "wangen"}


def exit_codes(script: Script) -> Iterator[Finding]:
    """A step whose failure the next step does not see."""
    stops = _stops_by_itself(script)
    for number, call in enumerate(script.calls[:-1]):
        following = script.calls[number + 1]
        start = _position(script, call.command)
        between = script.commands[start + 1 : _position(script, following.command)]
        if _piped(script, call, between):
            yield Finding("pipe", call.command.last, "the pipe's exit code is that of its last program, so that a "
                          "failed step is not seen", ("write #!/bin/bash in line 1 and set -o pipefail "
                          "above" if _plain_sh(script) else "write set -o pipefail above")
                          if script.shell == "sh" else "let the step write its log itself")  # fmt: skip
        elif not stops[0] < call.line < stops[1] and not _looked_at(script, call, between):
            yield Finding("unchecked", call.line, f"when {call.program} fails, {following.program} (line "
                          f"{following.line}) runs all the same", _cure(script))  # fmt: skip
        if script.shell == "bat":
            yield from _errorlevel(script, call, between)


def _position(script: Script, command: Command) -> int:
    return next(number for number, other in enumerate(script.commands) if other is command)


def _stops_by_itself(script: Script) -> tuple[int, float]:
    """The lines between which the shell itself stops at a failure."""
    pattern = {
        "sh": r"(?:^|[;&\s])set\s+(?:-\w*e\w*\b|-o\s+errexit|.*\s-e\b)|^#!.*\s-\w*e",
        "ps1": r"(?i)\$PSNativeCommandUseErrorActionPreference\s*=\s*\$true",
        "bat": r"(?!)",
    }[script.shell]
    begin = next((n for n, line in enumerate(script.lines, 1) if re.search(pattern, line)), 0)
    end = next((n for n, line in enumerate(script.lines, 1) if re.match(r"\s*set\s+\+e", line)), float("inf"))
    return (begin, end) if begin else (10**9, end)


def _looked_at(script: Script, call: Call, between: list[Command]) -> bool:
    if call.command.condition or call.command.after == "&&":
        return True
    if call.command.words[0].text in script.functions:
        return True  # a function of the script runs it and may look at its code
    if call.command.after == "||":
        first = between[0].words[0].text if between and between[0].words else ""
        leaves = any(re.search(r"\b(exit|return|goto|break)\b", script.source(command)) for command in between)
        return leaves or first not in ("true", ":", "echo", "ver", "")
    if script.shell == "sh":
        return bool(between) and "$?" in script.source(between[0])
    word = r"errorlevel" if script.shell == "bat" else r"\$LASTEXITCODE|\$\?"
    return any(re.search(word, script.source(command), re.IGNORECASE) for command in between)


def _piped(script: Script, call: Call, between: list[Command]) -> bool:
    if call.command.after not in ("|", "|&") or script.shell == "ps1":
        return False
    lines = script.lines[: call.line]
    careful = any("pipefail" in line for line in lines) or any("PIPESTATUS" in script.source(c) for c in between)
    return not careful


def _errorlevel(script: Script, call: Call, between: list[Command]) -> Iterator[Finding]:
    for command in between:
        text = script.source(command)
        if re.search(r"(?i)\bif\s+errorlevel\s+1\b", text) and command.condition:
            yield Finding("errorlevel", command.line, "if errorlevel 1 is false for negative exit codes, which crashes "
                          "have", 'write if not "%ERRORLEVEL%"=="0"')  # fmt: skip
        if call.command.depth and command.depth >= call.command.depth and re.search(r"(?i)%errorlevel%", text):
            yield Finding("errorlevel", command.line, "inside ( ) cmd puts in %ERRORLEVEL% before the step runs",
                          "take the step out of the block, or write || behind it", "error")  # fmt: skip


def _cure(script: Script) -> str:
    return {
        "bat": 'write behind it: if not "%ERRORLEVEL%"=="0" exit /b %ERRORLEVEL%',
        "ps1": "write behind it: if ($LASTEXITCODE -ne 0) { exit $LASTEXITCODE }",
        "sh": "write || exit 1 behind it"
        if _plain_sh(script)
        else "write set -euo pipefail at the top, or || exit 1 behind it",
    }[script.shell]


def _plain_sh(script: Script) -> bool:
    """Whether a script asks for `sh`, which on Debian and Ubuntu is dash and knows no pipefail."""
    return re.match(r"#!\s*(/usr)?/bin/(env\s+)?(da)?sh\b", script.lines[0]) is not None


def activation(script: Script) -> Iterator[Finding]:
    """Environments that are activated in a way that does not work."""
    for command in script.commands:
        first = command.words[0].text if command.words else ""
        name = base_name(first).lower()
        folder = re.search(r"(?i)(?:^|[/\\])(?:bin|scripts)[/\\]activate(\.bat|\.ps1)?$", first)
        last = not any(call.line > command.line for call in script.calls)
        batch = (folder and folder[1] != ".ps1") or name in ("conda", "activate", "activate.bat")
        if script.shell == "bat" and batch and not command.called and not last:
            yield Finding("call", command.line, "without call the script ends here: activate is a .bat file itself",
                          f"write call {first}")  # fmt: skip
        if script.shell == "ps1" and (first == "source" or (folder and folder[1] == ".bat")):
            yield Finding("call", command.line, "this activates nothing in PowerShell",
                          r"write & .\venv\Scripts\Activate.ps1")  # fmt: skip
        if script.shell == "sh" and (folder or (name == "bash" and _activates(command))):
            yield Finding("call", command.line, "this activates the environment of a shell that ends at once",
                          f"write source {command.words[-1].text}")  # fmt: skip


def _activates(command: Command) -> bool:
    return len(command.words) == 2 and command.words[1].text.endswith("bin/activate")


def powershell_7(script: Script) -> Iterator[Finding]:
    """`&&` and `||`, which Windows PowerShell cannot even read."""
    if script.shell != "ps1" or any(re.match(r"(?i)\s*#requires\s+-version\s+7", line) for line in script.lines):
        return
    for command in script.commands:
        if command.after in ("&&", "||"):
            yield Finding("powershell-7", command.last, f"Windows PowerShell 5.1 cannot read {command.after}, and runs "
                          "nothing of this file", "write if ($LASTEXITCODE -ne 0) { exit $LASTEXITCODE } between the "
                          "commands, or #requires -Version 7 at the top")  # fmt: skip


def environments(script: Script) -> Iterator[Finding]:
    """Which Python runs the steps."""
    told: set[str] = set()
    for call in script.calls:
        words = [word.text for word in call.launcher] or [call.command.words[0].text]
        program = words[0]
        own = "/" in program or "\\" in program or UNKNOWN in program or HERE in program
        place = program if own else call.venv
        application = _application(place)
        if application and application not in told:
            told.add(application)
            yield Finding("foreign-venv", call.line, f"this Python belongs to {application} ({place}) and has "
                          "other versions of the libraries", f"make an environment for {call.tool}")  # fmt: skip
        plain = base_name(program).lower() in _PYTHON and not own and not call.venv
        if plain and "plain" not in told and not {base_name(word).lower() for word in words[:2]} & _RUNNERS:
            told.add("plain")
            yield Finding("no-venv", call.line, f"{program} is whatever Python comes first on this machine: no "
                          "environment is activated", _activate(script))  # fmt: skip


def _application(path: str) -> str:
    """The application whose environment a path lies in; empty for none that is known."""
    parts = [part.lower() for part in re.split(r"[/\\]", path)]
    if any("musubi" in part or "wangen" in part for part in parts):
        return ""
    return next((name for key, name in _APPLICATIONS.items() if any(part.startswith(key) for part in parts)), "")


def _activate(script: Script) -> str:
    return {
        "bat": "write call venv\\Scripts\\activate.bat above, or venv\\Scripts\\python.exe",
        "ps1": "write & .\\venv\\Scripts\\Activate.ps1 above, or & .\\venv\\Scripts\\python.exe",
        "sh": "write source venv/bin/activate above, or venv/bin/python",
    }[script.shell]


def folders(script: Script) -> Iterator[Finding]:
    """Relative paths need a folder to start from."""
    for command in script.commands if script.shell == "bat" else ():
        words = [word.text for word in command.words]
        if (
            words[:1]
            and words[0].lower() in ("cd", "chdir")
            and len(words) == 2
            and re.match(r"[A-Za-z]:|" + HERE, words[1])
        ):
            yield Finding("cwd", command.line, "cd does not change the drive without /d", "write cd /d")
    call = next((call for call in script.calls if not call.cwd), None)
    if call is None:
        return
    relative = next(iter(_relative(call)), "")
    if relative:
        yield Finding("cwd", call.line, f"{relative} is looked for in whatever folder the script is started from",
                      {"bat": 'write cd /d "%~dp0" at the top', "ps1": "write Set-Location $PSScriptRoot at the top",
                       "sh": 'write cd "$(dirname "$0")" at the top'}[script.shell])  # fmt: skip


def _relative(call: Call) -> Iterator[str]:
    for flag in call.flags:
        spec = find(call, flag.spelled.partition("=")[0])
        for word in flag.values if spec and spec.kind == "path" else ():
            if word.text and not re.match(rf"[A-Za-z]:|[/\\~<{HERE}{UNKNOWN}]", word.text):
                yield word.text


RULES = (exit_codes, activation, powershell_7, environments, folders)
