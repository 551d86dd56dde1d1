"""Who is in the job, as this worker knows it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from rpcdist.errors import ConfigError, RpcdistError, UnknownWorker
from rpcdist.ids import Identity
from rpcdist.rpc._executors.io_thread import IoThread
from rpcdist.rpc._values import MapDevice
from rpcdist.rpc.worker_info import WorkerInfo

__all__ = ["Directory", "Member", "MemberSource"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    """A worker, and where it listens (host:port)."""

    identity: Identity
    address: str

    def __str__(self) -> str:
        return f"{self.identity.name!r} (rank {self.identity.id}, {self.address})"


class MemberSource(Protocol):
    """Knows everybody who is in the job now: the coordinator."""

    def members(self) -> list[Member]:
        """Asks, and waits; bounded."""

    async def members_async(self) -> list[Member]:
        """The same on the I/O loop."""


class Directory:
    """The members of the job. Any thread may use it.

    It asks the coordinator only when somebody turns up whom it does not know, or cannot be reached: in a job where
    nobody comes or goes, never.

    Args:
        me: this worker.
        members: everybody who is known at the start, this worker included.
        device_maps: by worker name, where tensors of this worker's devices go there.
        source: the coordinator.
        io: the thread on which it is asked in the background.
        on_replaced: called on the I/O loop when another process has taken the place of a member.
    """

    def __init__(
        self,
        me: Identity,
        members: Iterable[Member],
        device_maps: Mapping[str, Mapping[torch.device, torch.device]],
        source: MemberSource,
        io: IoThread,
        on_replaced: Callable[[Identity], object],
    ) -> None:
        self.me = me
        self._device_maps = device_maps
        self._source = source
        self._io = io
        self._on_replaced = on_replaced
        self._lock = threading.Lock()
        self._by_id: dict[int, Member] = {}
        self._by_name: dict[str, int] = {}
        self._present: frozenset[int] = frozenset()
        self._replaced: set[Identity] = set()  # one entry for each process that was replaced during ours
        self.update(members)

    def __repr__(self) -> str:
        return f"<Directory of {self.me.name} [{len(self._by_id)} workers]>"

    # ------------------------------------------------------------ what the coordinator says

    def update(self, members: Iterable[Member]) -> None:
        """Takes over what the coordinator says; workers that left stay known, so that errors can name them."""
        replaced = []
        members = list(members)
        with self._lock:
            self._present = frozenset(member.identity.id for member in members)
            for member in members:
                old = self._by_id.get(member.identity.id)
                if old is not None and old.identity != member.identity:
                    replaced.append(old.identity)
                    self._replaced.add(old.identity)
                    self._by_name.pop(old.identity.name, None)
                self._by_id[member.identity.id] = member
                self._by_name[member.identity.name] = member.identity.id
        for identity in replaced:
            self._io.call_soon(self._on_replaced, identity)

    def refresh(self) -> None:
        """Asks the coordinator; blocks, bounded."""
        self.update(self._source.members())

    def refresh_soon(self) -> None:
        """Asks the coordinator in the background; any thread."""
        self._io.call_soon(self._spawn_refresh)

    def _spawn_refresh(self) -> None:
        self._io.spawn(self.refresh_async(), "rpcdist learn who is there")

    async def refresh_async(self) -> None:
        """Asks the coordinator, on the I/O loop. That it does not answer is logged: nobody may depend on it."""
        try:
            self.update(await self._source.members_async())
        except RpcdistError as exc:
            logger.warning("the coordinator did not say who is in the job: %s", exc)

    def is_news(self, identity: Identity) -> bool:
        """Whether a worker that connected is new, or a new incarnation of a known one."""
        known = self._by_id.get(identity.id)
        return known is None or known.identity != identity

    def was_replaced(self, identity: Identity) -> bool:
        """Whether another process has taken the place of this one, which may not know it yet."""
        return identity in self._replaced

    # ------------------------------------------------------------ looking up

    def resolve(self, to: object) -> int:
        """The id of a destination: a name, a rank, or a `WorkerInfo`.

        Asks the coordinator about a name that is unknown here, and waits; on an event loop's thread, which must not be
        held up, it asks for the next time.

        Raises:
            UnknownWorker: nobody of that name or rank is in the job.
            ConfigError: it is none of the three.
        """
        worker_id = self._find(to)
        if worker_id is None:
            if asyncio._get_running_loop() is None:
                self.refresh()
            else:
                self.refresh_soon()
            worker_id = self._find(to)
        if worker_id is None:
            raise self._unknown(to.name if isinstance(to, WorkerInfo) else f"{to}")
        return worker_id

    def _find(self, to: object) -> int | None:
        if isinstance(to, str):
            return self._by_name.get(to)
        if isinstance(to, WorkerInfo):
            return to.id if to.id in self._by_id else None
        if isinstance(to, int) and not isinstance(to, bool):
            return to if to in self._by_id else None
        raise ConfigError(f"the destination is a worker's name, rank or WorkerInfo, but got {to!r}")

    def _unknown(self, wanted: str) -> UnknownWorker:
        return UnknownWorker(f"name:{self.me.name},rank:{self.me.id}", wanted, sorted(self._by_name))

    def knows(self, worker_id: int) -> bool:
        return worker_id in self._by_id

    def member(self, worker_id: int) -> Member:
        """Raises `UnknownWorker`."""
        member = self._by_id.get(worker_id)
        if member is None:
            raise self._unknown(str(worker_id))
        return member

    def name_of(self, worker_id: int) -> str:
        """A text with the id for a worker that is unknown."""
        member = self._by_id.get(worker_id)
        return member.identity.name if member is not None else f"worker {worker_id}"

    def incarnation_of(self, worker_id: int) -> int:
        """Of the process that has this id now; 0 if none is known."""
        member = self._by_id.get(worker_id)
        return member.identity.incarnation if member is not None else 0

    def names(self) -> list[str]:
        return sorted(self._by_name)

    def info(self, worker_id: int) -> WorkerInfo:
        return WorkerInfo(self.name_of(worker_id), worker_id)

    def infos(self, present: bool = False) -> list[WorkerInfo]:
        """All members, by id; those who have left or died only without `present`."""
        with self._lock:
            members = [member for id, member in sorted(self._by_id.items()) if not present or id in self._present]
        return [WorkerInfo(member.identity.name, member.identity.id) for member in members]

    def device_map(self, to: int) -> MapDevice | None:
        """Where tensors of other devices than the CPU go at a worker; None without a map for it."""
        if not self._device_maps:  # asked for with every call
            return None
        device_map = self._device_maps.get(self.name_of(to))
        if device_map is None:
            return None

        def map_device(device: torch.device) -> torch.device:
            if device not in device_map:
                raise RpcdistError(
                    f"tensors on {device} cannot go to {self.name_of(to)!r}: its device map has {list(device_map)}; "
                    f"add it with options.set_device_map({self.name_of(to)!r}, {{...}})"
                )
            return device_map[device]

        return map_device
