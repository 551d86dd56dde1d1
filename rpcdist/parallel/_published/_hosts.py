"""The sources of a name on all hosts: the publisher's, and one on each other host, which fetches the versions.

[Note: chain] The hosts form a chain, in the order in which they joined. Each fetches a version from the host before it,
in chunks, which that host passes on as soon as it has them: the publisher sends each byte once, and N hosts take the
time of one host and N chunks. If a source cannot get a chunk because the source before it has died or hangs, it asks
the publisher for another source, and continues with the missing chunk.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Final, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rpcdist import rpc
from rpcdist.deadline import Deadline
from rpcdist.errors import CallRefused, ConfigError, DeadlineExceeded, RpcdistError, TransportError, abridged
from rpcdist.parallel._published._layout import PlainLayout, PlainSelection, Selection, VersionLayout, have_dtypes
from rpcdist.parallel._published._parts import MAX_SEGMENTS, NEWEST, unpacked
from rpcdist.parallel._published._reader import SmallTensors, copy_tensors, small_ones
from rpcdist.parallel._published._source import CHUNK_BYTES, VersionSource, ask, check_fetcher, sources_of, worker_of
from rpcdist.rpc._current import current_agent
from rpcdist.time_limits import IDLE_LIMIT_S, SLOW_ANSWER_LIMIT_S

logger = logging.getLogger(__name__)

CHUNKS_UNDER_WAY: Final = 4

MAX_EXTRACTS: Final = 64
MAX_EXTRACTS_SHARE: Final = 4
"""The limit of the memory of extracts, as a multiple of the memory of the publisher's own versions."""

Description = tuple[str, PlainLayout, int, int, list[str], int]
"""An origin's description: its source's name, the layout, `keep`, how often the list of hosts has changed, the
addresses for readers of all sources, and the number of shards in which the tensors are published."""

Comparison = Literal["counter", "value"]
"""The way to find unchanged tensors."""

MAX_SHARDS: Final = 1 << 16
MAX_VERSION: Final = 1 << 56
"""Numbers that users give, and those that peers have seen, are lower; those of further versions go on from there."""

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_description(description: Description) -> None:
    """Raises `TransportError` if the numbers of a peer's description are invalid."""
    try:
        source_name, _, keep, num_changes, addresses, num_shards = description
        is_valid = (
            all(type(number) is int and number >= 0 for number in (keep, num_changes, num_shards))
            and 1 <= keep < MAX_SEGMENTS
            and 1 <= num_shards <= MAX_SHARDS
            and all(type(text) is str for text in (source_name, *addresses))
        )
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise TransportError(f"an invalid description of published tensors arrived: {abridged(description)}")


class Publisher(VersionSource):
    """The source of the publisher, found by its name as an actor.

    Args:
        keep: how many complete versions may exist at once.
        shard: its number, and the number of publishers of the tensors.

    Attributes:
        has_asked: whether the other workers have reported which versions they have seen.
        in_order: the `seen` of values that equal the layout, in its order; see `Pieces`.
    """

    def __init__(self, name: str, plain_layout: PlainLayout, keep: int, shard: tuple[int, int] = (0, 1)) -> None:
        self._extracts: dict[Selection, Extract] = {}
        # Guards `_extracts`. I/O loops never take it: making an extract needs a loop, which may wait for `_changed`.
        self._extracting = threading.Lock()
        super().__init__(name, VersionLayout.from_plain(plain_layout), keep, shard[1])
        self.shard = shard[0]
        self.has_asked = False
        self.in_order: object = None
        num_tensors = len(self.layout.names)
        self._changed_in = [0] * num_tensors  # the version in which each tensor last changed
        self._counters: list[tuple[object, ...] | None] = [None] * num_tensors  # of the newest version
        self._small = small_ones(self.layout)
        self._large = sorted(set(range(num_tensors)) - set(self._small))
        self._small_dtypes = [self.layout.dtypes[index] for index in self._small]
        self._sources: SmallTensors | None = None
        self._small_in: list[SmallTensors | None] = [None] * (keep + 1)
        self._next = 1
        self._hosts: dict[str, str] = {}  # addresses by source name, in the order of the chain
        self._num_changes = 0  # how often `_hosts` has changed
        self._fetches: dict[str, rpc.Future[int | None]] = {}  # the fetches in progress, by source name
        self._publishing = threading.Lock()

    def publish(
        self,
        tensors: list[Tensor],
        version: int | None,
        deadline: Deadline | None,
        skip_unchanged: Comparison | None = None,
        seen: object = None,
    ) -> int:
        """Publishes tensors as the newest version; returns its number, or the last number if no memory was free.

        Args:
            tensors: the tensors of the version, in the order of the layout.
            version: its number; None for the next one.
            deadline: the limit of the wait for free memory; None not to wait.
            skip_unchanged: the way to find unchanged tensors; None if all count as changed.
            seen: see `Pieces`.

        Raises:
            ConfigError: the number is not higher than the last one.
            DeadlineExceeded: no memory became free in time.
        """
        with self._publishing:
            number = self._next if version is None else version
            most = MAX_VERSION if version is not None else 2 * MAX_VERSION
            if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < most:
                raise ConfigError(f"version={number!r:.100}: version numbers are 1 to {MAX_VERSION - 1}")
            if number < self._next:
                raise ConfigError(
                    f"version={number} of {self.name!r}: the next number is {self._next}, or a higher one"
                )
            segment = self._free_segment() if deadline is None else self._wait_for_segment(deadline)
            if segment is None:
                number = self._next if version is None else version
                why = f"{self._keep} other versions are still read, by {', '.join(self._holders())}"
                if deadline is not None:
                    raise DeadlineExceeded(f"version {number} of {self.name!r} was not published in time: {why}")
                logger.warning("version %s of %r was left out: %s", number, self.name, why)
                return self.newest
            counters: list[tuple[object, ...] | None] | None = None
            if skip_unchanged == "counter":
                counters = [_counter_of(tensor) for tensor in tensors]
            changed = self._changed_tensors(tensors, skip_unchanged, counters)
            self._write(segment, tensors, changed, seen)
            with self._changed:
                number = max(self._next, version or 0)  # computed now, as `start_at` may have been called meanwhile
                self._next = number + 1
                if changed is None:
                    self._changed_in = [number] * len(tensors)
                for index in changed or ():
                    self._changed_in[index] = number
                self._counters = [None] * len(tensors) if counters is None else counters
                self._changes[segment] = None if changed is None else self._changes_of_chunks()
                self._release(number, segment)
            self._announce(number)
            self._update_extracts()
        return number

    def _write(self, segment: int, tensors: list[Tensor], changed: Sequence[int] | None, seen: object) -> None:
        """Copies tensors into a segment, except those that it already has from an older version."""
        held, self._contents[segment] = self._contents[segment], 0
        views = self._views_of(segment)
        if (
            (changed is None or not held)
            and self._small
            and (rest := self._written_small(segment, tensors, seen)) is not None
        ):
            views, tensors = [views[index] for index in rest], [tensors[index] for index in rest]
        elif changed is not None and held:
            now = set(changed)
            stale = [index for index, last in enumerate(self._changed_in) if last > held or index in now]
            views, tensors = [views[index] for index in stale], [tensors[index] for index in stale]
        copy_tensors(views, tensors)

    def _written_small(self, segment: int, tensors: list[Tensor], seen: object) -> list[int] | None:
        """Copies the small tensors, if that works without torch; returns the indices of the others, or None."""
        small = [tensors[index] for index in self._small] if self._large else tensors
        last = self._sources
        if (last is None or seen is None or last.seen is not seen) and not have_dtypes(small, self._small_dtypes):
            return None
        sources = self._sources = SmallTensors.of(small, last, seen)
        if sources is None:
            return None
        targets = self._small_in[segment]
        if targets is None:
            views = self._views_of(segment)
            targets = self._small_in[segment] = SmallTensors.of([views[index] for index in self._small], None)
        assert targets is not None
        sources.copy_to(targets)
        return self._large

    def _changed_tensors(
        self, tensors: Sequence[Tensor], how: Comparison | None, counters: Sequence[tuple[object, ...] | None] | None
    ) -> list[int] | None:
        """Returns the tensors that differ from the newest version; None if all may differ."""
        newest = self._memory.words[NEWEST]
        if how is None or not newest:
            return None
        if counters is not None:
            last = self._counters
            return [index for index, counter in enumerate(counters) if counter != last[index]]
        views = self._views_of(unpacked(newest)[1])
        return [
            index
            for index, (view, tensor) in enumerate(zip(views, tensors, strict=True))
            if not _has_equal_bytes(view, tensor)
        ]

    def _changes_of_chunks(self) -> list[int]:
        """Returns the version in which each chunk last changed."""
        changes = [0] * self._num_chunks
        starts, end = self.layout.offsets()
        for start, stop, last in zip(starts, (*starts[1:], end), self._changed_in, strict=True):
            for chunk in range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)):
                changes[chunk] = max(changes[chunk], last)
        return changes

    def start_at(self, have: int) -> None:
        """Makes later versions newer than `have`, which a worker has seen from an earlier publisher.

        A version that is already published gets a new number; otherwise workers that have seen `have` would never take
        it.
        """
        _checked_number(have)
        with self._changed:
            if have < self._next:
                return
            if have >= MAX_VERSION:
                raise TransportError(f"version {have} of {self.name!r} cannot have been seen")
            self._next = have + 1
            newest = self._memory.words[NEWEST]
            if newest:
                version, segment = unpacked(newest)
                self._changed_in = [self._next if last == version else last for last in self._changed_in]
                if (changes := self._changes[segment]) is not None:
                    self._changes[segment] = [self._next if last == version else last for last in changes]
                self._release(self._next, segment)
                self._next += 1
        if newest:
            self._announce(self.newest)
            self._update_extracts()

    def _announce(self, version: int) -> None:
        for source in self._living_hosts():
            self._announce_to(source, version)

    def _announce_to(self, source: str, version: int) -> None:
        self._fetches[source] = future = ask(source, "fetch", self.source_name, version, timeout=0)
        future.add_done_callback(lambda done: self._on_fetched(source, version, done))

    def _on_fetched(self, source: str, version: int, done: rpc.Future[int | None]) -> None:
        if self._fetches.get(source) is done:
            del self._fetches[source]
        try:
            if done.wait() is None:
                self.forget(source)
        except Exception as exc:
            is_here = source in self._living_hosts()  # otherwise its consumer has closed it
            level = logging.WARNING if is_here else logging.DEBUG
            logger.log(level, "%r did not get version %s of %r: %s", worker_of(source), version, self.name, exc)
            # Its consumers held all versions while it waited: it starts again, or stays without this version.
            if isinstance(exc, DeadlineExceeded) and self.newest == version and is_here:
                self._announce_to(source, version)

    def _living_hosts(self) -> dict[str, str]:
        """Returns the hosts whose workers live; forgets the others."""
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
        """Waits until all readers of all hosts have a version; returns the readers that do not, with their versions."""
        limit_s = deadline.remaining_s()
        asked = {source: ask(source, "behind", version, limit_s, timeout=0) for source in self._living_hosts()}
        found = self.behind(version, limit_s)
        with self._extracting:
            extracts = list(self._extracts.values())
        for extract in extracts:
            extract.update(deadline)
            found.update(extract.all_behind(version, deadline))
        for source, future in asked.items():
            try:
                answer = future.wait(deadline.remaining_s() + SLOW_ANSWER_LIMIT_S)
                found.update((str(name)[:100], _checked_number(have)) for name, have in dict(answer).items())
            except TransportError as exc:
                logger.debug("%r is gone, and does not delay other hosts any more: %s", worker_of(source), exc)
        return found

    # ------------------------------------------------------------ called by consumers

    def describe(self, have: int, plain_selection: PlainSelection = ("", [])) -> Description:
        """Returns the description for a consumer that connects.

        Args:
            have: the newest version that the consumer has seen.
            plain_selection: the values that it wants, unless it wants all of them unchanged.

        Raises:
            CallRefused: consumers want too many different selections.
        """
        self.start_at(have)
        selection = Selection.from_plain(plain_selection, self.layout)
        return self.description() if selection == ("", ()) else self.extract(selection).description()

    def extract(self, selection: Selection) -> Extract:
        """Returns the source of a selection. Raises `CallRefused` if there are too many."""
        self._drop_unused()
        with self._extracting:
            found = self._extracts.get(selection)
            if found is not None:
                found.note_use()
            else:
                sizes = [each.layout.size_bytes() for each in self._extracts.values()]
                total = sum(sizes) + selection.layout_of(self.layout).size_bytes()
                if len(sizes) >= MAX_EXTRACTS or total > MAX_EXTRACTS_SHARE * self.layout.size_bytes():
                    raise CallRefused(
                        f"consumers of {self.name!r} want {len(sizes)} other selections or dtypes of its tensors; at "
                        f"most {MAX_EXTRACTS} are allowed, with {MAX_EXTRACTS_SHARE} times the memory of the versions "
                        f"of {self._me!r}. Pull the same selection and dtype on more workers"
                    )
                found = self._extracts[selection] = Extract(self, selection)
        found.update()
        return found

    def _update_extracts(self) -> None:
        """Updates the extracts on the pool; this thread does not wait."""
        for extract in self._drop_unused():
            current_agent().pool.submit(extract.update)

    def _drop_unused(self) -> list[Extract]:
        """Closes unused extracts and returns the others."""
        if not self._extracts:
            return []
        with self._extracting:
            unused = [self._extracts.pop(key) for key, each in list(self._extracts.items()) if each.is_unused()]
            used = list(self._extracts.values())
        for extract in unused:
            extract.close()
        return used

    def close(self) -> None:
        """See `VersionSource`."""
        with self._extracting:
            extracts, self._extracts = self._extracts, {}
        for extract in extracts.values():
            extract.close()
        super().close()

    def description(self) -> Description:
        """See `describe`."""
        hosts = self._living_hosts()
        with self._changed:
            addresses = [address for address in (self.address, *hosts.values()) if address]
            plain = self.layout.plain()
            return self.source_name, plain, self._keep, self._num_changes, addresses, self.num_shards

    def join(self, source: str, address: str, num_changes: int | None, living: Sequence[str]) -> bool:
        """Adds a host, which fetches the newest version first.

        Args:
            address: the address for readers of the source; empty if it has none.
            num_changes: from the description that showed that its host has no source yet; None if it knows that.
            living: the sources of its worker; the garbage collector has freed others without a message.

        Returns:
            False if another source has joined meanwhile, which may be on the same host.
        """
        with self._changed:
            if address and num_changes not in (None, self._num_changes):
                return False
            for other in [other for other in self._hosts if worker_of(other) == worker_of(source)]:
                if other not in living:
                    del self._hosts[other]
            check_fetcher(source, self._hosts)
            self._hosts[source] = address
            self._num_changes += 1
        if newest := self.newest:
            self._announce_to(source, newest)
        return True

    def forget(self, source: str) -> None:
        """Removes a host, whose source is closed."""
        with self._changed:
            if self._hosts.pop(source, None) is not None:
                self._num_changes += 1

    def upstream_of(self, source: str, failed: str) -> str:
        """Returns the source from which a host should fetch: the one before it, or this one.

        Args:
            failed: the name of the source that did not answer, or "".
        """
        before = self.source_name
        for name in self._living_hosts():
            if name == source:
                break
            before = name
        return self.source_name if before == failed else before


class Extract(Publisher):
    """Some of a publisher's values, or all of them in another dtype; each version is made once, for all consumers.

    It reads the publisher's versions like a consumer, on a thread of the pool, and publishes them with the same numbers
    to the readers and hosts that want this selection.
    """

    def __init__(self, origin: Publisher, selection: Selection) -> None:
        self._extracted_from = weakref.ref(origin)
        self._selection = selection
        self._reader = origin.reader()
        self._is_updating = False
        self._used_at = time.monotonic()
        layout = selection.layout_of(origin.layout)
        super().__init__(origin.name, layout.plain(), origin._keep, (origin.shard, origin.num_shards))

    def note_use(self) -> None:
        """Notes that a consumer is about to connect."""
        self._used_at = time.monotonic()

    def is_unused(self) -> bool:
        """Whether no consumer was connected in any call of this method for `IDLE_LIMIT_S`."""
        with self._changed:
            self._forget_ended()
            if self._connections or self._hosts:
                self._used_at = time.monotonic()
            return time.monotonic() - self._used_at > IDLE_LIMIT_S

    def update(self, deadline: Deadline | None = None) -> None:
        """Makes the newest version of the publisher, unless another thread does so. Never call it on a loop's thread.

        Args:
            deadline: the limit of the wait for memory that no consumer reads; None to skip the version instead.
        """
        while True:
            with self._changed:
                if self._is_updating or self._reader.newest <= self.newest:
                    return
                self._is_updating = True
            try:
                views = self._reader.begin()
                assert views is not None  # the newest version always exists
                number = self._reader.beginning
                try:
                    made = self.publish(self._selection.taken_from(self._reader.layout, views), number, deadline)
                finally:
                    self._reader.end(number)
                if made < number:
                    return  # consumers read all of the memory, so this version is skipped
            finally:
                with self._changed:
                    self._is_updating = False

    def _changed_tensors(
        self, tensors: Sequence[Tensor], how: Comparison | None, counters: Sequence[tuple[object, ...] | None] | None
    ) -> list[int] | None:
        origin, made = self._extracted_from(), self.newest
        if origin is None or not made:
            return None
        indices = [index for index, _ in self._selection.boxes] or range(len(tensors))
        changed = [number for number, index in enumerate(indices) if origin._changed_in[index] > made]
        return changed if len(changed) < len(tensors) else None

    def close(self) -> None:
        """See `VersionSource`."""
        super().close()
        self._reader.close()


class HostCopy(VersionSource):
    """The source of a host that fetches versions from another host; a consumer on its host owns it.

    Args:
        keep: how many complete versions may exist at once.
        origin: the name of the publisher's source.
        num_shards: the number of publishers of the tensors.
        is_extract: whether it fetches an `Extract`; after a change of publisher its consumer requests a new one.
    """

    def __init__(
        self,
        name: str,
        layout: VersionLayout,
        keep: int,
        origin: str,
        shard: int = 0,
        num_shards: int = 1,
        is_extract: bool = False,
    ) -> None:
        super().__init__(name, layout, keep, num_shards)
        self.is_extract = is_extract
        self.shard = shard
        self.origin = origin
        self._incarnation = 0
        self._wanted = 0
        self._is_fetching = False
        self._given_up = 0  # the version that could not be fetched; sources that want it must ask another source
        self._coming: tuple[int, int, int] | None = None  # version, segment, and number of chunks that have arrived
        self._kept: set[int] = set()  # chunks of that version which the segment had before

    def leave(self) -> None:
        """Closes it, and notifies the publisher, unless that has ended."""
        _notify(self.origin, "forget", self.source_name)
        self.close()

    @property
    def follows_living(self) -> bool:
        """Whether the publisher from which it fetches lives."""
        directory = current_agent().directory
        return directory.living_incarnation(worker_of(self.origin)) == self._incarnation

    def join(self, origin: str, num_changes: int | None) -> bool:
        """Joins the chain of a publisher; returns False if its host may already have a source in the chain.

        Args:
            origin: the name of the publisher's source.
            num_changes: from its description; None if no other worker of this host can have joined before.
        """
        self._incarnation = current_agent().directory.living_incarnation(worker_of(origin))
        with self._changed:
            if origin != self.origin:  # versions of another publisher may have the same numbers
                self._contents = [0] * len(self._contents)
                self._wanted = self.newest
            self.origin = origin  # from now on it calls `fetch` here
        living = list(sources_of(current_agent()))
        asked = ask(origin, "join", self.source_name, self.address, num_changes, living, timeout=SLOW_ANSWER_LIMIT_S)
        return bool(asked.wait())

    @property
    def newest_coming(self) -> int:
        """The newest version that is here or arriving."""
        with self._changed:
            return max(self.newest, 0 if self._coming is None else self._coming[0])

    def follow(self, description: Description) -> None:
        """Joins the chain of a new publisher, or closes if that one publishes other tensors."""
        origin, plain, *_ = description
        if VersionLayout.from_plain(plain) == self.layout:
            self.join(origin, None)
        else:
            self.close()

    def fetch(self, origin: str, version: int) -> int:
        """Fetches a version or a newer one; returns when it is here, or if another thread is already fetching.

        Args:
            origin: the name of the publisher's source, which has announced the version.
        """
        with self._changed:
            if origin != self.origin:  # the publisher was replaced
                return self.newest
            self._wanted = max(self._wanted, version)
            if self._is_fetching:
                return self.newest
            self._is_fetching = True
        while True:
            with self._changed:
                wanted, origin = self._wanted, self.origin
                if self.newest >= wanted:
                    self._is_fetching = False
                    return self.newest
            try:
                self._fetch_one(origin, wanted)
            except BaseException as exc:
                with self._changed:
                    if origin != self.origin and isinstance(exc, RpcdistError):
                        continue  # another publisher has replaced it, and announced its version
                    self._is_fetching = False
                    self._given_up, self._wanted = self._wanted, self.newest
                    self._changed.notify_all()
                raise

    def _fetch_one(self, origin: str, at_least: int) -> None:
        """Fetches one version from any host that has it."""
        segment = self._wait_for_segment(Deadline.after(SLOW_ANSWER_LIMIT_S))
        if segment is None:  # the consumers of this host delay only themselves
            raise DeadlineExceeded(
                f"{self._me!r} has no memory for version {at_least} of {self.name!r}: {self._keep} other versions are "
                f"still read, by {', '.join(self._holders())}"
            )
        self._memory.fill(segment)
        failed = ""
        try:
            while True:
                upstream = ask(origin, "upstream_of", self.source_name, failed, timeout=SLOW_ANSWER_LIMIT_S).wait()
                try:
                    version = self._fetch_from(upstream, at_least, segment)
                    break
                except RpcdistError as exc:
                    if upstream == origin:
                        raise
                    failed = upstream
                    logger.warning("%r does not pass %r on to %r: %s", worker_of(failed), self.name, self._me, exc)
                    _notify(failed, "end_fetch", self.source_name)  # it may be alive without answering
        except BaseException:
            self._give_up_coming()
            raise
        with self._changed:
            self._coming = None  # sources that fetch it from here keep their pins
            self._release(version, segment)

    def _fetch_from(self, upstream: str, at_least: int, segment: int) -> int:
        """Fetches a version from one source and returns its number. Keeps chunks of it from other sources."""
        me, limit_s = self.source_name, SLOW_ANSWER_LIMIT_S
        began = ask(upstream, "begin_fetch", me, at_least, limit_s, timeout=2 * limit_s).wait()
        version, changes = _checked_beginning(began, at_least, self._num_chunks)
        with self._changed:
            if self._coming is None or self._coming[0] != version:
                self._give_up_coming()
                held, self._contents[segment] = self._contents[segment], 0
                self._changes[segment] = changes
                # The chunks that have not changed since the version in the segment.
                self._kept = {i for i, last in enumerate(changes or ()) if last <= held}
                self._coming = (version, segment, 0)
            begin = self._coming[2]
            self._changed.notify_all()
        memory = self._memory.tensors[segment]
        under_way: deque[tuple[int, rpc.Future[Tensor]]] = deque()
        wanted = [index for index in range(begin, self._num_chunks) if index not in self._kept]
        try:
            for index in (*wanted, *[-1] * CHUNKS_UNDER_WAY):
                if index >= 0:
                    call = ask(upstream, "chunk", me, version, index, limit_s, timeout=2 * limit_s)
                    call.is_quiet = True  # the first error ends all calls
                    under_way.append((index, call))
                if under_way and (len(under_way) == CHUNKS_UNDER_WAY or index < 0):
                    number, call = under_way.popleft()
                    place, chunk = memory[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES], call.wait()
                    if not isinstance(chunk, Tensor) or chunk.dtype is not place.dtype or chunk.shape != place.shape:
                        raise TransportError(
                            f"{worker_of(upstream)!r} sent something else than a chunk of {self.name!r}"
                        )
                    place.copy_(chunk)
                    with self._changed:
                        self._coming = (version, segment, number + 1)
                        self._changed.notify_all()
        finally:
            for _, call in under_way:
                call.cancel()
        ask(upstream, "end_fetch", me, timeout=limit_s).wait()
        return version

    def _give_up_coming(self) -> None:
        """Drops the chunks of the arriving version, also for sources that fetch it from here."""
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


def _counter_of(tensor: Tensor) -> tuple[object, ...]:
    """Returns a value that changes when torch writes to the tensor's memory, or the tensor gets other memory.

    The weak reference to the storage prevents another storage from getting the same identity.
    """
    storage = StorageWeakRef(tensor.untyped_storage())
    version = object() if tensor.is_inference() else tensor._version  # torch does not count writes to those
    return storage, tensor.storage_offset(), tensor.stride(), tensor.dtype, version


def _has_equal_bytes(view: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor has the bytes of a published one; False if that is expensive to determine."""
    integer = _INTEGERS.get(view.dtype.itemsize)
    if view.dtype is not tensor.dtype or integer is None or not tensor.is_contiguous() or tensor.device.type != "cpu":
        return False
    return torch.equal(view.view(integer), tensor.detach().view(integer))


def _checked_number(number: object) -> int:
    """Checks a version number from a peer."""
    if type(number) is not int or not 0 <= number < 2 * MAX_VERSION:
        raise TransportError(f"{abridged(number)} is not the number of a version")
    return number


def _checked_beginning(began: object, at_least: int, num_chunks: int) -> tuple[int, list[int] | None]:
    """Checks the reply of another source to `begin_fetch`."""
    if isinstance(began, tuple) and len(began) == 2:
        version, changes = _checked_number(began[0]), began[1]
        if version >= at_least and (changes is None or (type(changes) is list and len(changes) == num_chunks)):
            return version, None if changes is None else list(map(_checked_number, changes))
    raise TransportError(f"a source of published tensors answered {abridged(began)} instead of a version")


def _notify(source: str, method: str, *args: object) -> None:
    """Calls a method of a source that may have ended, without waiting."""
    try:
        ask(source, method, *args, timeout=SLOW_ANSWER_LIMIT_S).is_quiet = True
    except RpcdistError as exc:
        logger.debug("%s of %s: %s", method, source, exc)
