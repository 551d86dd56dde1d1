"""A job that `torchrun` starts again: no rank finds what its predecessors wrote into the store of torchrun's agent."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rpcdist.collectives.rendezvous import ATTEMPT_VARIABLE, job_attempt
from rpcdist.testing.limits import UNIT_S

PROGRAM = Path(__file__).with_name("restarts_program.py")
LIMIT_S = 900 * UNIT_S


@pytest.mark.multiproc
@pytest.mark.parametrize("what", ["rpc", "torch", pytest.param("groups", marks=pytest.mark.stress)])
def test_after_a_restart_the_job_begins_anew(what: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "1", str(PROGRAM), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    said = sorted(re.findall(r"rank \d of attempt \d got \d", done.stdout))
    assert said == ["rank 0 of attempt 1 got 1", "rank 1 of attempt 1 got 1"], done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "0.0"),
        ({"TORCHELASTIC_RESTART_COUNT": "3"}, "0.3"),
        ({"TORCHELASTIC_RESTART_COUNT": "3", "SLURM_RESTART_COUNT": "2"}, "2.3"),
        ({"TORCHELASTIC_RESTART_COUNT": "3", ATTEMPT_VARIABLE: "run-7"}, "run-7"),
        ({ATTEMPT_VARIABLE: ""}, "0.0"),
    ],
)
def test_the_attempt_is_named_by_whoever_starts_the_job(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", ATTEMPT_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert job_attempt() == expected
