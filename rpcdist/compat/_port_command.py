"""`python -m rpcdist port`: changes programs that were written for torch, or shows what it would change."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


_DESCRIPTION = """Changes torch.distributed, its rpc, autograd, optim and nn, DDP, SyncBatchNorm and
DistributedSampler to rpcdist's in the import lines and where they are written out in full. Shows a diff, and writes
nothing unless --write is given. Names each line that is left to you on stderr; the exit status is then 1."""


def add_port(commands: Commands) -> None:
    """Adds the command to a parser; `arguments.run(arguments)` runs it."""
    parser = commands.add_parser(
        "port", help="change the imports of scripts that were written for torch", description=_DESCRIPTION
    )
    parser.add_argument("--write", action="store_true", help="change the files instead of showing a diff")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a script, or a folder with scripts")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
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
    """Without hidden folders and virtual environments, whose packages are others' programs."""
    found = []
    for here, folders, files in os.walk(folder):
        place = Path(here)
        folders[:] = [each for each in folders if each[0] != "." and not (place / each / "pyvenv.cfg").exists()]
        found += [place / file for file in files if file.endswith(".py")]
    return sorted(found)


def _port_file(path: Path, *, write: bool) -> int:
    """Ports a file; returns 0, 1 if something is left to do, or 2 if it cannot be read."""
    from rpcdist.compat._porting._rewriting import port

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
        path.write_bytes(result.text.encode(encoding))
        print(f"{path}: {result.changes} changed")
    elif result.text != before:
        old, new = before.splitlines(keepends=True), result.text.splitlines(keepends=True)
        for line in difflib.unified_diff(old, new, fromfile=str(path), tofile=str(path)):
            print(line.rstrip("\r\n"))
    for left in result.left:
        print(f"{path}:{left.line}: {left.name}: {left.advice}", file=sys.stderr)
    return 1 if result.left else 0
