"""The setup scripts of a bundle: they find a Python and hand over to `wangen.generator.setup.environment` in its wheel.

A script on disk is treated like a run script without knobs: publishing keeps one that its user edited.
"""

from wangen.generator import quoting
from wangen.generator.quoting import Word
from wangen.generator.script_text import places, seal, template
from wangen.generator.setup.wheel import wheel_name
from wangen.profiles import Platform

# What a Python has to be, and how the rest runs from the wheel. Neither holds a quote of any shell, % or !.
_FITS = "import sys; sys.exit(sys.version_info < (3, 11))"
_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from wangen.generator.setup.environment import main;"
    " sys.exit(main(sys.argv[1:]))"
)


def script_name(shell: str) -> str:
    """The file name of the setup script for `sh`, `bat` or `ps1`."""
    return f"setup_wangen.{shell}"


def render(platform: Platform, root: str | None, venv: tuple[str, ...], version: str, shell: str) -> bytes:
    """The bytes of `setup_wangen.<shell>`.

    Args:
        platform: where it runs; says which builds of PyTorch there are to choose from.
        root: folder of the bundle as the target writes it; None: the folder that holds the script.
        venv: folders of the environment, best first, relative to the root or absolute, as the target writes them.
        version: the version of wangen that makes the script.
        shell: `sh`, `bat` or `ps1`.

    Raises:
        WangenError: the shell cannot carry a path.
    """
    folders = venv if shell == "sh" else tuple(folder.rstrip("\\/") for folder in venv)
    context = places(root, folders, shell) | {
        "script": script_name(shell),
        "version": version,
        "platform": platform.name,
        "digest": "0" * 32,
        "fits": _FITS,
        "code": _CODE,
        "wheel": wheel_name(version),
        "lines": _lines(platform, shell),
    }
    return seal(template("setup", shell).render(context), shell)


def _lines(platform: Platform, shell: str) -> list[str]:
    """The words that say what the platform is, as the shell writes them, one line each."""
    words = [
        ("--kind", platform.kind),
        ("--accelerator", platform.accelerator),
        *(("--build", f"{b.tag}={b.driver}" if b.driver else b.tag) for b in platform.torch_builds),
        ("--shell", shell),
    ]
    between = ", " if shell == "ps1" else " "
    return [between.join(quoting.QUOTES[shell](Word(word)) for word in pair) for pair in words]
