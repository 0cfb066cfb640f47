"""What pyproject.toml cannot say: a build writes its commit into the package, so that `wangen --version` knows it."""

from pathlib import Path
from runpy import run_path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
COMMIT = run_path(str(HERE / "generator" / "commit.py"))["commit_of_clone"](HERE)


class BuildPackages(build_py):
    """The packages, with `commit.txt`; a source distribution brings that file along."""

    def run(self) -> None:
        """Build them; an editable installation reads the clone instead."""
        super().run()
        if COMMIT and not self.editable_mode:
            Path(self.build_lib, "wangen", "generator", "commit.txt").write_text(COMMIT + "\n", encoding="utf-8")


class SourceDistribution(sdist):
    """The sources, with `commit.txt` in place of the clone's history."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Make the tree that is packed."""
        super().make_release_tree(base_dir, files)
        if COMMIT:
            Path(base_dir, "generator", "commit.txt").write_text(COMMIT + "\n", encoding="utf-8")


setup(cmdclass={"build_py": BuildPackages, "sdist": SourceDistribution})
