"""Programs under a real Slurm of two nodes, with nothing else set: steps, job arrays, and mpirun in a job."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, slurm_cluster

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.environ.get("RPCDIST_ENGINES") != "1", reason="make engines runs it"),
]
LIMIT_S = 300.0

PROGRAM = textwrap.dedent("""
    import os
    import torch
    import rpcdist
    import rpcdist.collectives as dist
    from rpcdist import rpc

    place = rpcdist.placement_from_environment()
    rpc.init_rpc(place.name)
    dist.init_process_group()
    total = torch.ones(1) * place.rank
    dist.all_reduce(total)
    hosts = [rpc.rpc_sync(f"worker{rank}", os.uname).nodename for rank in range(place.world_size)]
    print(place.rank, dist.get_node_local_rank(), int(total.item()), *hosts, flush=True)
    dist.destroy_process_group()
    rpc.shutdown()
""")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:  # pytest's folders are for this user only
        path = Path(folder)
        (path / "job.py").write_text(PROGRAM)
        with slurm_cluster(path) as started:
            yield started


def lines(text: str) -> list[str]:
    return sorted(text.splitlines())


def test_a_step(cluster: SlurmCluster) -> None:
    ran = cluster.run(f"srun -N2 -n4 --ntasks-per-node=2 {sys.executable} job.py", LIMIT_S)
    expected = [f"{rank} {rank % 2} 6 n1 n1 n2 n2" for rank in range(4)]
    assert (ran.returncode, lines(ran.stdout)) == (0, expected), ran.stderr


def test_two_elements_of_an_array_run_on_the_same_nodes_at_once(cluster: SlurmCluster) -> None:
    options = "--wait --array=0-1 --requeue -N2 --ntasks-per-node=1 -o array-%a.out"
    ran = cluster.run(f"sbatch {options} --wrap 'srun {sys.executable} job.py'", LIMIT_S)
    assert ran.returncode == 0, ran.stderr
    for number in range(2):
        assert lines((cluster.folder / f"array-{number}.out").read_text()) == ["0 0 1 n1 n2", "1 0 1 n1 n2"]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_mpirun_in_a_job(cluster: SlurmCluster) -> None:
    """Its daemon on the second node is a step of Slurm, whose variables the ranks there see."""
    mpirun = f"mpirun --allow-run-as-root --oversubscribe {sys.executable} job.py"
    ran = cluster.run(f"sbatch --wait -N2 --ntasks-per-node=2 -o mpi.out --wrap '{mpirun}'", LIMIT_S)
    printed = (cluster.folder / "mpi.out").read_text()
    assert ran.returncode == 0, ran.stderr + printed
    assert lines(printed) == [f"{rank} {rank % 2} 6 n1 n1 n2 n2" for rank in range(4)]
