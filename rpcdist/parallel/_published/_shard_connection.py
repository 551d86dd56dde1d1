"""The state of a name at a worker, and the connections through which the worker reads published tensors."""

from __future__ import annotations

import math
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from rpcdist import rpc
from rpcdist.deadline import Deadline
from rpcdist.errors import CallRefused, ConfigError, DeadlineExceeded, TransportError, UnknownActor
from rpcdist.parallel._published._hosts import Description, HostCopy, Publisher, check_description
from rpcdist.parallel._published._layout import Selection, VersionLayout, needed_boxes
from rpcdist.parallel._published._parts import Box, Pieces
from rpcdist.parallel._published._reader import VersionReader
from rpcdist.parallel._published._source import purpose_of, worker_of
from rpcdist.rpc._current import current_agent
from rpcdist.time_limits import ATTEMPT_LIMIT_S, CHECK_INTERVAL_S, MIN_WAIT_S
from rpcdist.transport import Node
from rpcdist.transport.sockets import SocketHub

if TYPE_CHECKING:
    from rpcdist.rpc._agent import Agent


_MOST_SELECTED: Final = 0.75
"""A host that needs more than this part of a shard takes all of it, which then serves all its consumers."""


def actor_name(name: str, shard: int) -> str:
    """Returns the name of the actor that publishes a shard."""
    return f"rpcdist published: {shard}: {name}"


class Known:
    """The state of a name at a worker.

    [Note: numbers go on] A publisher that replaces another one asks each worker which versions it has seen, and starts
    with a higher number. So a worker that has answered must not take a higher version of the old publisher: a read
    notes its version before it copies, and atomically checks whether another publisher has asked since the connection
    was made. A worker that was lost and comes back reports what it has seen when it connects.

    Attributes:
        copies: the sources that this worker holds for its host.
    """

    def __init__(self) -> None:
        self.copies: weakref.WeakSet[HostCopy] = weakref.WeakSet()
        self._newest: dict[int, int] = {}  # the newest version that was published or read here, by shard
        self._publishers: dict[int, tuple[int, int]] = {}  # by shard: how many have asked, and the last answer
        self._came = threading.Condition()

    def newest(self, shard: int) -> int:
        """Returns the newest version of a shard that was published or read here."""
        return self._newest.get(shard, 0)

    def saw(self, version: int, shard: int) -> None:
        """Notes that a version of a shard was published or pulled here."""
        with self._came:
            self._newest[shard] = max(self.newest(shard), version)

    def num_publishers(self, shard: int) -> int:
        """Returns how many publishers of a shard have begun since this worker joined."""
        return self._publishers.get(shard, (0, 0))[0]

    def may_take(self, version: int, connections: Sequence[ShardConnection]) -> bool:
        """Notes that a version will be taken, unless its publisher was replaced. [Note: numbers go on]"""
        with self._came:
            for connection in connections:
                num, answered = self._publishers.get(connection.shard, (0, 0))
                if connection.num_publishers != num and version > answered:
                    return False
            for connection in connections:
                self._newest[connection.shard] = max(self.newest(connection.shard), version)
        return True

    def wait_for_publisher(self, deadline: Deadline) -> None:
        """Waits briefly, or until a publisher announces itself; an earlier publisher is found by its name."""
        with self._came:
            self._came.wait(min(CHECK_INTERVAL_S, deadline.remaining_s()))

    def publisher_came(self, shard: int, description: Description) -> int:
        """Notes a new publisher of a shard; returns the newest version, which it must exceed."""
        check_description(description)
        for copy in list(self.copies):
            if copy.shard == shard and not copy.is_extract:
                copy.follow(description)
        with self._came:
            coming = [copy.newest_coming for copy in self.copies if copy.shard == shard]
            newest = max([self.newest(shard), *coming])
            self._publishers[shard] = (self.num_publishers(shard) + 1, newest)
            self._came.notify_all()
        return newest


_names: Final[weakref.WeakKeyDictionary[Agent, dict[str, Known]]] = weakref.WeakKeyDictionary()


def known(name: str) -> Known:
    """Returns the state of a name at the current worker."""
    return _names.setdefault(current_agent(), {}).setdefault(name, Known())


def follow(name: str, shard: int, description: Description) -> int:
    """Runs at every worker when another publisher begins; returns the newest version that was seen here."""
    state = _names.get(current_agent(), {}).get(name)
    if state is None:  # this worker does not use the name
        return 0
    check_description(description)
    if any(copy.shard == shard for copy in list(state.copies)):
        publisher = worker_of(description[0])
        owner = rpc.get_actor(actor_name(name, shard), ATTEMPT_LIMIT_S).owner_name()
        if owner != publisher:  # otherwise any worker could make the copies here fetch from it
            raise CallRefused(f"{publisher!r} does not publish {name!r}: {owner!r} does")
    return state.publisher_came(shard, description)


class ShardConnection:
    """A consumer's connection to one shard: reads the memory of a process of its host, or fetches for its host.

    Args:
        shard: the number of the shard.
        dtype: the dtype to which floating-point tensors are converted, once for this host; None for their own.

    Attributes:
        agent: the agent to which it belongs.
        published: the publisher's layout; None before the first connection.
        reader: the reader of the current or last source; None before the first connection.
        copy: the source of this host, if this consumer owns it.
        publisher: the worker that publishes the shard.
        num_shards: the number of shards.
        num_publishers: see `Known`; its value when the connection was made.
        problem: why the last attempt to connect to the publisher failed; empty if it succeeded, or if this consumer has
            never found a publisher.
    """

    def __init__(self, name: str, shard: int, dtype: torch.dtype | None = None) -> None:
        self.name = name
        self.shard = shard
        self.agent = current_agent()
        self._dtype = "" if dtype is None else str(dtype).removeprefix("torch.")
        self._boxes: list[tuple[int, Box]] = []  # the selected parts of the published tensors; empty for all
        self._wants_all = False
        self.published: VersionLayout | None = None
        self.reader: VersionReader | None = None
        self.copy: HostCopy | None = None
        self.publisher = ""
        self.num_shards = 1
        self.num_publishers = 0
        self.problem = ""
        self._retry_at = 0.0

    @property
    def newest(self) -> int:
        """The newest version that can be read; 0 for none."""
        return 0 if self.reader is None else self.reader.newest

    def refresh(self, wanted: Pieces | None, earlier: Sequence[ShardConnection], timeout: float) -> None:
        """Connects again if the source has ended or its publisher was replaced, not too often.

        Args:
            wanted: the targets of a pull, the only values that another host needs; None for all tensors.
            earlier: the connections to earlier shards, which have some of the values.
            timeout: limit of each question to another worker, as the user passed it; at most `ATTEMPT_LIMIT_S`.
        """
        reader, copy = self.reader, self.copy
        is_short = bool(self._boxes) and not self._has(wanted, earlier)
        if is_short:  # take all values from now on, as consumers that alternate between targets need them again
            if not self._wants_all:
                self._retry_at = 0.0
            self._wants_all = True
        if (
            reader is None
            or is_short
            or reader.has_ended
            or self.num_publishers != known(self.name).num_publishers(self.shard)
            or (copy is not None and not copy.follows_living)
        ) and time.monotonic() >= self._retry_at:
            try:
                limit_s = min(ATTEMPT_LIMIT_S, current_agent().caller.timeout_of(timeout))
                self._connect(wanted, earlier, limit_s)
                self.problem = ""
            except (UnknownActor, TransportError, DeadlineExceeded) as exc:
                if isinstance(exc, UnknownActor):
                    self.problem = self._end_of_publisher()
                elif not self.problem or not isinstance(exc, DeadlineExceeded):  # the last attempt of a pull is short
                    self.problem = f"it could not be reached: {exc}"
                self._retry_at = time.monotonic() + CHECK_INTERVAL_S
                if is_short and reader is not None:  # its values are not enough for this pull, which waits
                    reader.close()
                    self.reader = None

    def _end_of_publisher(self) -> str:
        """The reason why a publisher that this consumer has found before is gone; empty if there was none."""
        reason = self.agent.directory.losses().get(self.publisher)
        what = "it has ended" if reason is None else f"worker {self.publisher!r} was lost ({reason})"
        return f"{what}, and no other worker has published since then" if self.publisher else ""

    def _needed(
        self, layout: VersionLayout, wanted: Pieces, earlier: Sequence[ShardConnection]
    ) -> list[tuple[int, Box]]:
        return needed_boxes(layout, [each.published for each in earlier if each.published is not None], wanted)

    def _has(self, wanted: Pieces | None, earlier: Sequence[ShardConnection]) -> bool:
        """Whether the selected parts contain the wanted ones."""
        if wanted is None or self.published is None:
            return False
        return set(self._needed(self.published, wanted, earlier)) <= set(self._boxes)

    def _selection(
        self, layout: VersionLayout, wanted: Pieces | None, earlier: Sequence[ShardConnection]
    ) -> Selection | None:
        """Returns the values of a layout that another host needs; None for all, unchanged."""
        boxes: list[tuple[int, Box]] = []
        if wanted is not None and not self._wants_all:
            boxes = self._needed(layout, wanted, earlier)
            if not boxes:  # one index, to get the numbers of the versions
                sizes = [math.prod(shape) for shape in layout.shapes]
                index = min(range(len(sizes)), key=lambda at: sizes[at] or math.inf)
                box = layout.box(index)
                boxes = [(index, Box(box.offsets, (1,) * len(box.sizes)))]
        everything, found = Selection(self._dtype, ()), Selection(self._dtype, tuple(boxes))
        me = current_agent().worker_name
        found.check_dtypes(layout, f"{me!r} wants {self.name!r} of {self.publisher!r} in another dtype")
        selected = everything.layout_of(layout)
        if found.layout_of(layout).size_bytes() > _MOST_SELECTED * selected.size_bytes():
            found = everything
        return None if found is everything and selected == layout else found

    def _connect(self, wanted: Pieces | None, earlier: Sequence[ShardConnection], limit_s: float) -> None:
        """Finds the source of this host, or makes it."""
        state = known(self.name)
        num_publishers = state.num_publishers(self.shard)
        origin: rpc.RRef[Publisher] = rpc.get_actor(actor_name(self.name, self.shard), limit_s)
        self.publisher = origin.owner_name()
        if origin.is_owner():
            publisher = origin.local_value()
            publisher.start_at(state.newest(self.shard))
            self.published, self._boxes = publisher.layout, []
            selection = self._selection(publisher.layout, None, ())
            try:
                source = publisher if selection is None else publisher.extract(selection)
            except CallRefused as exc:
                raise self._no_other_dtype(exc) from exc
            self._use(source.reader(), num_publishers)
            self.num_shards = publisher.num_shards
            return
        while True:
            seen = state.newest(self.shard)
            description: Description = origin.rpc_sync(timeout=limit_s).describe(seen)
            check_description(description)
            self.num_shards = description[5]
            self.published = layout = VersionLayout.from_plain(description[1])
            selection = self._selection(layout, wanted, earlier)
            reader = None
            if selection is not None:
                # Parts of a tensor that are in the memory of this host are not made again.
                reader = None if self._dtype else self._reader_of_host(layout, description[4], limit_s)
                if reader is None:
                    described = self._described(origin, seen, selection, limit_s)
                    if described is None:
                        self._wants_all = True
                        continue
                    description, layout = described, selection.layout_of(layout)
            source_name, _, keep, num_changes, addresses, _ = description
            self._boxes = list(selection.boxes) if selection is not None and reader is None else []
            copy = self.copy
            if copy is not None and reader is None and copy.layout == layout:  # only its publisher died
                copy.join(source_name, None)
                self.num_publishers = num_publishers
                return
            if copy is not None:
                self.copy = None
                copy.leave()
            reader = reader or self._reader_of_host(layout, addresses, limit_s)
            if reader is not None:
                self._use(reader, num_publishers)
                return
            is_extract = selection is not None
            copy = HostCopy(self.name, layout, keep, source_name, self.shard, self.num_shards, is_extract)
            reader = copy.reader()  # before it joins, since this process may have no free descriptor
            if copy.join(source_name, num_changes):
                self.copy = copy
                self._use(reader, num_publishers)
                state.copies.add(copy)
                return
            reader.close()
            copy.close()

    def _described(
        self, origin: rpc.RRef[Publisher], seen: int, selection: Selection, limit_s: float
    ) -> Description | None:
        """Returns the description of the source of a selection; None if this consumer must take all tensors."""
        describing = origin.rpc_sync(timeout=limit_s)
        try:
            description: Description = describing.describe(seen, selection.plain())
        except CallRefused as exc:
            if not selection.dtype:
                return None
            raise self._no_other_dtype(exc) from exc
        check_description(description)
        if self.published is None or VersionLayout.from_plain(description[1]) != selection.layout_of(self.published):
            raise TransportError(f"{self.publisher!r} described other values of {self.name!r} than were selected")
        return description

    def _no_other_dtype(self, exc: CallRefused) -> ConfigError:
        return ConfigError(f"{self.publisher!r} does not convert {self.name!r} to another dtype: {exc}")

    def _use(self, reader: VersionReader, num_publishers: int) -> None:
        before, self.reader = self.reader, reader
        self.num_publishers = num_publishers
        if before is not None:
            before.close()

    def _reader_of_host(self, layout: VersionLayout, addresses: list[str], limit_s: float) -> VersionReader | None:
        """Returns a reader of the first source that answers in time and with which this process can share memory."""
        deadline = Deadline.after(limit_s)
        agent = current_agent()
        network = agent.network
        if not isinstance(network, Node) or not agent.options.share_payloads:
            return None
        hub = SocketHub(network)
        try:
            for address in addresses:
                try:
                    left_s = max(MIN_WAIT_S, deadline.remaining_s())
                    connection = hub.connect(address, purpose_of(agent.worker_name), left_s, unix=True)
                except TransportError:
                    continue  # on another host
                assert isinstance(connection, socket.socket)  # a Unix socket has no TLS
                try:
                    return VersionReader.received(layout, connection)
                except OSError:
                    connection.close()
        finally:
            hub.close()
        return None

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        reader, self.reader = self.reader, None
        copy, self.copy = self.copy, None
        if reader is not None:
            reader.close()
        if copy is not None:
            copy.leave()
