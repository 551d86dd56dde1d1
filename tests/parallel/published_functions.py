"""The functions that the workers run in the tests of published tensors."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from inside_published import host_copies_of, origin_of
from torch import Tensor, nn

from rpcdist import rpc
from rpcdist.deadline import Deadline
from rpcdist.errors import RpcdistError, UnknownActor
from rpcdist.parallel import Published
from rpcdist.parallel._published import _reader
from rpcdist.parallel._published._layout import VersionLayout
from rpcdist.parallel._published._parts import pieces_of
from rpcdist.parallel._published._reader import VersionReader
from rpcdist.parallel._published._shard_connection import actor_name
from rpcdist.testing import LIMIT_S, eventually

SHAPES: dict[str, tuple[int, ...]] = {"a": (300, 1000), "b": (7,), "c": (), "empty": (0, 3), "d": (500_000,)}

names = ["policy"]  # the last one is used
held: dict[str, Published] = {}
viewed: dict[str, Tensor] = {}


def use(name: str) -> None:
    """Publishes and pulls under this name from now on; ends what was before."""
    for each in held.values():
        each.close()
    held.clear()
    names.append(name)


def weights() -> Published:
    """This worker's own, the same one in every call."""
    return held.setdefault(names[-1], Published(names[-1]))


def filled(value: float) -> dict[str, Tensor]:
    return {name: torch.full(shape, float(value)) for name, shape in SHAPES.items()}


def layout_bytes() -> int:
    """The size of a version in memory."""
    return VersionLayout.of(pieces_of(filled(0), "", [])).offsets()[1]


def values_in(tensors: dict[str, Tensor]) -> list[float]:
    """The different values; only two of each tensor, which tells one value from several and takes little time."""
    return sorted({value for tensor in tensors.values() if tensor.numel() for value in map(float, tensor.aminmax())})


def waits_that_each_version_ends(num_readers: int, num_versions: int) -> list[bool]:
    """The results of waits that only a version can end in time."""
    publisher = Published("waits")
    publisher.publish({"a": torch.ones(3)})
    source = origin_of(publisher)
    readers = [source.reader() for _ in range(num_readers)]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(num_readers) as threads:
        patch.setattr(_reader, "CHECK_INTERVAL_S", LIMIT_S)
        deadline = Deadline.after(LIMIT_S / 2)
        found = []
        for version in range(1, num_versions + 1):
            waits = [threads.submit(reader.wait_for_newer, version, deadline) for reader in readers]
            publisher.publish({"a": torch.ones(3)})
            found += [wait.result(LIMIT_S) for wait in waits]
        assert not deadline.expired()
    source.close()
    return found + [reader.wait_for_newer(num_versions + 1, Deadline.after(LIMIT_S)) for reader in readers]


def publish(value: float, **options: Any) -> int:
    return weights().publish(filled(value), **options)


def pull(newer_than: int = 0, **options: Any) -> tuple[int, list[float]]:
    """The version, and the different values in all tensors."""
    target = filled(-1)
    version = weights().pull_into(target, newer_than, **options)
    return version, values_in(target)


def wait_until_nobody_publishes() -> None:
    """Waits until the job knows that the publisher is dead."""

    def is_free() -> bool:
        try:
            rpc.get_actor(actor_name(names[-1], 0), timeout=1)
        except UnknownActor:
            return True
        except RpcdistError:
            return False
        return False

    eventually(is_free, "the name of the publisher is free")


class HeldPull:
    """A pull of this worker that stands still after it has chosen its version."""

    def __init__(self) -> None:
        self.is_there, self.may_go_on = threading.Event(), threading.Event()
        self.result: Future[tuple[int, list[float]]] = Future()

    def run(self) -> None:
        begin = VersionReader.begin

        def held_begin(reader: VersionReader, version: int = 0) -> list[Tensor] | None:
            views = begin(reader, version)
            self.is_there.set()
            assert self.may_go_on.wait(LIMIT_S)
            return views

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(VersionReader, "begin", held_begin)
            self.result.set_result(pull())


held_pulls: list[HeldPull] = []


def begin_held_pull() -> None:
    """Begins a pull in another thread; returns when it has chosen its version."""
    held_pulls.append(HeldPull())
    threading.Thread(target=held_pulls[0].run).start()
    assert held_pulls[0].is_there.wait(LIMIT_S)


def end_held_pull() -> tuple[int, list[float]]:
    """Lets it continue; returns its result."""
    held_pulls[0].may_go_on.set()
    return held_pulls.pop().result.result(LIMIT_S)


def pull_in_coroutine(newer_than: int) -> int:
    return asyncio.run(weights().pull_into_async(filled(-1), newer_than, wait=True))


def view() -> tuple[int, list[float]]:
    """The contents of a view; they stay valid until this worker's next view or pull."""
    viewed.update(weights().view())
    return weights().version, values_in(viewed)


def look_at_view() -> list[float]:
    """The same tensors once more."""
    return values_in(viewed)


def has_copy() -> bool:
    """Whether this worker holds versions for its host, and does not read those of another one."""
    return any(copy is not None for copy in host_copies_of(weights()))


def write_to_view() -> None:
    weights().view()["a"].fill_(1.0)


def close() -> None:
    weights().close()


def descriptors_and_maps() -> tuple[int, int]:
    """How many descriptors are open, and how much shared memory is mapped, in bytes."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]
    sizes = [int(end, 16) - int(start, 16) for start, end in (fields[0].split("-") for fields in maps)]
    return len(os.listdir("/proc/self/fd")), sum(sizes)


def publish_many(last: int) -> int:
    """Publishes as fast as it can, until there are so many versions."""
    while publish(weights().version + 1) < last:
        pass
    return weights().version


def pull_until(version: int) -> int:
    """Pulls until there is this version; the number of different ones that came."""
    have, num = 0, 0
    while have < version:
        have = weights().pull_into(filled(-1), have, wait=True)
        num += 1
    return num


# ---------------------------------------------------------------- the ledger


def write_line(path: str, *words: object) -> None:
    """One write, so that a process that is killed leaves whole lines."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, (" ".join(map(str, words)) + "\n").encode())
    finally:
        os.close(descriptor)


def publish_for_ever(ledger: str) -> None:
    """Each version is filled with a value of its own, which is noted before it is published, and its number after."""
    value = os.getpid() * 100.0  # other processes begin far away from it
    while True:
        value += 1
        write_line(ledger, "begins", value)
        version = publish(value)
        write_line(ledger, "published", value, version)


def consume_for_ever(ledger: str) -> None:
    """Pulls, and sometimes looks; notes version and values."""
    have, num = 0, 0
    while True:
        num += 1
        try:
            if num % 3:
                have, values = pull(have, wait=True, timeout=5)
            else:
                have, values = view()
        except RpcdistError as exc:
            write_line(ledger, "waits", os.getpid(), type(exc).__name__)
            continue
        write_line(ledger, "has", os.getpid(), have, *values)


class Net(nn.Module):
    """A module with parameters, a buffer and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.tied = self.first


def publish_module(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    net = Net()
    weights().publish(net)
    return {name: value.clone() for name, value in net.state_dict().items()}


def pull_module() -> dict[str, Tensor]:
    net = Net()
    weights().pull_into(net)
    assert all(parameter.requires_grad for parameter in net.parameters())
    return dict(net.state_dict())


def publish_as(dtype: torch.dtype) -> int:
    values = {"w": torch.linspace(-1, 1, 100, dtype=torch.float64), "n": torch.arange(5)}
    return weights().publish(values, dtype=dtype)


def pull_as(dtype: torch.dtype) -> dict[str, Tensor]:
    target = {"w": torch.zeros(100, dtype=dtype), "n": torch.zeros(5, dtype=torch.int64)}
    weights().pull_into(target)
    return target
