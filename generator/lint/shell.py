"""Rules about where a script runs its steps: environments, folders."""

import re
from collections.abc import Iterator

from wangen.generator.lint.kinds import Finding
from wangen.generator.lint.script import HERE, UNKNOWN, Call, Command, Script, activated, base_name
from wangen.generator.lint.tools import find

_APPLICATIONS = {
    "comfyui": "ComfyUI", "python_embeded": "ComfyUI", "stable-diffusion-webui": "the WebUI", "sd-webui": "the WebUI",
    "webui_forge": "Forge", "kohya_ss": "kohya_ss", "sd-scripts": "sd-scripts", "onetrainer": "OneTrainer",
    "ai-toolkit": "ai-toolkit", "fluxgym": "FluxGym", "invokeai": "InvokeAI", "swarmui": "SwarmUI",
    "simpletuner": "SimpleTuner", "diffusion-pipe": "diffusion-pipe", "fooocus": "Fooocus",
}  # fmt: skip
_RUNNERS = {"uv", "uvx", "poetry", "conda", "mamba", "micromamba", "pixi", "pipenv", "hatch", "rye", "docker", "podman"}
_PYTHON = {"python", "python3", "py", "accelerate", "torchrun", "wangen"}


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


def windows_venv(script: Script) -> Iterator[Finding]:
    """The environment of a Windows Python in a script of another system."""
    paths = [path for call in script.calls for path in _paths(call)]
    git_bash = any(re.match(r"[A-Za-z]:|/[A-Za-z]/", path) for path in paths)
    if script.shell != "sh" or git_bash or not any(path.startswith("/") for path in paths):
        return
    for command in script.commands:
        words = [word.text for word in command.words]
        if re.search(r"(?i)[/\\]scripts[/\\]activate$", " ".join(words[:2])) and activated(command.words, "sh"):
            yield Finding("foreign-path", command.line, f"{words[1]} belongs to an environment of Windows, but the "
                          "paths are those of Linux", "make an environment here, and write source venv/bin/activate",
                          )  # fmt: skip


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
        base = call.venv in ("conda:", "conda:base")
        plain = base_name(program).lower() in _PYTHON and not own and (base or not call.venv)
        if plain and "plain" not in told and not {base_name(word).lower() for word in words[:2]} & _RUNNERS:
            told.add("plain")
            found, cure = f"{program} is whatever Python comes first on this machine: no environment is activated", ""
            if base:
                found = f"{program} is that of conda's base, which all of conda shares"
                cure = "make an environment of its own, and write conda activate NAME"
            yield Finding("no-venv", call.line, found, cure or _activate(script))


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
    return (path for path in _paths(call) if path and not re.match(rf"[A-Za-z]:|[/\\~<{HERE}{UNKNOWN}]", path))


def _paths(call: Call) -> Iterator[str]:
    for flag in call.flags:
        spec = find(call, flag.spelled.partition("=")[0])
        yield from (word.text for word in flag.values if spec and spec.kind == "path")


RULES = (activation, windows_venv, powershell_7, environments, folders)
