"""Who is in the job, as this worker knows it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from rpcdist.errors import ConfigError, RpcdistError, UnknownWorker
from rpcdist.ids import Identity
from rpcdist.rpc.options import RpcOptions
from rpcdist.rpc.worker_info import WorkerInfo

__all__ = ["Directory", "Member"]

MapDevice = Callable[[torch.device], torch.device]


class Member(NamedTuple):
    """A worker and where it listens."""

    identity: Identity
    address: str


class Directory:
    """The members of the job. Any thread may use it.

    Args:
        me: this worker.
        members: everybody who is known at the start, this worker included.
        options: for the device maps.
        fetch: asks the coordinator who is there now; blocks.
        elastic: whether an unknown name may be that of a worker who came later.
    """

    def __init__(
        self,
        me: Identity,
        members: Iterable[Member],
        options: RpcOptions,
        fetch: Callable[[], list[Member]],
        elastic: bool,
    ) -> None:
        self.me = me
        self.elastic = elastic
        self._device_maps = options.device_maps  # a copy, and asked for with every call
        self._fetch = fetch
        self._lock = threading.Lock()
        self._by_id: dict[int, Member] = {}
        self._by_name: dict[str, int] = {}
        self._present: frozenset[int] = frozenset()
        self._replaced: set[Identity] = set()  # one entry for each process that was replaced during ours
        self.on_replaced: Callable[[Identity], None] | None = None
        self.refresh_soon: Callable[[], None] | None = None
        self.update(members)

    def __repr__(self) -> str:
        return f"<Directory of {self.me.name} [{len(self._by_id)} workers]>"

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
        if self.on_replaced is not None:
            for identity in replaced:
                self.on_replaced(identity)

    def refresh(self) -> None:
        """Asks the coordinator; blocks."""
        self.update(self._fetch())

    def is_news(self, identity: Identity) -> bool:
        """Whether a worker that connected is new, or a new incarnation of a known one."""
        known = self._by_id.get(identity.id)
        return known is None or known.identity != identity

    def was_replaced(self, identity: Identity) -> bool:
        """Whether another process has taken the place of this one, which may not know it yet."""
        return identity in self._replaced

    def resolve(self, to: object) -> int:
        """The id of a destination: a name, a rank, or a `WorkerInfo`.

        Asks the coordinator about a name that is unknown here, and waits; on an event loop's thread, which must not be
        held up, it asks for the next time.

        Raises:
            UnknownWorker: nobody of that name or rank is in the job.
            ConfigError: it is none of the three.
        """
        worker_id = self._find(to)
        if worker_id is None and self.elastic:
            if asyncio._get_running_loop() is None:
                self.refresh()
            elif self.refresh_soon is not None:
                self.refresh_soon()
            worker_id = self._find(to)
        if worker_id is None:
            wanted = f"{to}" if not isinstance(to, WorkerInfo) else to.name
            raise UnknownWorker(f"name:{self.me.name},rank:{self.me.id}", wanted, sorted(self._by_name))
        return worker_id

    def _find(self, to: object) -> int | None:
        if isinstance(to, str):
            return self._by_name.get(to)
        if isinstance(to, WorkerInfo):
            return to.id if to.id in self._by_id else None
        if isinstance(to, int) and not isinstance(to, bool):
            return to if to in self._by_id else None
        raise ConfigError(f"the destination is a worker's name, rank or WorkerInfo, but got {to!r}")

    def knows(self, worker_id: int) -> bool:
        return worker_id in self._by_id

    def member(self, worker_id: int) -> Member:
        member = self._by_id.get(worker_id)
        if member is None:
            raise UnknownWorker(f"name:{self.me.name},rank:{self.me.id}", str(worker_id), sorted(self._by_name))
        return member

    def name_of(self, worker_id: int) -> str:
        member = self._by_id.get(worker_id)
        return member.identity.name if member is not None else f"worker {worker_id}"

    def incarnation_of(self, worker_id: int) -> int:
        """Of the process that has this id now; 0 if none is known."""
        member = self._by_id.get(worker_id)
        return member.identity.incarnation if member is not None else 0

    def names(self) -> list[str]:
        return sorted(self._by_name)

    def infos(self, present: bool = False) -> list[WorkerInfo]:
        """All members, by id; those who have left or died only without `present`."""
        with self._lock:
            members = [member for id, member in sorted(self._by_id.items()) if not present or id in self._present]
        return [WorkerInfo(member.identity.name, member.identity.id) for member in members]

    def device_map(self, to: int) -> MapDevice | None:
        """Where tensors of other devices than the CPU go at a worker; None without a map for it."""
        if not self._device_maps:
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
