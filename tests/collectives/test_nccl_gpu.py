"""The `nccl` backend on a GPU: two ranks share it, which NCCL allows when it takes them for two hosts."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import pytest
from gpu_marks import WITH_NCCL
from nccl_gpu_ranks import serve

if TYPE_CHECKING:
    from leak_guard import LeakGuard

LIMIT_S = 110.0
pytestmark = WITH_NCCL


@pytest.fixture(scope="module")
def pipes(
    tmp_path_factory: pytest.TempPathFactory, leak_guard: LeakGuard, job_token: str
) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    path = str(tmp_path_factory.mktemp("store") / "store")
    pipes, processes = [], []
    for rank in range(2):
        mine, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, rank, path), name=f"nccl rank {rank}")
        process.start()
        theirs.close()
        assert process.pid is not None
        leak_guard.exempt_child(process.pid)
        pipes.append(mine)
        processes.append(process)
    yield pipes
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
        pipe.close()
    assert [process.exitcode for process in processes] == [0, 0]


@pytest.mark.parametrize(
    "name", ["reductions", "moves", "streams", "messages", "split", "late", "abort", "abort_at_the_first"]
)
def test_two_ranks_on_one_gpu(pipes: list[Connection], name: str) -> None:
    for pipe in pipes:
        pipe.send(name)
    answers: list[str] = []
    for rank, pipe in enumerate(pipes):
        assert pipe.poll(LIMIT_S), f"rank {rank} does not answer; before it: {answers}"
        answers.append(pipe.recv())
    assert not any(answers), "\n".join(answers)
