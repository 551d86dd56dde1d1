"""The workers of a chaos test: they join, keep books, drive calls, die and are replaced."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import peer_timeouts
from chaos_diagnosis import state_of_this_process
from chaos_drivers import quiet_calls, reach, start_drivers, stop_drivers
from chaos_functions import close_books, open_books
from chaos_hostile import attack
from inside_agents import current_agent
from network_cable import enter_namespace
from rpc_victim_functions import address as address_of_this_worker
from rpc_victim_functions import left_behind, sees

from rpcdist import rpc
from rpcdist.testing import Pending, Worker, WorkerPool, eventually
from rpcdist.testing.worker_pool import join, leave

__all__ = ["PEER_TIMEOUT_S", "ChaosWorld", "Place"]

NUM_PIPES_OF_GRPC = 2  # it makes them once in a process, and keeps them
PEER_TIMEOUT_S = 2 * peer_timeouts.UNIT_S
SLOW_JOIN_S = 15 * peer_timeouts.UNIT_S  # many times what it takes, and well before it fails


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker runs.

    Attributes:
        channels: for `RPCDIST_CHANNELS`.
        namespace: its network namespace; None for that of the test.
        address: to bind; None for the default.
    """

    channels: str = "auto"
    namespace: str | None = None
    address: str | None = None


class ChaosWorld:
    """The workers, by name.

    Args:
        pool: starts them.
        places: where each runs; their ranks are in this order.
        seed: of what they do.
    """

    def __init__(self, pool: WorkerPool, places: Mapping[str, Place], seed: str) -> None:
        self._pool = pool
        self._places = dict(places)
        self._seed = seed
        self._url = pool.new_url()
        self._workers: dict[str, Worker] = {}
        self._number_of: dict[str, int] = {}
        self._num_processes = 0
        self._hostile: Worker | None = None
        self._num_attacks = 0
        self.folder = pool.folder / "ledgers"
        self.folder.mkdir()
        self.ended: set[int] = set()
        self.before: dict[str, dict[str, int]] = {}  # what each had open when it started

    def __getitem__(self, name: str) -> Worker:
        return self._workers[name]

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._places)

    def start_all(self) -> None:
        """All join; no drivers yet."""
        joining = [self._begin_join(name) for name in self.names]
        for pending in joining:
            pending.result()

    def start(self, name: str) -> None:
        """The replacement of a worker that was killed: it joins, and drives calls."""
        joining = self._begin_join(name)
        try:
            eventually(joining.done, f"{name} has joined", SLOW_JOIN_S)
        except AssertionError:  # said while it lasts: why the coordinator does not answer
            coordinator = self[self.names[0]]
            print(f"{name} has not joined for {SLOW_JOIN_S:.0f} s; {coordinator.name}, which it asks:")
            print(coordinator.run(state_of_this_process))
            print(f"{name} itself:\n{self[name].stacks()}")
        joining.result()
        self.drive(name)

    def drive(self, name: str) -> None:
        self[name].run(start_drivers, f"{self._seed}/{self._number_of[name]}", self._others(name))

    def call_quietly(self) -> None:
        """Everybody calls everybody in every way, and nothing may fail."""
        calling = [self[name].begin(quiet_calls, self._seed, self._others(name)) for name in self.names]
        for pending in calling:
            pending.result()

    def wait_until_all_reach_all(self) -> None:
        """To be called before the drivers stop. Workers that have lost each other connect at the next call only, and
        where nobody calls for a whole lease, references between them fail from then on.
        """
        reaching = [self[name].begin(reach, self._others(name)) for name in self.names]
        for pending in reaching:
            pending.result()

    def stop_driving(self) -> int:
        """How many operations all have done."""
        stopping = [self[name].begin(stop_drivers) for name in self.names]
        num_done = 0
        for pending in stopping:
            num, failures = pending.result()
            assert failures == [], f"{pending!r}: {failures}"
            num_done += num
        return num_done

    def attack(self, name: str) -> int:
        """A member that is no worker misbehaves towards this one; how many sessions it had. Its process stays."""
        if self._hostile is None:
            self._hostile = self._pool.start("hostile")
            namespace = self._places[self.names[0]].namespace
            if namespace is not None:
                self._hostile.run(enter_namespace, namespace)
        self._num_attacks += 1
        address = self[name].run(address_of_this_worker)
        return self._hostile.run(attack, address, f"{self._seed}/attack {self._num_attacks}")

    def kill(self, name: str) -> int:
        """The exit status."""
        worker = self._workers.pop(name)
        worker.signal(signal.SIGKILL)
        code = worker.wait()
        self.ended.add(self._number_of.pop(name))
        self._pool.discard(worker)
        return code

    def wait_until_nothing_is_held(self) -> None:
        """No reference, context, call or stream anywhere; or says what is left.

        All look at once: what one still owns, another one may hold in garbage that nobody has collected.
        """
        waiting = {name: self[name].begin(wait_until_nothing_is_held) for name in self.names}
        left = {name: pending.result() for name, pending in waiting.items()}
        assert not any(left.values()), f"still held: {left}"

    def leave(self) -> None:
        """All shut down, within a limit, and leave nothing behind in their processes."""
        limit_s = 10 * PEER_TIMEOUT_S
        leaving = [self[name].begin(leave, timeout=limit_s) for name in self.names]
        for pending in leaving:
            pending.result()
        for name in self.names:
            self[name].run(close_books)
        left = {
            name: (self[name].run(left_behind), self[name].run(still_open, self.before[name])) for name in self.names
        }
        assert not any(map(any, left.values())), left

    def _others(self, name: str) -> list[str]:
        return [other for other in self.names if other != name]

    def _begin_join(self, name: str) -> Pending[None]:
        place = self._places[name]
        worker = self._workers[name] = self._pool.start(name, {"RPCDIST_CHANNELS": place.channels})
        if place.namespace is not None:
            worker.run(enter_namespace, place.namespace)
        number = self._number_of[name] = self._num_processes = self._num_processes + 1
        self.before[name] = worker.run(what_is_open)
        self.before[name]["descriptor pipe"] += NUM_PIPES_OF_GRPC
        worker.run(open_books, str(self.folder / f"{number}-{name}.ledger"), number)
        return worker.begin(
            join,
            name,
            self.names.index(name),
            len(self.names),
            self._url,
            peer_timeout=PEER_TIMEOUT_S,
            host=place.address,
        )


# ---- what the workers run


def wait_until_nothing_is_held() -> str:
    """References, contexts, calls, streams and surplus sessions that are left when the time is over."""
    try:
        eventually(lambda: not held(), "nothing is held", 10 * PEER_TIMEOUT_S)
    except AssertionError:
        return held()
    return ""


def held() -> str:
    gc.collect()
    agent, found = current_agent(), dict(sees())
    for key, value in rpc.debug_info().items():
        if key in ("num_autograd_contexts", "num_current_backward_passes") and value != "0":
            found[key] = value
    if agent.streams:
        found["streams"] = f"{len(agent.streams)}"
    num_others = len(rpc.workers()) - 1
    for what, sessions in (("opened", agent.router.sessions()), ("taken", agent.connections.taken)):
        if len(sessions) > num_others:
            found[f"sessions {what}"] = f"{len(sessions)} with {num_others} others: {sessions}"
    return f"{found} {rpc.debug_rrefs()}" if found else ""


def what_is_open() -> dict[str, int]:
    """Descriptors of this process by kind, mapped shared memory, and threads."""
    gc.collect()
    counts: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            counts["descriptor " + os.readlink(f"/proc/self/fd/{descriptor}").partition(":[")[0]] += 1
        except FileNotFoundError:
            continue  # the listing's own
    with open("/proc/self/maps") as maps:
        counts["mapped segments"] = sum("memfd:" in line for line in maps)
    counts["threads"] = threading.active_count()
    return dict(counts)


def still_open(before: dict[str, int]) -> dict[str, int]:
    """How much more of everything there is than before, when the time is over."""

    def more() -> dict[str, int]:
        return {
            kind: count - before.get(kind, 0) for kind, count in what_is_open().items() if count > before.get(kind, 0)
        }

    try:
        eventually(lambda: not more(), "all is closed", PEER_TIMEOUT_S)
    except AssertionError:
        return more()
    return {}
