"""Cures that depend on the machine: the exact lines that install what fits."""

from wangen import profiles
from wangen.generator.doctor.facts import THIS, Facts
from wangen.generator.errors import WangenError
from wangen.generator.install import install_line
from wangen.generator.setup.torch_choice import Build, choose


def torch_cure(facts: Facts) -> str:
    """How this machine gets the PyTorch that fits it, as the setup script would choose; empty when nobody knows."""
    kind, hardware = facts.system.kind, facts.hardware
    accelerator = "cuda" if hardware.driver else "rocm"
    name = kind if accelerator == "cuda" else f"{kind}-rocm"
    if name not in profiles.platform_names():
        return ""
    known = profiles.platform(name).torch_builds
    builds = [Build.parse(f"{build.tag}={build.driver}" if build.driver else build.tag) for build in known]
    try:
        wanted = choose(builds, accelerator, kind, hardware, "")
    except WangenError:  # no build fits: the kind of finding says what to do
        return ""
    line = f'"{facts.python.path}" -m pip install --force-reinstall "{wanted.name}" {" ".join(wanted.words)}'
    return line if facts.python.why == THIS else f"run the setup script of the bundle (setup_wangen) again, or: {line}"


def library_cure(facts: Facts) -> str:
    """How this interpreter gets the libraries, where no setup script made it; empty for the setup script."""
    return install_line(facts.python.path) if facts.python.why == THIS else ""
