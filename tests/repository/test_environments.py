"""Each torch and each Python that a make target is given has an environment of its own, with the pins that fit."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


def planned(*variables: str) -> list[str]:
    """The commands of the set-up from nothing."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    command = ["make", "--dry-run", "--always-make", "setup", *variables]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ((), ".venv"),
        (("TORCH=2.14.1",), ".venv-torch2.14.1"),
        ((f"PYTHON={sys.executable}",), f".venv-python{RUNNING}"),
        (("TORCH=2.14.1", f"PYTHON={sys.executable}"), f".venv-torch2.14.1-python{RUNNING}"),
    ],
)
def test_where_a_target_installs(variables: tuple[str, ...], folder: str) -> None:
    commands = planned(*variables)
    [made] = [command for command in commands if " -m venv " in command]
    assert made.endswith(f" -m venv {folder}")
    [installed] = [command for command in commands if " pip install " in command]
    assert installed.startswith(f"{folder}/bin/python ") and installed.endswith(f" -c {folder}/constraints.txt")


@pytest.mark.parametrize("torch", [None, "2.14.1"])
def test_which_pins_hold(torch: str | None) -> None:
    [filtered] = [command for command in planned(*([f"TORCH={torch}"] if torch else [])) if command.startswith("sed ")]
    pins = (ROOT / "constraints.txt").read_text()
    done = subprocess.run(
        shlex.split(filtered.partition(">")[0]), cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    if torch is None:
        assert done.stdout == pins
        return
    changed = set(done.stdout.splitlines()) ^ set(pins.splitlines())
    assert {pin.partition("==")[0] for pin in changed} == {"torch", "setuptools"} and f"torch=={torch}" in changed
