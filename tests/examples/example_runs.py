"""Runs the examples as users do: in sessions of their own, under torchrun, with arguments that they refuse."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torchrun_job import Ran

from rpcdist.testing import free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def torchrun(processes: int) -> tuple[str, ...]:
    command = ("-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(free_port()))
    return (sys.executable, *command)


def last_line(result: subprocess.CompletedProcess[str] | Ran, pattern: str) -> re.Match[str]:
    """The last line of a run that went well, which has this form."""
    assert result.returncode == 0, result.stdout + result.stderr
    found = re.fullmatch(pattern, result.stdout.splitlines()[-1])
    assert found, result.stdout
    return found


@pytest.fixture
def explanation_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Calls an example with arguments that it refuses, in this process; returns its text before it exits with status
    2.
    """

    def explain(example: str, *arguments: str, **launcher: str) -> str:
        monkeypatch.syspath_prepend(EXAMPLES)
        monkeypatch.chdir(tmp_path)
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in launcher.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", [example, *arguments])
        monkeypatch.delitem(sys.modules, example, raising=False)
        with pytest.raises(SystemExit) as caught:
            importlib.import_module(example).main()
        assert caught.value.code == 2
        return capsys.readouterr().err

    return explain
