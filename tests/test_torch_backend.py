"""torch's functions, DDP and FSDP on our groups, in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch_backend_ranks import serve

from rpcdist.collectives.torch_backend import TorchWork, register
from rpcdist.collectives.work import Work
from rpcdist.errors import CollectiveTimeout

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from leak_guard import LeakGuard

LIMIT_S = 60.0


class Ranks:
    """Processes that stay alive for all tests of this module."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes: list[SpawnProcess] = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, size), name=f"torch rank {rank}")
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, name: str, folder: Path) -> None:
        for pipe in self.pipes:
            pipe.send((name, str(folder / "store")))
        answers: list[str] = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(LIMIT_S), f"rank {rank} does not answer; before it: {answers}"
            answers.append(pipe.recv())
        assert not any(answers), "\n".join(answers)

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(LIMIT_S)
            if process.is_alive():
                process.kill()
            pipe.close()
        assert [process.exitcode for process in self.processes] == [0] * len(self.processes)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, leak_guard: LeakGuard, job_token: str) -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RPCDIST_FLIGHT_RECORDER_DIR", str(tmp_path_factory.mktemp("flight")))
        started = Ranks(2)
    for process in started.processes:
        assert process.pid is not None
        leak_guard.exempt_child(process.pid)
    yield started
    started.close()


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "name",
    ["collectives", "objects_and_messages", "subgroups", "functional", "mismatch", "again", "ddp", "ddp_hook", "fsdp"],
)
def test_torch_runs_on_our_groups(ranks: Ranks, tmp_path: Path, name: str) -> None:
    ranks.run(name, tmp_path)


def test_a_world_of_one_in_this_process(tmp_path: Path) -> None:
    dist.init_process_group("rpcdist", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0] * 3 and "rpcdist" in repr(dist.get_backend())
    finally:
        dist.destroy_process_group()


def test_registering_again_changes_nothing() -> None:
    register()
    assert dist.is_backend_available("rpcdist") and os.getpid()


def test_work_of_several_operations_is_done_when_all_are() -> None:
    first, second = Work("a", [torch.zeros(1)]), Work("b", [torch.ones(1)])
    both = TorchWork(first, second)
    future, outcome = both.get_future(), both.get_future_result()
    first.complete(source=3)
    assert not both.is_completed() and not future.done() and both.source_rank() == 3
    with pytest.raises(CollectiveTimeout, match="b failed"):
        both.wait(0.01)
    second.complete()
    assert both.wait() and both.is_success() and both.exception() is None
    assert [tensor.item() for tensor in future.wait()] == [0.0, 1.0] and outcome.wait() == 0
    assert len(both.result()) == 2


def test_work_that_failed_says_so() -> None:
    good, bad = Work.finished("a"), Work("b")
    both = TorchWork(good, bad)
    bad.fail(CollectiveTimeout("b", "late"))
    assert both.is_completed() and not both.is_success() and isinstance(both.exception(), CollectiveTimeout)
    with pytest.raises(CollectiveTimeout):
        both.wait()
    assert both.get_future_result().wait() == 1
