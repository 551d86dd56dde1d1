"""A program that the tasks of one step run: each takes the place that it is given, and starts nothing more.

Open MPI's `mpirun` is the real one where it is installed. `srun` is imitated by its variables here; `make engines` runs
the real one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from program_sessions import LIMIT_S, environment

from rpcdist.testing import free_port

pytestmark = pytest.mark.multiproc

NUM_TASKS = 2

PROGRAM = """
import torch
import rpcdist
import rpcdist.collectives as dist
from rpcdist import rpc

def total(rank):
    dist.init_process_group()
    tensor = torch.ones(1) * (rank + 1)
    dist.all_reduce(tensor)
    local_rank = dist.get_node_local_rank()
    dist.destroy_process_group()
    return rank, local_rank, tensor.item()

if __name__ == "__main__":
    place = rpcdist.placement_from_environment()
    [result] = rpcdist.launch(total, workers=2)
    try:
        rpcdist.LocalCluster(3).start()
    except rpcdist.errors.ConfigError as error:
        assert "workers=3, but the launcher started WORLD_SIZE=2 processes" in str(error), error
    rpc.init_rpc(place.name)
    print(result, rpc.rpc_sync(f"worker{1 - place.rank}", pow, (2, place.rank)), flush=True)
    rpc.shutdown()
    with rpcdist.LocalCluster(2):  # rank 1 serves it, and ends
        print("block", rpc.rpc_sync("worker1", pow, (2, 10)), flush=True)
"""

EXPECTED = ["(0, 0, 3.0) 1", "(1, 1, 3.0) 2", "block 1024"]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_mpirun(program: Path) -> None:
    options = ["--oversubscribe", "--allow-run-as-root"]
    ran = subprocess.run(
        ["mpirun", *options, "-n", str(NUM_TASKS), sys.executable, str(program)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (ran.returncode, sorted(ran.stdout.splitlines())) == (0, EXPECTED), ran.stderr


def test_a_step_of_slurm(program: Path) -> None:
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(NUM_TASKS)}
    where = {"SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(free_port())}  # two tests may run at once
    tasks = []
    for rank in range(NUM_TASKS):
        place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        command = [sys.executable, str(program)]
        variables = environment() | job | where | place
        tasks.append(
            subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        ends = [task.communicate(timeout=LIMIT_S) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    lines = sorted(line for output, _ in ends for line in output.splitlines())
    assert ([task.returncode for task in tasks], lines) == ([0, 0], EXPECTED), ends
