"""Reads hostile weight files in a process of its own, whose memory is bounded, and reports what happened as JSON.

    python hostile_judge.py FOLDER hand|mutated COUNT SEED headers|loaders

Each file must end in an answer or in a WangenError. A MemoryError is a reader that took too much, a signal or a crash
ends the process, and either is a failure. FOLDER/seeds holds the good files to mutate.
"""

import faulthandler
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from hostile import Case, by_hand, mutated

from wangen.generator import headers, kinds
from wangen.generator.errors import WangenError

MEMORY_BYTES = 768 * 2**20  # beyond what the process has when it begins
HANG_SECONDS = 60


def main() -> None:
    """Judge all files of the command line and print the report."""
    folder, source, count, seed, what = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    seeds = {path.name: path.read_bytes() for path in sorted((folder / "seeds").iterdir())}
    calls = loaders() if what == "loaders" else readers()
    cases: Iterable[Case] = by_hand(folder / "canary") if source == "hand" else mutated(seeds, count, seed)
    bound_memory()
    report: dict[str, list[str]] = {"accepted": [], "refused": [], "failures": []}
    for number, case in enumerate(cases):
        (folder / "last").write_text(case.name)  # what was judged when the process died
        judge(folder / str(number), case, calls, report)
    print(json.dumps(report))  # noqa: T201


def readers() -> list[Callable[[Path], object]]:
    return [kinds.examine, headers.identity]


def loaders() -> list[Callable[[Path], object]]:
    from wangen.runtime import weights

    calls = (weights.load_transformer, weights.load_vae, weights.load_text_encoder, weights.load_image_encoder)
    return [lambda path, call=call: call(path, device="meta") for call in calls]  # type: ignore[misc]


def judge(folder: Path, case: Case, calls: list[Callable[[Path], object]], report: dict[str, list[str]]) -> None:
    folder.mkdir()
    for name, target in case.links.items():
        (folder / name).symlink_to(target)
    for name, data in case.files.items():
        (folder / name).write_bytes(data)
    path = folder / next(iter([*case.files, *case.links]))
    outcomes = set()
    import time; t0=time.process_time()
    for call in calls:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        try:
            call(path)
            outcomes.add("accepted")
        except WangenError as error:
            outcomes.add("refused")
            if not str(error).isascii() and not str(error).replace("\n", "").isprintable():
                report["failures"].append(f"{case.name}: a message that cannot be printed")
            if len(error.found) > 1000:
                report["failures"].append(f"{case.name}: a message of {len(error.found)} characters")
        except BaseException as error:  # noqa: BLE001  # that none other occurs is what is tested
            report["failures"].append(f"{case.name}: {type(error).__name__}: {str(error)[:300]}")
        finally:
            faulthandler.cancel_dump_traceback_later()
    report["accepted" if "accepted" in outcomes else "refused"].append(case.name)
    t0=time.process_time()-t0
    if t0>0.4: print(f"{t0:.2f} {case.name}", file=sys.stderr)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


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
