"""The functions that workers run in the tests of lent memory of GPUs: tensors that go from GPU to GPU, and in which
order.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_rpc_functions import CYCLES, GPU, device_of, make_on_gpu, same, twice
from inside_agents import current_agent
from torch import Tensor

import rpcdist.autograd as dist_autograd
import rpcdist.rpc as rpc
from rpcdist.errors import SerializationError, WorkerLost
from rpcdist.testing import eventually

LONG_CYCLES = 3_000_000_000
"""The GPU is busy for more than a second with this."""


def sharing() -> Any:
    return current_agent().gpus


def lent_memory() -> Any:
    """The memory that this worker lends of its GPUs; None if it never lent any."""
    return sharing()._lent


def reader_of(name: str, device: int = 0) -> str | None:
    """Whether a worker reads memory of a GPU of this one: empty, why not, or None while nobody asked."""
    agent = current_agent()
    identity = agent.directory.member(agent.directory.resolve(name)).identity
    answer: str | None = agent.gpus._readers.get((identity, device))
    return answer


def until_known(name: str, device: int = 0) -> None:
    """Sends tensors both ways until both workers know that the other reads their memory."""
    me = rpc.get_worker_info().name
    rpc.rpc_sync(name, twice, (torch.ones(1, device=torch.device("cuda", device)),))
    for asked, other in ((me, name), (name, me)):
        eventually(lambda asked=asked, other=other: rpc.rpc_sync(asked, reader_of, (other, device)) == "")  # type: ignore[misc]


def loans() -> list[str]:
    """The memory that this worker lends."""
    lent = lent_memory()
    return [] if lent is None else [str(each) for each in lent._lent.values()]


# ---------------------------------------------------------------- called from elsewhere

kept: dict[str, Tensor] = {}


def keep(name: str, value: Tensor) -> None:
    kept[name] = value


def get(name: str) -> Tensor:
    return kept[name]


def add_slowly(name: str, number: float) -> None:
    torch.cuda._sleep(CYCLES // 10)
    kept[name].add_(number)


def total(values: list[Tensor]) -> Tensor:
    return torch.stack([value.sum() for value in values]).sum()


def shares_storage(one: Tensor, two: Tensor) -> bool:
    one.fill_(5)
    return bool(two.eq(5).all()) and one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def stream_of(value: Tensor) -> bool:
    """Whether the current stream is one of a pool."""
    return torch.cuda.current_stream() != torch.cuda.default_stream()


async def stream_of_coroutine(value: Tensor) -> tuple[bool, Tensor]:
    await asyncio.sleep(0)
    return torch.cuda.current_stream() != torch.cuda.default_stream(), value + 1


def raises(value: Tensor) -> None:
    raise ValueError("with a tensor", value)


def count_up(value: Tensor) -> Any:
    for number in range(5):
        yield value + number


def limit_memory(fraction: float) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(fraction)


def slowly(value: Tensor, cycles: int) -> Tensor:
    torch.cuda._sleep(cycles)
    return value * 3


class Counter:
    """An actor with a tensor."""

    def __init__(self) -> None:
        self.total = torch.zeros(1000, device=GPU)

    def add(self, value: Tensor) -> Tensor:
        torch.cuda._sleep(CYCLES // 20)
        self.total += value
        return self.total


# ------------------------------------------------------------ programs: each runs on alice, and bob reads her memory


def nobody_waits_on_the_host() -> None:
    """A call is made, runs and is answered while the kernel before it runs."""
    until_known("bob")
    value = torch.zeros(1_000_000, device=GPU)
    rpc.rpc_sync("bob", twice, (value,))  # slots and events are there
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    value.fill_(3)
    behind = torch.cuda.Event()
    behind.record()
    result = rpc.rpc_sync("bob", twice, (value,))
    assert not behind.query(), "the call waited for the GPU"
    assert result.eq(6).all()


def no_backward_pass_waits_on_the_host() -> None:
    """A pass over two workers ends while the kernel before it runs, and its gradients are right when they are read."""
    until_known("bob")
    weight = torch.full((300_000,), 2.0, device=GPU, requires_grad=True)
    for cycles in (1, LONG_CYCLES):  # first, slots and events are made
        torch.cuda.synchronize()
        with dist_autograd.context() as context:
            torch.cuda._sleep(cycles)
            behind = torch.cuda.Event()
            behind.record()
            loss = rpc.rpc_sync("bob", twice, (weight,)).sum()
            dist_autograd.backward(context, [loss])
            gradient = dist_autograd.get_gradients(context)[weight]
            assert cycles == 1 or not behind.query(), "the pass waited for the GPU"
            assert gradient.eq(2).all()


def what_is_sent_is_what_was_there() -> None:
    """A tensor changes after the call was made, and a value after it was answered; both are copies."""
    until_known("bob")
    for number in range(300):
        value = torch.full((300_000,), float(number), device=GPU)
        torch.cuda._sleep(CYCLES // 50)
        future = rpc.rpc_async("bob", twice, (value,))
        value.fill_(-1)
        assert future.wait().eq(2 * number).all()
    rpc.rpc_sync("bob", keep, ("weights", torch.zeros(300_000, device=GPU)))
    for number in range(300):
        torch.cuda._sleep(CYCLES // 50)  # the copy of the result comes late
        weights = rpc.rpc_sync("bob", get, ("weights",))
        rpc.rpc_sync("bob", add_slowly, ("weights", 1.0))
        assert weights.eq(number).all(), number


def in_order(rounds: int = 1000) -> None:
    """Slow kernels before the send, at both ends; each round looks at every element."""
    until_known("bob")
    wrong = 0
    for number in range(rounds):
        value = torch.empty(50_000, device=GPU)
        torch.cuda._sleep(1_000_000)
        value.fill_(number)
        result = rpc.rpc_sync("bob", slowly, (value, 1_000_000))
        wrong += int(not result.eq(3 * number).all())
    assert not wrong, f"{wrong} of {rounds} rounds read what was not written yet"


def in_order_without_events() -> None:
    """The same fails where nobody waits for events, so it sees what it looks for."""
    until_known("bob")
    without_events()
    rpc.rpc_sync("bob", without_events)
    try:
        with pytest.raises(AssertionError, match="not written yet"):
            in_order(100)
    finally:
        with_events()
        rpc.rpc_sync("bob", with_events)


def without_events() -> None:
    memory = lent_memory()._memory
    memory.wait = lambda *arguments: None


def with_events() -> None:
    del lent_memory()._memory.wait


def several_tensors() -> None:
    until_known("bob")
    base = torch.arange(1000.0, device=GPU)
    assert rpc.rpc_sync("bob", shares_storage, (base[:500], base[:500]))
    assert not rpc.rpc_sync("bob", shares_storage, (base[:500], base[500:]))
    many = [torch.full((number + 1,), 1.0, device=GPU) for number in range(200)]
    assert rpc.rpc_sync("bob", total, (many,)).item() == sum(range(201))
    mixed: list[Tensor] = rpc.rpc_sync("bob", list, ([base, torch.ones(100_000), base.cpu(), base[::2]],))
    assert [str(each.device) for each in mixed] == ["cuda:0", "cpu", "cpu", "cuda:0"]
    same(mixed[3], base[::2])
    for dtype in (torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64):
        same(rpc.rpc_sync("bob", torch.clone, (base.to(dtype),)), base.to(dtype))
    same(rpc.rpc_sync("bob", torch.clone, (base.reshape(10, 100).t(),)), base.reshape(10, 100).t())
    empty = rpc.rpc_sync("bob", torch.clone, (base[:0],))
    assert empty.shape == (0,) and empty.device == GPU
    leaf: Tensor = rpc.rpc_sync("bob", list, ([base.requires_grad_()],))[0]
    assert leaf.requires_grad and leaf.is_leaf
    to_self = rpc.rpc_sync("alice", torch.clone, (base.detach(),))
    same(to_self, base.detach())


def streams() -> None:
    until_known("bob")
    value = torch.ones(4, device=GPU)
    assert rpc.rpc_sync("bob", stream_of, (value,)) is True
    assert rpc.rpc_sync("bob", stream_of, (value.cpu(),)) is False
    on_pool, result = rpc.rpc_sync("bob", stream_of_coroutine, (value,))
    assert on_pool is False
    same(result, value + 1)


def futures() -> None:
    """The result of a future is there in the current stream of each thread that takes it."""
    until_known("bob")
    for number in range(50):
        value = torch.full((200_000,), float(number), device=GPU)
        future = rpc.rpc_async("bob", slowly, (value, CYCLES // 20))
        chained = future.then(lambda done: done.value() + 1)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            assert chained.wait().eq(3 * number + 1).all()
            assert future.wait().eq(3 * number).all()

    async def awaited() -> None:
        results = await asyncio.gather(
            *[rpc.rpc_async("bob", slowly, (torch.full((9,), float(n), device=GPU), CYCLES // 20)) for n in range(20)]
        )
        for number, result in enumerate(results):
            same(result, torch.full((9,), 3.0 * number))

    asyncio.run(awaited())


def everything_on_top() -> None:
    """References, streams of results, exceptions and actors."""
    until_known("bob")
    rref = rpc.remote("bob", make_on_gpu, (100_000,))
    same(rref.to_here(), torch.arange(100_000.0))
    same(rpc.rpc_sync("bob", torch.add, (torch.ones(3, device=GPU), 1)), torch.full((3,), 2.0))
    with pytest.raises(ValueError, match="with a tensor") as caught:
        rpc.rpc_sync("bob", raises, (torch.full((70_000,), 7.0, device=GPU),))
    same(caught.value.args[1], torch.full((70_000,), 7.0))
    for number, item in enumerate(rpc.rpc_sync("bob", count_up, (torch.zeros(70_000, device=GPU),))):
        same(item, torch.full((70_000,), float(number)))
    counter = rpc.remote("bob", Counter, serial=True)
    ones = torch.ones(1000, device=GPU)
    results = [counter.rpc_async().add(ones) for _ in range(20)]
    for number, future in enumerate(results):
        assert future.wait().ge(number + 1).all()
    same(counter.rpc_sync().add(ones), torch.full((1000,), 21.0))


def loans_end() -> None:
    until_known("bob")
    for _ in range(50):
        rpc.rpc_sync("bob", twice, (torch.ones(100_000, device=GPU),))
    for _ in range(5):
        with pytest.raises(Exception, match="nowhere"):
            rpc.rpc_sync("bob", nowhere, (torch.ones(100_000, device=GPU),))
    for name in ("alice", "bob"):
        try:
            eventually(lambda name=name: not rpc.rpc_sync(name, loans), within_s=8)  # type: ignore[misc]
        except AssertionError:
            raise AssertionError(f"{name} still lends {rpc.rpc_sync(name, loans)}") from None


def nowhere(value: Tensor) -> None:
    raise RuntimeError("nowhere")


def out_of_memory() -> None:
    """It ends one call, with the bytes asked for and free; others go on."""
    until_known("bob")
    rpc.rpc_sync("bob", limit_memory, (0.02,))
    try:
        large = torch.ones(1 << 30, device=GPU)
        with pytest.raises(SerializationError, match=r"4294967296 bytes arrived for cuda:0, where \d+ of \d+ bytes"):
            rpc.rpc_sync("bob", device_of, (large,))
        same(rpc.rpc_sync("bob", twice, (torch.ones(5, device=GPU),)), torch.full((5,), 2.0))
    finally:
        rpc.rpc_sync("bob", limit_memory, (1.0,))


def through_the_host() -> None:
    """Channels without cuda_ipc."""
    for length in (1, 1000, 5_000_000, 40_000_000, 40_000_000):
        value = torch.empty(length, device=GPU)
        torch.cuda._sleep(CYCLES)
        value.copy_(torch.arange(length, dtype=torch.float32))
        future = rpc.rpc_async("bob", twice, (value,))
        value.fill_(-1)
        same(future.wait(), torch.arange(length, dtype=torch.float32) * 2.0)
    for _ in range(2):
        with pytest.raises(ValueError, match="with a tensor") as caught:
            rpc.rpc_sync("bob", raises, (torch.full((2_000_000,), 7.0, device=GPU),))
        same(caught.value.args[1], torch.full((2_000_000,), 7.0))
        many = [torch.full((300_000,), float(number), device=GPU) for number in range(20)]
        assert rpc.rpc_sync("bob", total, (many,)).item() == 300_000 * sum(range(20))
        leaf = torch.full((5_000_000,), 2.0, device=GPU, requires_grad=True)
        with dist_autograd.context() as context:
            result: Tensor = rpc.rpc_sync("bob", twice, (leaf,))
            dist_autograd.backward(context, [(result * result).sum()])
            same(dist_autograd.get_gradients(context)[leaf], torch.full((5_000_000,), 16.0))
    assert "cuda_ipc" in str(reader_of("bob"))
    assert not loans()


def die_while_read(signal_number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), signal_number)


def lose(name: str) -> None:
    """A worker is killed while its memory is mapped here and copies wait; nothing of it sticks to this process."""
    until_known(name)
    held = [rpc.rpc_sync(name, slowly, (torch.ones(1_000_000, device=GPU), CYCLES)) for _ in range(3)]
    for each in held:
        assert each.eq(3).all()
    late = rpc.rpc_sync(name, slowly, (torch.ones(1_000_000, device=GPU), LONG_CYCLES))
    with pytest.raises(WorkerLost, match=name):
        rpc.rpc_sync(name, die_while_read)
    begin = time.monotonic()
    torch.cuda.synchronize()
    print("synchronized after", time.monotonic() - begin, "late is right:", bool(late.eq(3).all()), late[0].item())
    assert torch.ones(3, device=GPU).sum().item() == 3


def on_another_gpu() -> None:
    """Tensors of a GPU that is not the current device, there and back, and to another index: both wait for the kernels
    that compute them.
    """
    assert torch.cuda.current_device() == 0
    until_known("bob", 1)
    device = torch.device("cuda:1")
    for number in range(100):
        value = torch.zeros(1_000_000, device=device)
        with torch.cuda.device(device):
            torch.cuda._sleep(CYCLES // 10)
        value.fill_(number)
        maps: list[dict[int | str | torch.device, int | str | torch.device] | None] = [None, {"cuda:1": "cuda:0"}]
        for device_map in maps:
            result: Tensor = rpc.rpc_sync("bob", torch.mul, (value, 3), device_map=device_map)
            assert result.device == device and result.eq(3 * number).all()


PROGRAMS: list[Callable[[], None]] = [
    nobody_waits_on_the_host,
    no_backward_pass_waits_on_the_host,
    what_is_sent_is_what_was_there,
    in_order,
    in_order_without_events,
    several_tensors,
    streams,
    futures,
    everything_on_top,
    loans_end,
    out_of_memory,
]
