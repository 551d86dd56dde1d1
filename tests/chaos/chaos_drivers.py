"""The functions of the workers in the chaos tests: threads and a coroutine call the others at random, until told to
stop.

The next step of each is drawn from a seed; the ledger has the outcomes.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from chaos_functions import (
    accounted,
    check,
    count_up,
    echo,
    echo_async,
    fetch,
    lost_s,
    make,
    pass_on,
    sleep,
    sleep_async,
    twice,
)

from rpcdist import autograd, rpc
from rpcdist.errors import RpcdistError
from rpcdist.testing import LIMIT_S, UNIT_S, eventually

__all__ = ["hold_the_interpreter", "quiet_calls", "reach", "start_drivers", "stop_drivers"]

NUM_THREADS = 3
NUM_AT_ONCE = 4
SHORT_S = 2 * UNIT_S
LONG_S = 30 * UNIT_S
MAX_HELD = 8

rpc_sync: Any = rpc.rpc_sync
rpc_async: Any = rpc.rpc_async
rpc_stream: Any = rpc.rpc_stream


class Driver:
    """One thread's. `others` are the names of the other workers."""

    def __init__(self, seed: str, others: list[str]) -> None:
        self._chance = random.Random(seed)
        self._others = others
        self._held: list[tuple[str, Any]] = []
        self._kinds: list[tuple[int, Callable[[str], None]]] = [
            (30, self._call),
            (10, self._call_at_once),
            (4, self._large),
            (3, self._passes_its_deadline),
            (3, self._cancels),
            (8, self._nested),
            (8, self._makes_a_reference),
            (12, self._uses_a_reference),
            (5, self._streams),
            (3, self._leaves_a_stream),
            (5, self._backward),
        ]
        self.num_done = 0

    def drive(self, ends: threading.Event) -> None:
        weights, kinds = zip(*self._kinds, strict=True)
        while not ends.is_set():
            (kind,) = self._chance.choices(kinds, weights)
            pause_s = 0.02 * UNIT_S
            try:
                kind(self._chance.choice(self._others))
            except RpcdistError:
                pause_s = 0.5 * UNIT_S  # calls to a lost worker fail at once, and it needs time to come back
            self.num_done += 1
            ends.wait(pause_s)
        self._held.clear()

    def every_kind(self) -> None:
        """One call of each kind to everybody, all of which have to work."""
        fail = (self._passes_its_deadline, self._cancels)
        for other in self._others:
            for _, kind in self._kinds:
                if kind not in fail:
                    kind(other)
        self._held.clear()

    def _call(self, to: str) -> None:
        payload = self._chance.choice([None, 7, "text", [1, (2.5, None)]])
        with accounted("call", LONG_S) as account:
            check(rpc_sync(to, echo, (account.call, payload), timeout=LONG_S), (account.call, payload))

    def _call_at_once(self, to: str) -> None:
        with accounted("first of some", LONG_S) as first, accounted("second of some", LONG_S) as second:
            futures = [rpc_async(to, echo, (one.call, None), timeout=LONG_S) for one in (first, second)]
            check(rpc.wait_all(futures), [(first.call, None), (second.call, None)])

    def _large(self, to: str) -> None:
        """In shared memory between processes of one host, in pieces otherwise."""
        payload = torch.full((self._chance.choice([20_000, 300_000]),), float(self._chance.randrange(100)))
        with accounted("large", LONG_S) as account:
            answer = rpc_sync(to, echo, (account.call, payload), timeout=LONG_S)
            check(answer[0], account.call)
            check(answer[1], payload, torch.equal)

    def _passes_its_deadline(self, to: str) -> None:
        seconds = self._chance.uniform(0.5, 2) * SHORT_S
        with accounted("slow", SHORT_S) as account:
            check(rpc_sync(to, sleep, (account.call, seconds), timeout=SHORT_S), account.call)

    def _cancels(self, to: str) -> None:
        with accounted("cancelled", LONG_S) as account:
            future = rpc_async(to, sleep_async, (account.call, LONG_S), timeout=LONG_S)
            future.cancel()
            future.wait()

    def _nested(self, to: str) -> None:
        third = self._chance.choice(self._others)
        with accounted("outer", LONG_S) as account:
            check(rpc_sync(to, pass_on, (account.call, third, LONG_S), timeout=LONG_S), account.call)

    def _makes_a_reference(self, to: str) -> None:
        with accounted("remote", LONG_S) as account:
            reference = rpc.remote(to, make, (account.call,), timeout=LONG_S)
            check(reference.to_here(LONG_S).payload.numel(), 1000)
        self._held.append((to, reference))
        while len(self._held) > MAX_HELD:
            del self._held[self._chance.randrange(len(self._held))]

    def _uses_a_reference(self, to: str) -> None:
        if not self._held:
            return self._makes_a_reference(to)
        index = self._chance.randrange(len(self._held))
        owner, reference = self._held[index]
        try:
            if owner != to and self._chance.random() < 0.4:
                with accounted("passed on", LONG_S) as account:
                    check(rpc_sync(to, fetch, (account.call, reference, LONG_S), timeout=LONG_S), 1000)
            else:
                with accounted("method", LONG_S) as account:
                    check(reference.rpc_sync(LONG_S).add(account.call, 4), 5)
        except RpcdistError:
            del self._held[index]  # its owner may have been replaced
            raise

    def _streams(self, to: str) -> None:
        with accounted("stream", LONG_S) as account:
            number = -1
            with rpc_stream(to, count_up, (account.call, 40), timeout=LONG_S) as stream:
                for number, item in enumerate(stream):
                    account.wait_ends()
                    check(item, number)
                    account.wait_begins()
            check(number, 39)

    def _leaves_a_stream(self, to: str) -> None:
        with accounted("left stream", LONG_S) as account:
            with rpc_stream(to, count_up, (account.call, 10**9), timeout=LONG_S) as stream:
                for item in stream:
                    account.wait_ends()
                    account.wait_begins()
                    if item == 3:
                        break

    def _backward(self, to: str) -> None:
        third = self._chance.choice(self._others)
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context:
            with accounted("forward", LONG_S) as account:
                hidden = rpc_sync(to, twice, (account.call, x), timeout=LONG_S)
            with accounted("forward", LONG_S) as account:
                hidden = rpc_sync(third, twice, (account.call, hidden), timeout=LONG_S)
            with accounted("backward", LONG_S) as account:
                autograd.backward(context, [hidden.sum()], timeout=LONG_S)
                check(autograd.get_gradients(context)[x], torch.full((3,), 4.0), torch.equal)


async def drive_coroutines(seed: str, others: list[str], ends: threading.Event) -> None:
    """Calls of `async def` functions, several at once; some are cancelled by a timeout of the caller."""
    chance = random.Random(seed)

    async def one(to: str, waits: bool) -> None:
        with accounted("awaited", LONG_S) as account:
            if waits:
                future = rpc_async(to, sleep_async, (account.call, LONG_S), timeout=LONG_S)
                await asyncio.wait_for(future, SHORT_S)
            else:
                future = rpc_async(to, echo_async, (account.call, 3), timeout=LONG_S)
                check(await future, (account.call, 3))

    while not ends.is_set():
        calls = [one(chance.choice(others), chance.random() < 0.1) for _ in range(NUM_AT_ONCE)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        failed = any(isinstance(outcome, BaseException) for outcome in outcomes)
        await asyncio.sleep((0.5 if failed else 0.02) * UNIT_S)


class _Driving:
    threads: tuple[threading.Thread, ...] = ()
    drivers: tuple[Driver, ...] = ()
    ends = threading.Event()
    failures: list[str]


def start_drivers(seed: str, others: list[str]) -> None:
    """Lets them begin in this worker."""
    _Driving.ends = threading.Event()
    _Driving.failures = []
    _Driving.drivers = tuple(Driver(f"{seed}/{number}", others) for number in range(NUM_THREADS))
    work: list[Callable[[], None]] = [_bound(driver) for driver in _Driving.drivers]
    work.append(lambda: asyncio.run(drive_coroutines(f"{seed}/coroutines", others, _Driving.ends)))
    _Driving.threads = tuple(threading.Thread(target=_noted, args=(one,), name="driver") for one in work)
    for thread in _Driving.threads:
        thread.start()


def _bound(driver: Driver) -> Callable[[], None]:
    ends = _Driving.ends
    return lambda: driver.drive(ends)


def _noted(work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException as exc:
        _Driving.failures.append(repr(exc))
        raise


def stop_drivers() -> tuple[int, list[str]]:
    """Ends them; how many operations their threads have done, and what ended one too early."""
    _Driving.ends.set()
    for thread in _Driving.threads:
        thread.join(LIMIT_S)
        if thread.is_alive():
            raise AssertionError(f"{thread!r} waits for ever")
    num_done = sum(driver.num_done for driver in _Driving.drivers)
    _Driving.threads = _Driving.drivers = ()
    return num_done, _Driving.failures


def quiet_calls(seed: str, others: list[str]) -> None:
    """A call of each kind to everybody, none of which may fail."""
    Driver(seed, others).every_kind()


def reach(others: list[str]) -> None:
    """Calls each of them until that works: connections that a fault has broken are there again."""

    def answers(name: str) -> bool:
        try:
            with accounted("call", LONG_S) as account:
                check(rpc_sync(name, echo, (account.call, None), timeout=LONG_S), (account.call, None))
        except RpcdistError:
            return False
        return True

    for name in others:
        eventually(partial(answers, name), f"{name} answers")


def hold_the_interpreter(seconds: float) -> float:
    """No other Python thread of this worker runs meanwhile; how long this process lost, by its clock."""
    before_s = lost_s()
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # unlike CDLL it does not release the lock
    return lost_s() - before_s
