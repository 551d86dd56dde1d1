"""The sources of a name on all hosts: the publisher's, and one on each other host, which fetches the versions.

[Note: chain] The hosts form a chain, in the order in which they came. Each fetches a version from the one before it, in
chunks, which that one passes on as soon as it has them: the publisher sends each byte once, and N hosts take the time
of one and N chunks. A source that cannot get a chunk from the one before it, since that has died or hangs, asks the
publisher for another one, and goes on with the chunk that it missed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from rpcdist import rpc
from rpcdist.deadline import NEVER, Deadline
from rpcdist.errors import ConfigError, DeadlineExceeded, RpcdistError, TransportError
from rpcdist.parallel._published._layout import PlainLayout, VersionLayout
from rpcdist.parallel._published._source import CHUNK_BYTES, VersionSource, ask, check_fetcher, worker_of
from rpcdist.parallel._published._words import NEWEST, unpacked
from rpcdist.rpc._current import current_agent
from rpcdist.time_limits import CHUNK_LIMIT_S

__all__ = ["Description", "HostCopy", "Publisher"]

logger = logging.getLogger(__name__)

CHUNKS_UNDER_WAY: Final = 4

Description = tuple[str, PlainLayout, int, int, list[str]]
"""Of an origin: its source's name, the layout, `keep`, how often the list of hosts has changed, and where readers of
all sources connect."""


class Publisher(VersionSource):
    """The source of the publisher, found by its name as an actor.

    Args:
        name: under which the tensors are published.
        plain_layout: of every version.
        keep: how many whole versions there may be at once.
    """

    def __init__(self, name: str, plain_layout: PlainLayout, keep: int) -> None:
        super().__init__(name, VersionLayout.from_plain(plain_layout), keep)
        self._next = 1
        self._hosts: dict[str, str] = {}  # addresses by the sources' names, in the order of the chain
        self._num_changes = 0  # of the hosts
        self._fetches: dict[str, rpc.Future[int]] = {}  # by source name: those that may go on
        self._publishing = threading.Lock()

    def publish(self, tensors: Mapping[str, Tensor], version: int | None, deadline: Deadline | None) -> int:
        """Makes tensors the newest version; returns its number, or the last one if there was no room.

        Args:
            tensors: of the version.
            version: its number; None for the next one.
            deadline: for the wait for room; None not to wait.

        Raises:
            ConfigError: the number is not newer than the last one.
            DeadlineExceeded: there was no room in time.
        """
        with self._publishing:
            number = self._next if version is None else version
            if number < self._next:
                raise ConfigError(
                    f"version={number} of {self.name!r}: the next one is {self._next}, or a higher number"
                )
            segment = self._free_segment() if deadline is None else self._wait_for_segment(deadline)
            if segment is None:
                number = self._next if version is None else version
                why = f"{self._keep} other versions are still read, by {', '.join(self._holders())}"
                if deadline is not None:
                    raise DeadlineExceeded(f"version {number} of {self.name!r} was not published in time: {why}")
                logger.warning("version %s of %r was left out: %s", number, self.name, why)
                return self.newest
            with torch.no_grad():
                torch._foreach_copy_(self._views_of(segment), [tensors[name] for name in self.layout.names])
            with self._changed:
                number = max(self._next, version or 0)  # now: `start_at` may have been called meanwhile
                self._next = number + 1
                self._release(number, segment)
            self._tell_hosts(number)
        return number

    def start_at(self, have: int) -> None:
        """Somebody has seen a version of that number, of an earlier publisher: those of this one are newer.

        One that is published already gets another number, or those who have seen the other one would never take it.
        """
        with self._changed:
            if have < self._next:
                return
            self._next = have + 1
            newest = self._memory.words[NEWEST]
            if newest:
                self._release(self._next, unpacked(newest)[1])
                self._next += 1
        if newest:
            self._tell_hosts(self.newest)

    def _tell_hosts(self, version: int) -> None:
        for source in self._living_hosts():
            self._tell(source, version)

    def _tell(self, source: str, version: int) -> None:
        self._fetches[source] = future = ask(source, "fetch", version, timeout=0)
        future.add_done_callback(lambda done: self._on_fetched(source, version, done))

    def _on_fetched(self, source: str, version: int, done: rpc.Future[int]) -> None:
        if self._fetches.get(source) is done:
            del self._fetches[source]
        try:
            done.wait()
        except Exception as exc:
            logger.warning("%r did not get version %s of %r: %s", worker_of(source), version, self.name, exc)

    def _living_hosts(self) -> dict[str, str]:
        """Those whose workers live; the others are forgotten."""
        with self._changed:
            if not self._hosts:
                return {}
            living = {worker.name for worker in rpc.workers()}
            found = {source: address for source, address in self._hosts.items() if worker_of(source) in living}
            if len(found) < len(self._hosts):
                self._hosts = found
                self._num_changes += 1
            return dict(found)

    def all_behind(self, version: int, deadline: Deadline) -> dict[str, int]:
        """Waits until all readers of all hosts have a version; those that do not, and what they have."""
        limit_s = deadline.remaining_s()
        asked = {source: ask(source, "behind", version, limit_s, timeout=0) for source in self._living_hosts()}
        found = self.behind(version, limit_s)
        for source, future in asked.items():
            try:
                found.update(future.wait(deadline.remaining_s() + CHUNK_LIMIT_S))
            except TransportError as exc:
                logger.debug("%r is gone, and holds up nobody: %s", worker_of(source), exc)
        return found

    # ------------------------------------------------------------ called by consumers

    def describe(self, have: int) -> Description:
        """The data for a consumer that connects; `have` is the newest version that it has seen."""
        self.start_at(have)
        hosts = self._living_hosts()
        with self._changed:
            addresses = [address for address in (self.address, *hosts.values()) if address]
            return self.source_name, self.layout.plain(), self._keep, self._num_changes, addresses

    def join(self, source: str, address: str, num_changes: int | None) -> bool:
        """A host wants to fetch from now on, the newest version first.

        Args:
            source: its source's name.
            address: where that one's readers connect; empty where there are none.
            num_changes: of the description by which it found that its host has no source yet; None if it knows that.

        Returns:
            False if another host has come meanwhile, which may be the same one.
        """
        with self._changed:
            if address and num_changes not in (None, self._num_changes):
                return False
            check_fetcher(source, self._hosts)
            self._hosts[source] = address
            self._num_changes += 1
        if newest := self.newest:
            self._tell(source, newest)
        return True

    def forget(self, source: str) -> None:
        """A host does not fetch any more: its source is closed."""
        with self._changed:
            if self._hosts.pop(source, None) is not None:
                self._num_changes += 1

    def upstream_of(self, source: str, failed: str) -> str:
        """From which source a host should fetch: the one before it, or this one.

        Args:
            source: the name of the host's source.
            failed: the name of the source that did not answer, or "".
        """
        before = self.source_name
        for name in self._living_hosts():
            if name == source:
                break
            before = name
        return self.source_name if before == failed else before


class HostCopy(VersionSource):
    """The source of a host that fetches versions from another one; a consumer there has it.

    Args:
        name: under which the tensors are published.
        layout: of every version.
        keep: how many whole versions there may be at once.
        origin: the name of the publisher's source.
    """

    def __init__(self, name: str, layout: VersionLayout, keep: int, origin: str) -> None:
        super().__init__(name, layout, keep)
        self.origin = origin
        self._incarnation = 0
        self._wanted = 0
        self._is_fetching = False
        self._given_up = 0  # the version that could not be fetched; those who want it from here look elsewhere
        self._coming: tuple[int, int, int] | None = None  # version, segment, and how many chunks are here

    def leave(self) -> None:
        """Closes it, and tells the publisher, unless that has ended."""
        _try_to_tell(self.origin, "forget", self.source_name)
        self.close()

    @property
    def follows_living(self) -> bool:
        """Whether the publisher lives that it fetches from."""
        directory = current_agent().directory
        return directory.living_incarnation(worker_of(self.origin)) == self._incarnation

    def join(self, origin: str, num_changes: int | None) -> bool:
        """Takes its place in the chain of a publisher; False if its host may have a source there already.

        Args:
            origin: the name of the publisher's source.
            num_changes: of its description; None if no other worker of this host can have come before.
        """
        self._incarnation = current_agent().directory.living_incarnation(worker_of(origin))
        self.origin = origin  # which begins to call `fetch` here now
        asked = ask(origin, "join", self.source_name, self.address, num_changes, timeout=CHUNK_LIMIT_S)
        return bool(asked.wait())

    def follow(self, description: Description) -> None:
        """Takes its place in the chain of a new publisher, or closes if that one publishes something else."""
        origin, plain, *_ = description
        if VersionLayout.from_plain(plain) == self.layout:
            self.join(origin, None)
        else:
            self.close()

    def fetch(self, version: int) -> int:
        """Fetches a version, or a newer one; returns when it is here, or another thread fetches already."""
        with self._changed:
            self._wanted = max(self._wanted, version)
            if self._is_fetching:
                return self.newest
            self._is_fetching = True
        try:
            while True:
                with self._changed:
                    if self.newest >= self._wanted:
                        self._is_fetching = False
                        return self.newest
                self._fetch_one(self._wanted)
        except BaseException:
            with self._changed:
                self._is_fetching = False
                self._given_up, self._wanted = self._wanted, self.newest
                self._changed.notify_all()
            raise

    def _fetch_one(self, at_least: int) -> None:
        """Fetches one version from any host that has it."""
        segment = self._wait_for_segment(NEVER)  # the consumers of this host hold up nobody but themselves
        assert segment is not None
        self._memory.fill(segment)
        origin, failed = self.origin, ""
        try:
            while True:
                upstream = ask(origin, "upstream_of", self.source_name, failed, timeout=CHUNK_LIMIT_S).wait()
                try:
                    version = self._fetch_from(upstream, at_least, segment)
                    break
                except RpcdistError as exc:
                    if upstream == origin:
                        raise
                    failed = upstream
                    logger.warning("%r does not pass %r on to %r: %s", worker_of(failed), self.name, self._me, exc)
                    _try_to_tell(failed, "end_fetch", self.source_name)  # it may live, and not answer
        except BaseException:
            self._give_up_coming()
            raise
        with self._changed:
            self._coming = None  # those who fetch it from here keep their pins
            self._release(version, segment)

    def _fetch_from(self, upstream: str, at_least: int, segment: int) -> int:
        """Fetches a version from one source; its number. Chunks of the same version that came from another are kept."""
        me, limit_s = self.source_name, CHUNK_LIMIT_S
        version: int = ask(upstream, "begin_fetch", me, at_least, limit_s, timeout=2 * limit_s).wait()
        with self._changed:
            if self._coming is None or self._coming[0] != version:
                self._give_up_coming()
                self._coming = (version, segment, 0)
            begin = self._coming[2]
            self._changed.notify_all()
        memory = self._memory.tensors[segment]
        under_way: deque[tuple[int, rpc.Future[Tensor]]] = deque()
        try:
            for index in range(begin, self._num_chunks + CHUNKS_UNDER_WAY):
                if index < self._num_chunks:
                    call = ask(upstream, "chunk", me, version, index, limit_s, timeout=2 * limit_s)
                    call.is_quiet = True  # the first error ends all of them
                    under_way.append((index, call))
                if under_way and (len(under_way) == CHUNKS_UNDER_WAY or index >= self._num_chunks):
                    number, call = under_way.popleft()
                    chunk = call.wait()
                    memory[number * CHUNK_BYTES : number * CHUNK_BYTES + chunk.nbytes].copy_(chunk)
                    with self._changed:
                        self._coming = (version, segment, number + 1)
                        self._changed.notify_all()
        finally:
            for _, call in under_way:
                call.cancel()
        ask(upstream, "end_fetch", me, timeout=limit_s).wait()
        return version

    def _give_up_coming(self) -> None:
        """The chunks of a version are dropped, also for those who fetch it from here."""
        with self._changed:
            if self._coming is not None:
                given_up = self._coming[0]
                self._pins = {source: pin for source, pin in self._pins.items() if pin[0] != given_up}
            self._coming = None
            self._changed.notify_all()

    def _fetchable(self, at_least: int) -> tuple[int, int] | None:
        if self._coming is not None and self._coming[0] >= at_least:
            return self._coming[:2]
        if (found := super()._fetchable(at_least)) is None and at_least <= self._given_up:
            raise TransportError(f"{self._me!r} could not fetch version {at_least} of {self.name!r} itself")
        return found

    def _num_chunks_of(self, version: int) -> int:
        return self._coming[2] if self._coming is not None and self._coming[0] == version else self._num_chunks


def _try_to_tell(source: str, method: str, *args: object) -> None:
    """Calls a method of a source that may have ended, and does not wait for it."""
    try:
        ask(source, method, *args, timeout=CHUNK_LIMIT_S).is_quiet = True
    except RpcdistError as exc:
        logger.debug("%s of %s: %s", method, source, exc)
