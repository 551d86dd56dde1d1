"""A program of two processes that a user starts: functions of `__main__` by name and by value, calls at wrong times."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiproc

LIMIT_S = 100.0

SCRIPT = """
import asyncio
import sys

import torch
import torch.multiprocessing as mp

import rpcdist.rpc as rpc
from rpcdist.errors import AlreadyInitialized, DeadlineExceeded, NotInitialized


class Point:
    def __init__(self, x):
        self.x = x

    def moved(self, by):
        return Point(self.x + by)

    @classmethod
    def origin(cls):
        return cls(0)


def double(x):
    return 2 * x


async def double_later(x):
    await asyncio.sleep(0)
    return 2 * x


def items(num):
    yield from range(num)


@rpc.functions.async_execution
def never():
    kept.append(torch.futures.Future())
    return kept[-1]


kept = []


def back(x):
    return rpc.rpc_sync("a", double, (x,))


def expect(error, call, *args):
    try:
        call(*args)
    except error as exc:
        return str(exc)
    raise AssertionError(f"{call} did not raise {error}")


def calls_at_wrong_times():
    for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote, rpc.rpc_stream):
        assert "init_rpc" in expect(NotInitialized, call, "b", double, (1,)), call
    assert "init_rpc" in expect(NotInitialized, rpc.get_worker_info)
    assert "init_rpc" in expect(RuntimeError, rpc.shutdown)


def by_name():
    for to in ("a", "b"):
        assert rpc.rpc_sync(to, double, (3,)) == 6
        assert rpc.rpc_sync(to, double_later, (3,)) == 6
        assert list(rpc.rpc_stream(to, items, (3,))) == [0, 1, 2]
        assert rpc.rpc_sync(to, Point, (4,)).x == 4
        assert rpc.rpc_sync(to, Point(4).moved, (1,)).x == 5
        assert rpc.rpc_sync(to, Point.origin).x == 0
    assert rpc.rpc_sync("b", back, (4,)) == 8
    assert rpc.remote("b", Point, (7,)).rpc_sync().moved(1).x == 8


def by_value():
    offset = 10
    for to in ("a", "b"):
        assert rpc.rpc_sync(to, lambda x: x + offset, (3,)) == 13
        assert rpc.rpc_sync(to, lambda point: point.moved(1).x, (Point(1),)) == 2
        assert list(rpc.rpc_stream(to, lambda n: (i * i for i in range(n)), (3,))) == [0, 1, 4]

        async def later(x):
            await asyncio.sleep(0)
            return x + offset

        assert rpc.rpc_async(to, later, (1,)).wait() == 11


def run(rank, url):
    calls_at_wrong_times()
    for life, value in enumerate((False, True, False)):  # a process may come back
        options = rpc.RpcOptions(init_method=f"{url}{life}", by_value=value, rpc_timeout=60)
        rpc.init_rpc("ab"[rank], rank=rank, world_size=2, rpc_backend_options=options)
        expect(AlreadyInitialized, rpc.init_rpc, "again")
        if rank == 0:
            by_value() if value else by_name()
        elif not value:
            assert rpc.rpc_sync("a", double, (5,)) == 10
        expect(DeadlineExceeded, lambda: rpc.rpc_sync("b", never, timeout=0.2))  # nobody waits for its future any more
        late = rpc.rpc_async("b", double, (torch.ones(2),))
        rpc.shutdown()
        kept.clear()  # by now nobody calls `never`; functions sent by value in the next life would take them along
        assert torch.equal(late.wait(), torch.full((2,), 2.0))  # shutdown waited for it
        calls_at_wrong_times()
    sys.stdout.write(f"rank {rank} is done\\n")  # one write: two processes share the pipe


if __name__ == "__main__":
    child = mp.get_context("spawn").Process(target=run, args=(1, sys.argv[1]))
    child.start()
    run(0, sys.argv[1])
    child.join(60)
    sys.exit(child.exitcode)
"""


@pytest.mark.timeout(2 * LIMIT_S)
def test_functions_of_main_travel_by_name_and_by_value(tmp_path: Path) -> None:
    """The callee is a spawned child: what is `__main__` here is `__mp_main__` there."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script), f"file://{tmp_path}/rendezvous"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/", start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)  # its child as well
                process.wait()
    assert process.returncode == 0 and "Traceback" not in errors, output + errors
    assert sorted(output.splitlines()) == ["rank 0 is done", "rank 1 is done"]
