"""The functions on real processes, which meet by the environment and run beside RPC."""

from __future__ import annotations

import textwrap

import pytest
from forked_program import ForkedProgram

from rpcdist.testing import LIMIT_S, Program, WorkerPool, free_port

pytestmark = pytest.mark.multiproc

RANK = """
    import sys
    from datetime import timedelta
    import torch
    import rpcdist.collectives as c
    from rpcdist import rpc

    def total(group=None):
        tensor = torch.tensor([float(rank)])
        c.all_reduce(tensor, group=group)
        return tensor.item()

    def operations():
        assert total() == 1 and c.get_backend() == "tcp"
        transposed = torch.arange(6.0).view(2, 3).t() * (rank + 1)
        c.all_reduce(transposed)
        assert torch.equal(transposed, torch.arange(6.0).view(2, 3).t() * 3)
        alone = c.new_group([1])
        assert alone == -100 if rank == 0 else total(alone) == 1
        assert total(c.new_group()) == 1 and total(c.split_group(split_ranks=[[1, 0]])) == 1
        objects = [None, None]
        c.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": 0}, {"rank": 1}]
        received = torch.zeros(2)
        for work in c.batch_isend_irecv([
            c.P2POp(c.isend, torch.full((2,), float(rank)), 1 - rank), c.P2POp(c.irecv, received, 1 - rank)
        ]):
            work.wait()
        assert received[0].item() == 1 - rank
        work = c.all_reduce(received, async_op=True)
        assert work.wait() and received[0].item() == 1
        c.monitored_barrier(timeout=timedelta(seconds=20))
"""

BY_ENVIRONMENT = """
    rank = int(sys.argv[1])
    for attempt in range(3):
        c.init_process_group(timeout=timedelta(seconds=30))
        operations()
        c.destroy_process_group()
    print("again and again", flush=True)

    # RPC and groups share host and port, whichever comes first.
    c.init_process_group(timeout=timedelta(seconds=30))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    assert rpc.rpc_sync(f"worker{1 - rank}", torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
    assert total() == 1
    rpc.shutdown()
    assert total() == 1
    c.destroy_process_group()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    c.init_process_group(timeout=timedelta(seconds=30))
    assert total() == 1 and rpc.rpc_sync(f"worker{1 - rank}", abs, (-3,)) == 3
    c.destroy_process_group()
    rpc.shutdown()
    print("with rpc", flush=True)
"""


def program(main: str) -> str:
    return textwrap.dedent(RANK) + textwrap.dedent(main)


def test_by_environment_and_beside_rpc(worker_pool: WorkerPool) -> None:
    port = str(free_port())
    variables: dict[str, str | None] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    code = program(BY_ENVIRONMENT)
    with (
        ForkedProgram(worker_pool, code, 0, environment={**variables, "RANK": "0"}) as first,
        ForkedProgram(worker_pool, code, 1, environment={**variables, "RANK": "1"}) as second,
    ):
        for expected in ("again and again", "with rpc"):
            assert first.line() == expected and second.line() == expected


GROUP_OF_RANK_1 = """
    import os, sys, time
    from datetime import timedelta
    import rpcdist.collectives as c

    c.init_process_group(timeout=timedelta(seconds=30))
    if os.environ["RANK"] == "1":
        time.sleep(float(sys.argv[2]))  # it has more work than rank 0, whose program ends meanwhile
    group = c.new_group([1])
    if os.environ["RANK"] == "1":
        c.barrier(group)
    elif sys.argv[1] == "destroys":
        c.destroy_process_group()
    elif sys.argv[1] == "fails":
        raise ValueError("no data")
"""


def end_with_rank_1(way: str, late_s: float) -> tuple[Program, Program]:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    first, second = (
        Program(GROUP_OF_RANK_1, way, late_s, environment={**environment, "RANK": str(rank)}) for rank in range(2)
    )
    return first, second


@pytest.mark.parametrize("way", ["returns", "destroys"])
def test_the_program_of_rank_0_may_end_before_others_make_their_group(way: str) -> None:
    """Rank 0 serves the store that they need; in torch, it waits in `new_group`."""
    first, second = end_with_rank_1(way, 1.0)
    with first, second:
        assert second.end() == 0, second.output
        assert first.end() == 0, first.output


def test_rank_0_does_not_wait_for_groups_of_others_when_it_fails() -> None:
    first, second = end_with_rank_1("fails", LIMIT_S)
    with first, second:
        assert first.end() == 1
        assert "ValueError: no data" in first.output and "did not make group" not in first.output, first.output
