"""What is wrong with a dataset, a script or a file, as `check` tells it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, as it is printed and reported."""

    where: str
    found: str
    cure: str

    def __str__(self) -> str:
        """`where: fact; cure`."""
        return "; ".join(filter(None, (f"{self.where}: {self.found}", self.cure)))
