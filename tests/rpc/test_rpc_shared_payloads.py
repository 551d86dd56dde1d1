"""Large tensors in memory that two processes share: what their users see, and what is left when one dies."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rpcdist import freed_memory, rpc
from rpcdist.errors import WorkerLost
from rpcdist.testing import WorkerPool, eventually
from rpcdist.transport.shared_memory import unavailable

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(unavailable() is not None, reason=f"memory cannot be shared here: {unavailable()}"),
]

MIB = 1 << 20
kept: list[Any] = []


def num_segments(pid: int | str = "self") -> int:
    """How many segments of shared memory a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:rpcdist")


def echo(value: Any) -> Any:
    return value


def keep(value: Any) -> None:
    kept.append(value)


def total() -> float:
    return float(sum(value.sum() for value in kept))


def echo_all(to: str) -> None:
    """Runs in a worker: values of many kinds come back as they were, again and again."""
    base = torch.arange(MIB, dtype=torch.float32)
    tensors = [base, base.view(1024, 1024).t(), torch.arange(MIB).bfloat16(), base[::2]]
    for _ in range(4):
        for tensor in tensors:
            back = rpc.rpc_sync(to, echo, (tensor,))
            assert torch.equal(back, tensor) and back.dtype == tensor.dtype
        for value in ("text \N{SNOWMAN}" * MIB, b"bytes" * MIB):
            assert rpc.rpc_sync(to, echo, (value,)) == value
        array = rpc.rpc_sync(to, echo, (np.arange(MIB),))
        assert (array == np.arange(MIB)).all() and array.flags.writeable
        parts = rpc.rpc_sync(to, echo, ({"a": [base[: MIB // 2], base[MIB // 2 :]], "b": torch.ones(3)},))
        assert torch.equal(torch.cat(parts["a"]), base) and torch.equal(parts["b"], torch.ones(3))


def write_to_it(to: str) -> list[float]:
    tensor = torch.zeros(MIB)
    for _ in range(3):
        back = rpc.rpc_sync(to, echo, (tensor,))
        back += 1  # ours alone: neither the argument nor a later value changes with it
    return [float(tensor.sum()), float(back.sum()), float(rpc.rpc_sync(to, echo, (tensor,)).sum())]


def aliases(to: str) -> bool:
    tensor = torch.zeros(MIB)
    for _ in range(3):
        first, second = rpc.rpc_sync(to, echo, ((tensor, tensor[10:]),))
    first[10] = 7.0
    return bool(second[0] == 7.0)


def sum_in_child(to: str) -> float:
    """The sum of a received tensor in a child that outlives the tensor in its parent."""
    for _ in range(3):
        tensor = rpc.rpc_sync(to, echo, (torch.ones(MIB),))
    begin, sums = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.read(begin[0], 1)
        os.write(sums[1], str(float(tensor.sum())).encode())
        os._exit(0)
    del tensor
    for _ in range(3):
        rpc.rpc_sync(to, echo, (torch.zeros(MIB),))
    os.write(begin[1], b"x")
    os.waitpid(child, 0)
    result = float(os.read(sums[0], 100))
    for descriptor in (*begin, *sums):
        os.close(descriptor)
    return result


def has_stock(value: Any) -> bool:
    return hasattr(freed_memory._stock, "is_there")


def stocks(to: str) -> list[bool]:
    return [rpc.rpc_sync(to, has_stock, (torch.ones(size),)) for size in (MIB // 8, MIB)]


def call_many(to: str, count: int) -> int:
    """Returns how many segments this process has mapped then."""
    tensor = torch.ones(MIB // 4)
    for _ in range(count):
        rpc.rpc_sync(to, echo, (tensor,))
    return num_segments()


def places(to: str, how: str) -> list[int]:
    """For several calls: where the argument of a function lay at the callee."""
    tensor = torch.ones(MIB)
    if how == "async_execution":
        return [rpc.rpc_sync(to, place_later, (tensor,)) for _ in range(12)]
    if how == "generator":
        return [next(rpc.rpc_sync(to, place_as_item, (tensor,))) for _ in range(12)]
    value: Any = (tensor, b"not a tensor only") if how == "a value with a tensor" else tensor
    return [rpc.rpc_sync(to, place, (value,)) for _ in range(12)]


def place(value: Any) -> int:
    return int((value[0] if isinstance(value, tuple) else value).data_ptr())


@rpc.functions.async_execution
def place_later(tensor: torch.Tensor) -> torch.futures.Future[int]:
    future = rpc.Future[int]()
    future.set_result(tensor.data_ptr())
    return future


def place_as_item(tensor: torch.Tensor) -> Iterator[int]:
    found = tensor.data_ptr()
    del tensor
    yield found


def keep_at(to: str, count: int) -> None:
    for _ in range(count):
        rpc.rpc_sync(to, keep, (torch.ones(MIB),))


def send_and_lose(to: str) -> str:
    tensor = torch.ones(MIB)
    try:
        for _ in range(1_000_000):
            rpc.rpc_sync(to, echo, (tensor,))
    except WorkerLost as exc:
        return exc.worker
    return "nobody"


def sum_in_a_child(to: str) -> tuple[float, float]:
    """A forked child reads and writes a received tensor; returns its sum there, and the parent's sum afterwards."""
    tensor = torch.ones(MIB)
    for _ in range(3):
        received = rpc.rpc_sync(to, echo, (tensor,))
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writing, str(received.numpy().sum()).encode())
        received.numpy().fill(0)
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with open(reading) as pipe:
        return float(pipe.read()), float(received.sum())


def lies_in_lent_memory(tensor: torch.Tensor) -> bool:
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(place, 16) for place in line.split()[0].split("-"))
        if start <= address < end:
            return "memfd:rpcdist" in line
    raise AssertionError(f"nothing is mapped at {address:x}")


def where_it_lies(to: str, nested: bool) -> list[bool]:
    """For several calls: whether the argument of a function lies in memory that its caller may write to."""
    tensors = [torch.ones(MIB), torch.arange(MIB)]
    if nested:
        return [rpc.rpc_sync(to, lie_in_lent_memory, ({"a": tensors},)) for _ in range(3)]
    return [rpc.rpc_sync(to, lies_in_lent_memory, (tensor,)) for _ in range(2) for tensor in tensors]


def lie_in_lent_memory(value: dict[str, list[torch.Tensor]]) -> bool:
    ones, numbers = value["a"]
    assert float(ones.sum()) == MIB and int(numbers[-1]) == MIB - 1
    (first, second) = map(lies_in_lent_memory, value["a"])
    assert first == second
    return first


@pytest.mark.parametrize("nested", [False, True], ids=["one tensor", "a dict of tensors"])
@pytest.mark.parametrize("trusts", [True, False])
def test_who_takes_no_pickles_has_a_copy_of_what_is_lent(worker_pool: WorkerPool, trusts: bool, nested: bool) -> None:
    """Its caller could write there while torch reads a tensor twice, which corrupted the heap."""
    world = worker_pool.world("a", "b", allow_pickle=trusts)
    world["b"].run(exec, f"import {__name__}")  # nothing is imported for a, where it is not trusted
    assert set(world["a"].run(where_it_lies, "b", nested)) == {trusts}
    assert (num_segments(world["b"].pid) > 0) is True
    world.shutdown()


@pytest.mark.parametrize("share_payloads", [True, False])
def test_values_of_many_kinds(worker_pool: WorkerPool, share_payloads: bool) -> None:
    world = worker_pool.world("a", "b", share_payloads=share_payloads)
    world["a"].run(echo_all, "b")
    assert (world["a"].run(call_many, "b", 10) > 0) is share_payloads
    world.shutdown()


def test_what_a_received_tensor_is(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b")
    assert world["a"].run(write_to_it, "b") == [0.0, float(MIB), 0.0]
    assert world["a"].run(aliases, "b")
    assert world["a"].run(sum_in_a_child, "b") == (float(MIB), 0.0)  # as after `share_memory_()`
    world.shutdown()


def test_a_forked_child_keeps_what_its_parent_has_freed(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b")
    assert world["a"].run(sum_in_child, "b") == MIB
    world.shutdown()


def test_a_thread_that_serves_large_tensors_has_a_stock_of_small_blocks(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b")
    assert world["a"].run(stocks, "b") == [False, True]
    world.shutdown()


def test_few_segments_serve_many_calls_and_none_is_left(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b")
    assert 0 < world["a"].run(call_many, "b", 500) <= 16
    world.shutdown()
    eventually(lambda: all(num_segments(worker.pid) == 0 for worker in world), "the end of all segments")


@pytest.mark.parametrize("how", ["a tensor", "a value with a tensor", "async_execution", "generator"])
def test_lent_memory_comes_back_with_the_answer(worker_pool: WorkerPool, how: str) -> None:
    """So the next call uses the same memory, which is in the processor's caches."""
    world = worker_pool.world("a", "b")
    found = world["a"].run(places, "b", how)
    # Each call would find other memory if its own came back one call late. The first calls may go before memory is
    # lent, and a message of the session that is written just before an answer may have taken what has come back.
    assert sum(before != after for before, after in itertools.pairwise(found[2:])) <= len(found) // 3
    world.shutdown()


def test_a_lender_that_is_killed_takes_nothing_along(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b")
    world["b"].run(keep_at, "a", 5)
    world["b"].kill()
    eventually(lambda: 0 < num_segments(world["a"].pid) <= 5, "the end of the lender's segments")
    assert world["a"].run(total) == 5.0 * MIB
    world["a"].run(kept_clear)
    eventually(lambda: num_segments(world["a"].pid) == 0, "the end of all segments")


def kept_clear() -> None:
    kept.clear()


def test_a_borrower_that_is_killed_leaves_nothing_with_the_lender(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b")
    sending = world["a"].begin(send_and_lose, "b")
    eventually(lambda: num_segments(world["b"].pid) > 0, "the first loan")
    world["b"].kill()
    assert sending.result() == "b"
    eventually(lambda: num_segments(world["a"].pid) == 0, "the end of all segments")
