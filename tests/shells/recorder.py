"""Stands for an environment's Python: appends each call that a script makes as one JSON line.

`RECORDER_OUT` names the file, `RECORDER_FAIL` a step that ends with the code `RECORDER_CODE`, and `RECORDER_EMPTY` is
what Python says where `import wangen.runtime` fails.
"""

import json
import os
import sys
from pathlib import Path

NAMES = ("PYTHONUTF8", "PYTHONSAFEPATH", "PYTHONHOME", "WANGEN_SCRIPT", "WANGEN_SCRIPT_VERSION")


def main(argv):
    if argv == ["-c", "import wangen.runtime"]:
        return os.environ.get("RECORDER_EMPTY", 0)
    if argv[:2] != ["-m", "wangen.runtime"]:
        return 99
    call = {"argv": argv[2:], "cwd": str(Path.cwd()), "env": {name: os.environ.get(name) for name in NAMES}}
    with Path(os.environ["RECORDER_OUT"]).open("a", encoding="utf-8") as out:
        out.write(json.dumps(call) + "\n")
    return int(os.environ.get("RECORDER_CODE", "1")) if argv[2] == os.environ.get("RECORDER_FAIL") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
