"""Programs that torchrun's agent starts, in the processes of one job: importing torch is what takes the time.

Each finds what its predecessors left in these processes and in the store of torchrun's agent, which ends with the job.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from docs_programs import environment

from rpcdist.testing.limits import END_LIMIT_S

__all__ = ["Program", "Ran", "run_under_torchrun"]

DRIVER = Path(__file__).with_name("torchrun_driver.py")


@dataclass(frozen=True, slots=True)
class Program:
    """One of the job's: the first `world_size` ranks take part."""

    script: Path
    arguments: tuple[str, ...] = ()
    world_size: int = 2


@dataclass(frozen=True, slots=True)
class Ran:
    """The outcome: the status of rank 0, and the output of each rank. `folder` was the current one."""

    folder: Path
    returncode: int
    outputs: tuple[str, ...]
    errors: tuple[str, ...]

    @property
    def stdout(self) -> str:
        return "".join(reversed(self.outputs))  # the last line is one of rank 0

    @property
    def stderr(self) -> str:
        return "".join(reversed(self.errors))


def run_under_torchrun(
    programs: Sequence[Program],
    folder: Path,
    limit_s: float,
    imports: Sequence[str] = ("rpcdist.rpc",),
    max_restarts: int = 0,
    num_agents: int = 1,
) -> list[Ran]:
    """Runs `programs` in turn; a program that fails does not keep the others from running.

    Args:
        programs: each with its script, arguments and number of ranks.
        folder: for what they print.
        limit_s: for the whole job, in seconds.
        imports: modules that several ranks need; the agent imports them once, before it forks the ranks.
        max_restarts: how often all ranks begin again when one ends other than by returning; earlier output is
        overwritten.
        num_agents: nodes of the job, which share the ranks; each counts the failures of its own.
    """
    listed = [(str(program.script), program.arguments, program.world_size) for program in programs]
    job_text = {"imports": imports, "programs": listed, "max_restarts": max_restarts, "num_agents": num_agents}
    (folder / "job.json").write_text(json.dumps(job_text))
    with subprocess.Popen(
        [sys.executable, DRIVER, folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(OMP_NUM_THREADS="1"),
    ) as job:
        try:
            said, _ = job.communicate(timeout=limit_s)
        except BaseException:
            job.terminate()  # the agent ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(END_LIMIT_S)
            job.kill()  # an agent that hangs; the kernel ends its ranks with it
            raise
    assert job.returncode == 0, said
    return [_ran(folder / str(number), program.world_size) for number, program in enumerate(programs)]


def _ran(folder: Path, world_size: int) -> Ran:
    outputs, errors = (
        tuple((folder / f"{rank}.{descriptor}").read_text() for rank in range(world_size)) for descriptor in (1, 2)
    )
    return Ran(folder, int((folder / "0.status").read_text()), outputs, errors)
