"""The functions that the ranks of `rank_pool` run in the tests that kill or stop one of them, in any function."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

import api_cases
import pytest
import torch

import rpcdist.collectives as c
from rpcdist.collectives import tcp
from rpcdist.collectives.tcp import TcpOptions
from rpcdist.transport.shared_memory import Segment, SegmentError

__all__ = [
    "FUNCTIONS",
    "die_while_the_group_is_made",
    "go_on_until_it_fails",
    "lack_memory_while_the_group_is_made",
    "leave",
    "may_a_child_call",
    "meet_and_part",
    "open_world",
    "sum_up",
    "sum_up_until_one_fails",
    "time_out",
]

LIMIT = timedelta(seconds=30)
Call = Callable[[int, int], object]

CASE = api_cases.Case(
    "", torch.float32, (20_000,), c.ReduceOp.SUM, "contiguous", "contiguous", root=0, asynchronous=False, seed=1
)


def _objects(size: int) -> list[object]:
    return ["x" * 30_000 for _ in range(size)]


def _ring(rank: int, size: int, length: int = 30_000, from_any: bool = False) -> None:
    """Blocking messages; the first rank sends first."""
    after, before, tensor = (rank + 1) % size, (rank - 1) % size, torch.ones(length)
    if rank == 0:
        c.send(tensor, after)
    c.recv(tensor, None if from_any else before)
    if rank:
        c.send(tensor, after)


def _object_messages(rank: int, size: int) -> None:
    if rank == 0:
        for other in range(1, size):
            c.send_object_list(_objects(2), other)
    else:
        c.recv_object_list([None, None], 0)
    c.barrier()


def _scatter_objects(rank: int, size: int) -> None:
    c.scatter_object_list([None], _objects(size) if rank == 0 else None, 0)


def _gather_objects(rank: int, size: int) -> None:
    c.gather_object("x" * 30_000, [None] * size if rank == 0 else None, 0)


def _of_case(name: str) -> Call:
    return lambda rank, size: api_cases.FUNCTIONS[name](CASE, rank, size)


FUNCTIONS: dict[str, Call] = {
    **{name: _of_case(name) for name in api_cases.FUNCTIONS},
    "send_recv": _ring,
    "send_recv small": partial(_ring, length=3),  # goes the shortest way
    "send_recv small, from any": partial(_ring, length=3, from_any=True),
    "send_object_list": _object_messages,
    "all_gather_object": lambda rank, size: c.all_gather_object([None] * size, "x" * 30_000),
    "broadcast_object_list": lambda rank, size: c.broadcast_object_list(_objects(2), 0),
    "gather_object": _gather_objects,
    "scatter_object_list": _scatter_objects,
    "monitored_barrier": lambda rank, size: c.monitored_barrier(),
    "new_group": lambda rank, size: c.destroy_process_group(c.new_group(timeout=LIMIT)),
}
"""Every function that several ranks call together."""


def open_world(rank: int, size: int, path: str, shared_memory: bool, timeout_s: float) -> None:
    """`timeout_s` is for the operations."""
    leave(rank, size)
    options = TcpOptions(shared_memory=shared_memory)
    c.init_process_group("tcp", f"file://{path}", timeout=LIMIT, world_size=size, rank=rank, pg_options=options)
    c.barrier()
    world = c.group.WORLD
    assert world is not None
    world.set_timeout(timedelta(seconds=timeout_s))


def leave(rank: int, size: int) -> None:
    if c.is_initialized():
        c.destroy_process_group()
        c.close_stores()


def sum_up_until_one_fails(rank: int, size: int, victim: int) -> str:
    """The victim's program fails and cleans up; returns the text of the error that this rank raised."""
    try:
        c.all_reduce(torch.ones(2))
        try:
            if rank == victim:
                raise ValueError("no more data")
            c.all_reduce(torch.ones(2))
        finally:
            if rank == victim:
                c.destroy_process_group()
    except Exception as exc:
        return str(exc)
    return "nothing"


def go_on_until_it_fails(rank: int, size: int, name: str, victim: int) -> tuple[str, str, float]:
    """Calls one function again and again, while the victim is killed at some moment; returns the error that it raised,
    and when.
    """
    call = FUNCTIONS[name]
    try:
        call(rank, size)
        if rank == victim:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            call(rank, size)
    except Exception as exc:
        return type(exc).__name__, str(exc), time.time()


def time_out(rank: int, size: int, name: str, victim: int) -> tuple[str, str]:
    """Calls one function again and again; the victim stops in between as if it hung, until the test goes on with it."""
    call = FUNCTIONS[name]
    try:
        call(rank, size)
        if rank == victim:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        while True:
            call(rank, size)
    except Exception as exc:
        return type(exc).__name__, str(exc)


def sum_up(rank: int, size: int, seconds: float) -> int:
    """All functions in turn, whose results are compared with the right ones; how many rounds."""
    rounds, until = 0, time.monotonic() + seconds
    while True:
        for name in api_cases.FUNCTIONS:
            api_cases.check(rank, size, [replace(CASE, function=name)])
        rounds += 1
        more = torch.tensor(float(time.monotonic() < until))
        c.all_reduce(more, c.ReduceOp.MIN)
        if not more:
            return rounds


def may_a_child_call(rank: int, size: int) -> str:
    """The error of an operation in a forked child; the group of the parents is well afterwards."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            c.all_reduce(torch.ones(3))
            answer = "worked"
        except BaseException as exc:
            answer = type(exc).__name__
        os.write(writing, answer.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    tensor = torch.ones(3)
    c.all_reduce(tensor)
    assert tensor.tolist() == [float(size)] * 3
    return answer


def die_while_the_group_is_made(rank: int, size: int, path: str, victim: int) -> tuple[str, str, float]:
    """The victim has met the others, and dies before the group works."""
    leave(rank, size)
    if rank == victim:
        tcp._make_transport = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    try:
        open_world(rank, size, path, True, 30.0)
    except Exception as exc:
        return type(exc).__name__, str(exc), time.time()
    return "nothing", "", 0.0


def lack_memory_while_the_group_is_made(rank: int, size: int, path: str, victim: int, again: str) -> tuple[str, str]:
    """The victim cannot map the memory of its host. Afterwards all ranks make the group."""
    leave(rank, size)

    def refuse(*_: object) -> None:
        raise SegmentError("cannot map it today")

    outcome = "nothing", ""
    with pytest.MonkeyPatch.context() as patch:
        if rank == victim:
            patch.setattr(Segment, "map", refuse)
        try:
            open_world(rank, size, path, True, 30.0)
        except Exception as exc:
            outcome = type(exc).__name__, str(exc)
    open_world(rank, size, again, True, 30.0)
    leave(rank, size)
    return outcome


def meet_and_part(rank: int, size: int, path: str, count: int) -> None:
    """Makes groups and leaves them at once, without waiting for anybody."""
    leave(rank, size)
    for _ in range(count):
        c.init_process_group("tcp", f"file://{path}", timeout=LIMIT, world_size=size, rank=rank)
        c.destroy_process_group()
    c.close_stores()
