"""Generates `rpcdist/_proto/` from `proto/`; `make proto` runs it, and `--check` compares without writing.

Generated code refuses a protobuf runtime older than its generator, so the generator is the one of the oldest protobuf
that pyproject.toml admits. That version cannot share an environment with a newer protobuf package, which is why it is
installed alone, without its dependencies, into `build/`: the compiler is one extension module and needs none of them.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["GENERATOR", "differences", "generate", "generator_folder", "install_generator"]

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
TARGET = ROOT / "rpcdist" / "_proto"

GENERATOR = "grpcio-tools==1.72.2"  # carries protoc 6.30.0: the oldest protobuf in pyproject.toml
INSTALL_TIMEOUT_S = 300
GENERATE_TIMEOUT_S = 60


def generator_folder() -> Path:
    """Where the generator is or would be installed; another version or another Python gets another folder."""
    return ROOT / "build" / f"{GENERATOR.replace('==', '-')}-{sys.implementation.cache_tag}"


def install_generator() -> Path:
    """Installs the generator unless it is there already.

    Returns:
        The folder that has to be on the path of the process that generates.

    Raises:
        subprocess.CalledProcessError: pip failed; its own message is on stderr.
    """
    folder = generator_folder()
    if not (folder / "grpc_tools").is_dir():
        # First beside it and then renamed, so that an install that was cut off is not taken for a whole one.
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            unfinished = Path(scratch) / "generator"
            command = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(unfinished), GENERATOR]
            subprocess.run([sys.executable, *command], check=True, timeout=INSTALL_TIMEOUT_S)
            unfinished.rename(folder)
    return folder


def generate(target: Path) -> dict[str, str]:
    """Generates code for every file of `proto/` below `target`, under the import path that it will have.

    Returns:
        The text of each generated file, by its name.

    Raises:
        subprocess.CalledProcessError: a .proto file has an error; protoc's message is on stderr.
    """
    sources = [f"rpcdist/_proto/{source.name}" for source in sorted(SOURCES.glob("*.proto"))]
    options = [f"-Irpcdist/_proto={SOURCES}", f"--python_out={target}", f"--pyi_out={target}"]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", *options, *sources],
        check=True,
        timeout=GENERATE_TIMEOUT_S,
        cwd=target,
        env={**os.environ, "PYTHONPATH": str(install_generator())},
    )
    return _texts(target / "rpcdist" / "_proto")


def differences() -> list[str]:
    """The changes that `make proto` would make, as the lines of a unified diff; empty when the generated code is up to
    date.
    """
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
    committed = _texts(TARGET)
    return [
        line
        for name in sorted(fresh.keys() | committed.keys())
        for line in difflib.unified_diff(
            committed.get(name, "").splitlines(),
            fresh.get(name, "").splitlines(),
            f"rpcdist/_proto/{name} (committed)",
            f"rpcdist/_proto/{name} (fresh)",
            lineterm="",
            n=0,
        )
    ]


def _texts(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted(folder.glob("*_pb2.py*"))}


def _write() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
    for name in _texts(TARGET).keys() - fresh.keys():
        (TARGET / name).unlink()
    for name, text in fresh.items():
        if not (TARGET / name).exists() or (TARGET / name).read_text() != text:
            (TARGET / name).write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate rpcdist/_proto/ from proto/.")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="write nothing; fail if the generated code is out of date")
    choice.add_argument("--install", action="store_true", help="only install the generator")
    options = parser.parse_args()
    if options.install:
        install_generator()
    elif options.check:
        changes = differences()
        if changes:
            print(
                *(line[:200] for line in changes[:20]),
                "rpcdist/_proto/ is out of date: run `make proto` and commit the result.",
                sep="\n",
            )
            return 1
        print("rpcdist/_proto/ is up to date.")
    else:
        _write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
