"""`python -m rpcdist run`: runs a script as `python script.py` would, with rpcdist in torch's place."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_run(commands: Commands) -> None:
    """Adds the command to a parser; `arguments.run(arguments)` runs it."""
    parser = commands.add_parser(
        "run",
        help="run a script that was written for torch",
        description="Runs a script in this process. With --compat, torch.distributed, its RPC, autograd "
        "and optimizers, and DDP mean rpcdist's. Under torchrun: torchrun ... -m rpcdist run --compat script.py",
    )
    parser.add_argument("--compat", action="store_true", help="put rpcdist in torch's place")
    parser.add_argument("script", help="the file to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script finds in sys.argv")
    parser.set_defaults(run=_run)


def run_script(script: str, arguments: list[str]) -> None:
    """Runs a file as the main module, with its folder first on `sys.path`.

    The module takes the place of `__main__`, as the processes that it starts import the script by its path.
    """
    path = Path(script)
    code = compile(path.read_bytes(), script, "exec")
    main = ModuleType("__main__")
    main.__dict__.update(__file__=os.path.abspath(script), __builtins__=__builtins__, __spec__=None)
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(path.resolve().parent)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _run(arguments: argparse.Namespace) -> int:
    if not Path(arguments.script).is_file():
        print(f"error: there is no file {arguments.script}", file=sys.stderr)
        return 2
    if arguments.compat:
        from rpcdist.compat._installation import install

        install()
    try:
        run_script(arguments.script, arguments.arguments)
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_globals.get("__name__") == __name__:
            frames = frames.tb_next
        # Told as `python script.py` would, without the way here.
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return 1
    return 0
