"""The committed protobuf code is what `make proto` makes, for the oldest protobuf that the package admits."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = sorted((ROOT / "rpcdist" / "_proto").glob("*_pb2.py"))
SCRIPT = ROOT / "tools" / "generate_proto.py"


def test_generated_code_is_up_to_date() -> None:
    if not list((ROOT / "build").glob("grpcio-tools-*")):
        pytest.skip("the protobuf generator is not installed; `make setup` does it")
    run = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_proto_file_has_its_module() -> None:
    assert {file.stem for file in (ROOT / "proto").glob("*.proto")} == {
        file.stem.removesuffix("_pb2") for file in GENERATED
    }


@pytest.mark.parametrize("module", GENERATED, ids=lambda file: file.stem)
def test_generated_code_runs_on_the_oldest_protobuf(module: Path) -> None:
    version = re.search(r"^# Protobuf Python Version: (\d+\.\d+)\.", module.read_text(), re.MULTILINE)
    assert version is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [protobuf] = [requirement for requirement in project["dependencies"] if requirement.startswith("protobuf")]
    assert protobuf == f"protobuf>={version[1]}"
