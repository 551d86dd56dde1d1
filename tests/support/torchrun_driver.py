"""What torchrun starts for `torchrun_job.py`: each rank runs the programs of its job in turn, as `__main__`.

    torchrun --nproc-per-node 5 torchrun_driver.py FOLDER

FOLDER has the programs in `programs.json`, and gets what each of them printed, by program, rank and descriptor.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path


def run(script: str) -> int:
    """The status with which the program would have ended."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    job = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    path = sys.path[1:]  # without the folder of this file
    for number, (script, arguments, world_size) in enumerate(json.loads((job / "programs.json").read_text())):
        if rank >= world_size:
            continue
        folder = job / str(number)
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
        sys.argv = [script, *arguments]
        sys.path[:] = [str(Path(script).parent), *path]
        for descriptor in (1, 2):
            with open(f"{rank}.{descriptor}", "w") as file:
                os.dup2(file.fileno(), descriptor)
        status = run(script)
        sys.stdout.flush()
        sys.stderr.flush()
        Path(f"{rank}.status").write_text(str(status))


if __name__ == "__main__":
    main()
