"""How long `wangen --help` takes against a bare interpreter: interleaved, minima and medians, in one run.

python benchmarks/start_time.py
"""

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "bare interpreter": [sys.executable, "-c", "pass"],
    "wangen --help": [sys.executable, "-m", "wangen.runtime", "--help"],
    "wangen train --help": [sys.executable, "-m", "wangen.runtime", "train", "--help"],
}


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(20):
        for name, command in COMMANDS.items():
            started = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            times[name].append(time.perf_counter() - started)
    bare = min(times["bare interpreter"])
    for name, values in times.items():
        low, middle = min(values), statistics.median(values)
        print(f"{name:20} min {low * 1000:6.1f} ms  median {middle * 1000:6.1f} ms  {low / bare:5.2f} x bare")


if __name__ == "__main__":
    main()
