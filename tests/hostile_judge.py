"""Reads hostile weight files in a process of its own, whose memory is bounded, and reports what happened as JSON.

    python hostile_judge.py FOLDER hand|mutated|models COUNT SEED

Each file must end in an answer or in a WangenError. A MemoryError is a reader that took too much, a hang or a crash
ends the process, and either is a failure. FOLDER/seeds holds the good files to mutate; models are judged by the
loaders too.
"""

import faulthandler
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from hostile import Case, by_hand, mutated
from hostile_models import Table, variations

from wangen.generator import headers, kinds
from wangen.generator.errors import WangenError

MEMORY_BYTES = 768 * 2**20  # beyond what the process has when it begins
HANG_SECONDS = 60
MAX_LOADED_BYTES = 32 * 2**20  # longer files are read for their headers alone


def main() -> None:
    """Judge all files of the command line and print the report."""
    folder, source, count, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    files = sorted((folder / "seeds").iterdir())
    calls: list[Callable[[Path], object]] = [kinds.examine, headers.identity]
    cases: Iterable[Case]
    if source == "hand":
        cases = by_hand(folder / "canary")
    elif source == "mutated":
        cases = mutated({path.name: path.read_bytes() for path in files}, count, seed)
    else:
        cases = variations({path.name: table(path) for path in files}, count, seed)
        calls = loaders()
    bound_memory()
    report: dict[str, list[str]] = {"accepted": [], "refused": [], "failures": []}
    for number, case in enumerate(cases):
        print(case.name, file=sys.stderr)  # noqa: T201  # the last one is what the process died of
        judge(folder / str(number), case, calls, report)
    print(json.dumps(report))  # noqa: T201


def table(path: Path) -> Table:
    return {name: (info.dtype, list(info.shape)) for name, info in headers.read_header(path).tensors.items()}


def loaders() -> list[Callable[[Path], object]]:
    import torch

    from wangen.runtime.models import wan
    from wangen.runtime.weights.text_encoder import load_text_encoder

    def load(loader: Callable[..., object], path: Path) -> None:
        loader(path, device="meta")
        if path.stat().st_size < MAX_LOADED_BYTES:
            loader(path, dtype=torch.bfloat16)

    names = ("load_transformer", "load_vae", "load_image_encoder")
    return [partial(load, loader) for loader in (*(getattr(wan, name) for name in names), load_text_encoder)]


def judge(folder: Path, case: Case, calls: list[Callable[[Path], object]], report: dict[str, list[str]]) -> None:
    folder.mkdir()
    links = case.links if sys.platform != "win32" else {}  # where they need a right of their own
    for name, target in links.items():
        (folder / name).symlink_to(target)
    for name, data in case.files.items():
        with (folder / name).open("wb") as file:
            file.write(data)
            file.truncate(case.lengths.get(name, len(data)))
    path = folder / next(iter([*case.files, *case.links]))
    outcomes = set()
    for call in calls:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        try:
            call(path)
            outcomes.add("accepted")
        except WangenError as error:
            outcomes.add("refused")
            if not str(error).replace("\n", "").isprintable():
                report["failures"].append(f"{case.name}: a message that cannot be printed")
            if len(error.found) > 1000:
                report["failures"].append(f"{case.name}: a message of {len(error.found)} characters")
        except BaseException as error:  # noqa: BLE001  # that none other occurs is what is tested
            report["failures"].append(f"{case.name}: {type(error).__name__}: {str(error)[:300]} {where(error)}")
        finally:
            faulthandler.cancel_dump_traceback_later()
    report["accepted" if "accepted" in outcomes else "refused"].append(case.name)
    for entry in folder.iterdir():
        entry.unlink()
    folder.rmdir()


def where(error: BaseException) -> str:
    return " ".join(
        f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
    )


def bound_memory() -> None:
    """Let the process grow by no more than `MEMORY_BYTES`; only where the system can."""
    if not sys.platform.startswith("linux"):
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
