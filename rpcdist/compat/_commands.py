"""The commands for programs that were written for torch.

`python -m rpcdist port` changes them, or shows what it would change; `python -m rpcdist run` runs a script as
`python script.py` would, with rpcdist in torch's place.
"""

from __future__ import annotations

import argparse
import builtins
import difflib
import io
import os
import pkgutil
import runpy
import shutil
import sys
import tokenize
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from rpcdist._launch.progress import interrupted
from rpcdist._launch.supervisor import kept_interrupt

_DESCRIPTION = """Changes torch.distributed, its rpc, autograd, optim and nn, DDP, SyncBatchNorm and
DistributedSampler to rpcdist's in the import lines and where they are written out in full. Shows a diff, and writes
nothing unless --write is given. Names each line that is left to you on stderr; the exit status is then 1."""


def add_port(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to a parser; `arguments.run(arguments)` runs it."""
    parser = commands.add_parser(
        "port", help="change the imports of scripts that were written for torch", description=_DESCRIPTION
    )
    parser.add_argument("--write", action="store_true", help="change the files instead of showing a diff")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a script, or a folder with scripts")
    parser.set_defaults(run=_port)


def _port(arguments: argparse.Namespace) -> int:
    scripts: list[Path] = []
    for path in arguments.paths:
        if not path.exists():
            print(f"error: there is no file {path}", file=sys.stderr)
            return 2
        found = _scripts_below(path) if path.is_dir() else [path]
        if not found:
            print(f"error: there are no files *.py in {path}", file=sys.stderr)
            return 2
        scripts += found
    statuses = [_port_file(script, write=arguments.write) for script in scripts]
    return max(statuses, default=0)


def _scripts_below(folder: Path) -> list[Path]:
    """The scripts in a folder, except in hidden folders and virtual environments, which hold other programs."""
    found = []
    for here, folders, files in os.walk(folder):
        place = Path(here)
        folders[:] = [each for each in folders if each[0] != "." and not (place / each / "pyvenv.cfg").exists()]
        found += [place / file for file in files if file.endswith(".py")]
    return sorted(found)


def _port_file(path: Path, *, write: bool) -> int:
    """Ports a file; returns 0, or 1 if changes by hand are left, or 2 if the file cannot be read."""
    from rpcdist.compat._porting import port

    content = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        before = content.decode(encoding)
        result = port(before)
    except (SyntaxError, UnicodeDecodeError) as exc:
        reason = f"{exc.msg} in line {exc.lineno}" if isinstance(exc, SyntaxError) and exc.lineno else exc
        print(f"{path}: is not Python that this version reads: {reason}", file=sys.stderr)
        return 2
    if result.text != before and write:
        _replace(path, result.text.encode(encoding))
        print(f"{path}: {result.changes} changed")
    elif result.text != before:
        old, new = before.splitlines(keepends=True), result.text.splitlines(keepends=True)
        for line in difflib.unified_diff(old, new, fromfile=str(path), tofile=str(path)):
            print(line.rstrip("\r\n"))
    for left in result.left:
        print(f"{path}:{left.line}: {left.name}: {left.advice}", file=sys.stderr)
    return 1 if result.left else 0


def _replace(path: Path, content: bytes) -> None:
    """Writes a file as a whole: on a full disk the file stays as it was."""
    target = path.resolve()
    written = target.with_name(f"{target.name}.{os.getpid()}.new")
    try:
        written.write_bytes(content)
        shutil.copymode(target, written)
        written.replace(target)
    finally:
        written.unlink(missing_ok=True)


def add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to a parser; `arguments.run(arguments)` runs it."""
    parser = commands.add_parser(
        "run",
        help="run a script that was written for torch",
        description="Runs a script in this process. With --compat, torch.distributed, its RPC, autograd "
        "and optimizers, and DDP mean rpcdist's. Under torchrun: torchrun ... -m rpcdist run --compat script.py",
    )
    parser.add_argument("--compat", action="store_true", help="put rpcdist in torch's place")
    parser.add_argument("-m", "--module", action="store_true", help="run a module, as python -m does, not a file")
    parser.add_argument(
        "script", help="the file to run, or a folder or zip file with __main__.py, or with -m the name of the module"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script finds in sys.argv")
    parser.set_defaults(run=_run_program)


def run_script(script: str, arguments: list[str], is_module: bool = False) -> None:
    """Runs a program as `python` would: a file (source or byte code) as the main module, with its folder first on
    `sys.path`; a folder or a zip file by its `__main__`; or a module, as `python -m` does.

    The module replaces `__main__`, because the processes that it starts import the script by its path.
    """
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.argv[:] = [script, *arguments]
    if is_module or pkgutil.get_importer(script) is not None:
        if not is_module:
            sys.path[: not sys.flags.safe_path] = [os.path.abspath(script)]  # `-P` left out the entry to replace
        sys.modules["__main__"] = main
        # `run_module` would take `__main__` away again.
        runpy._run_module_as_main(script if is_module else "__main__", alter_argv=is_module)  # type: ignore[attr-defined]
        return
    path = os.path.abspath(script)
    code = pkgutil.read_code(io.BytesIO(Path(path).read_bytes()))  # None if it is source
    loader = SourcelessFileLoader("__main__", path) if code else SourceFileLoader("__main__", path)
    # `dont_inherit`: this file's future imports are not the program's.
    code = code or compile(Path(path).read_bytes(), script, "exec", dont_inherit=True)
    main.__dict__.update(__file__=path, __spec__=None, __loader__=loader)
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).resolve().parent)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _run_program(arguments: argparse.Namespace) -> int:
    if not arguments.module and not Path(arguments.script).exists():
        print(f"error: there is no file {arguments.script}", file=sys.stderr)
        return 2
    if arguments.compat:
        try:
            with kept_interrupt():  # the imports take seconds
                from rpcdist.compat._aliases import install

                install()
        except KeyboardInterrupt:
            raise interrupted() from None
    try:
        run_script(arguments.script, arguments.arguments, arguments.module)
    except Exception as error:
        # Printed as `python script.py` would, without the frames of this command.
        frames = _frames_of_program(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return 1
    except KeyboardInterrupt:  # the interpreter prints it, and ends with SIGINT
        show = sys.excepthook
        sys.excepthook = lambda kind, error, frames: show(
            kind, error.with_traceback(_frames_of_program(frames)), _frames_of_program(frames)
        )
        raise
    return 0


def _frames_of_program(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and _is_ours(frames.tb_frame.f_globals):
        frames = frames.tb_next
    return frames


def _is_ours(names: dict[str, Any]) -> bool:
    """Whether a frame with these globals is one of this command, which the program did not call."""
    is_command = names.get("__name__") == "__main__" and names.get("__package__") == "rpcdist"
    return is_command or names.get("__name__") in (__name__, "rpcdist.__main__", "runpy")
