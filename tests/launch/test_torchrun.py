"""Programs of every part of the package under torchrun: those of the pages, and jobs that torchrun starts again."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from docs_programs import blocks, page
from full_sets import FULL_ONLY
from torchrun_job import Program, Ran, run_under_torchrun

pytestmark = pytest.mark.multiproc

RESTARTED = Path(__file__).with_name("restarted_program.py")
LIMIT_S = 100.0

RENDEZVOUS = """
    from rpcdist.collectives import rendezvous
    store, rank, world_size = next(rendezvous("env://", timeout=60))
    store.set(f"rank{rank}", str(rank))
    got = store.multi_get(["rank0", "rank1"])
    store.barrier("end", 2)
    print(type(store).__name__, got, world_size)
"""

RPC = """
    import os
    import torch
    from rpcdist import rpc

    def add(a, b):
        return a + b

    rank = int(os.environ["RANK"])
    options = rpc.RpcOptions(init_method="env://")
    rpc.init_rpc(f"w{rank}", rank=rank, rpc_backend_options=options)
    print(rpc.rpc_sync(f"w{1 - rank}", add, (torch.ones(2), rank)).tolist())
    rpc.shutdown()
"""

GROUPS = """
    from datetime import timedelta
    import torch
    import rpcdist.collectives as c

    def total(group=None):
        tensor = torch.tensor([float(rank)])
        c.all_reduce(tensor, group=group)
        return tensor.item()

    for attempt in range(2):
        c.init_process_group()
        rank = c.get_rank()
        assert c.get_node_local_rank() == rank and c.is_torchelastic_launched() and c.get_backend() == "tcp"
        alone = c.new_group([1])
        assert alone == -100 if rank == 0 else total(alone) == 1
        assert total() == 1 and total(c.new_group()) == 1 and total(c.split_group(split_ranks=[[1, 0]])) == 1
        objects = [None, None]
        c.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": 0}, {"rank": 1}]
        c.monitored_barrier(timeout=timedelta(seconds=20))
        c.destroy_process_group()
    print(f"rank {rank} done")
"""


def sources() -> dict[str, str]:
    """The programs by their names: ours, and those of the pages that say in their first line how they are called."""
    found = {"rendezvous.py": RENDEZVOUS, "rpc.py": RPC, "groups.py": GROUPS}
    named = {name: textwrap.dedent(code) for name, code in found.items()}
    for name in ("README.md", "docs/clusters.md", "docs/launch.md"):
        for _, code in blocks(page(name), "python"):
            if first := re.match(r"# (\w+\.py)\n", code):
                named[first[1]] = code
    return named


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """The output of all programs, one after the other in the same two processes."""
    folder = tmp_path_factory.mktemp("torchrun")
    named = sources()
    names = ["job.py", "average.py", "rendezvous.py", "groups.py", "rpc.py", "beside.py"]
    for name in names:
        (folder / name).write_text(named[name])
    return dict(
        zip(names, run_under_torchrun([Program(folder / name) for name in names], folder, LIMIT_S), strict=True)
    )


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("job.py", ("6\n", "")),
        ("beside.py", ("learned True\n", "")),
        ("average.py", ("[5.0]\n", "[5.0]\n")),
        ("rendezvous.py", ("TorchStoreAdapter [b'0', b'1'] 2\n",) * 2),
        ("rpc.py", ("[1.0, 1.0]\n", "[2.0, 2.0]\n")),
        ("groups.py", ("rank 0 done\n", "rank 1 done\n")),
    ],
)
def test_programs_run(ran: dict[str, Ran], name: str, outputs: tuple[str, str]) -> None:
    assert (ran[name].returncode, ran[name].outputs) == (0, outputs), ran[name].stderr


SELDOM_DEATHS = [
    (2, "connected:0"),
    (2, "connected:1"),
    (2, "connected:0,1"),
    (2, "joining:1"),
    (2, "between:0 between:1"),
    *((3, f"{stage}:{rank}") for stage in ("joining", "between", "connected") for rank in range(3)),
    *((3, f"connected:{ranks}") for ranks in ("0,1", "1,2", "0,1,2")),
    (3, "joining:0,1 between:1,2 connected:0,2"),
    (3, "connected:0,2 connected:1 connected:0"),
]


@pytest.mark.parametrize(
    ("num_agents", "deaths"),
    [(3, "connected:0,2"), *(pytest.param(*each, marks=FULL_ONLY) for each in SELDOM_DEATHS)],
)
def test_all_ranks_meet_again_after_restarts(tmp_path: Path, num_agents: int, deaths: str) -> None:
    """One node for each rank. No rank finds what its predecessors wrote into the store of the agent, and all meet."""
    attempts = deaths.split()
    program = Program(RESTARTED, tuple(attempts), world_size=num_agents)
    imports = ("rpcdist.rpc", "rpcdist.collectives")
    [ran] = run_under_torchrun([program], tmp_path, LIMIT_S, imports, max_restarts=len(attempts), num_agents=num_agents)
    sums = [sum(range(num_agents))] * 3
    for rank, output in enumerate(ran.outputs):
        count = sum(str(rank) in attempt for attempt in attempts)
        assert output == f"rank {rank}, restart count {count}, got {sums}\n", ran.errors
    assert ran.returncode == 0
