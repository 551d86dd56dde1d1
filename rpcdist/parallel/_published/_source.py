"""The source of published versions on a host, at the publisher or at the first consumer of another host."""

from __future__ import annotations

import logging
import secrets
import select
import socket
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from rpcdist import rpc
from rpcdist.collectives._transports.shm import futex
from rpcdist.deadline import Deadline
from rpcdist.errors import CallRefused, DeadlineExceeded, TransportError, abridged
from rpcdist.ids import Identity
from rpcdist.parallel._published._layout import VersionLayout
from rpcdist.parallel._published._parts import ASKED, HAVE, NEWEST, PAGE_BYTES, READING, VERSION_IN, packed, unpacked
from rpcdist.parallel._published._reader import (
    HELLO,
    HELLO_MAGIC,
    VersionReader,
    address_of,
    memory_of_segment,
    words_of,
)
from rpcdist.rpc._current import current_agent
from rpcdist.rpc._peers.network import check_speaks_for, functions_that_ask
from rpcdist.time_limits import CHECK_INTERVAL_S, PARKED_LIMIT_S, SLOW_ANSWER_LIMIT_S
from rpcdist.transport import Node
from rpcdist.transport._tls.tls_socket import StreamSocket
from rpcdist.transport.addresses import split_address
from rpcdist.transport.shared_memory import MappedSegment, Segment, SegmentError
from rpcdist.transport.sockets import SocketHub

if TYPE_CHECKING:
    from rpcdist.rpc._agent import Agent


logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 2 << 20
"""The size of one message between hosts; a host passes on a chunk as soon as it has it."""

_CALLED_BY_PEERS: Final = frozenset(
    ("begin_fetch", "behind", "chunk", "describe", "end_fetch", "fetch", "forget", "join", "upstream_of")
)
"""The methods of a source that other workers may call."""

MAX_SOURCES_OF_WORKER: Final = 16
"""The limit of a worker's sources for one name: it needs one, and another while the first is closed."""

MAX_READERS_OF_WORKER: Final = 256
"""The limit of a worker's readers of one source: each `Published` of a worker has one, and takes a descriptor here."""

MAX_RECEIVES: Final = 64
"""Receives of 4 KiB, more than a socket usually holds, before a thread goes on that reads what wakes it up."""

_PURPOSE: Final = "read/"
_SEPARATOR: Final = "/"  # names of workers do not contain it


def purpose_of(worker: str) -> str:
    """Returns the first message of a worker of this host that connects as a reader."""
    return _PURPOSE + worker


def worker_of(source_name: str) -> str:
    """Returns the worker that has a source."""
    return source_name.partition(_SEPARATOR)[0]


def check_fetcher(source_name: str, known: Collection[str]) -> None:
    """Raises `CallRefused` for an invalid name of a source, or if the worker has too many sources.

    Args:
        source_name: a name from a peer. State that is kept for it can delay the publisher, and takes memory.
        known: the names with kept state.
    """
    worker = worker_of(source_name)
    if source_name in known:
        return
    if all(member.name != worker for member in rpc.workers()):
        raise CallRefused(f"no worker of this job has a source of published tensors {abridged(source_name)}")
    if sum([worker_of(other) == worker for other in known]) >= MAX_SOURCES_OF_WORKER:
        raise CallRefused(f"worker {worker!r} has {MAX_SOURCES_OF_WORKER} sources of these tensors already")


def ask(source_name: str, method: str, *args: object, timeout: float) -> rpc.Future[Any]:
    """Calls a method of a source, on its worker."""
    return rpc.rpc_async(worker_of(source_name), _answer, (source_name, method, args), timeout=timeout)


def _answer(source_name: str, method: str, args: tuple[object, ...]) -> object:
    """Runs a method at the worker of a source."""
    source = sources_of(current_agent()).get(source_name)
    if source is None:
        if method == "fetch":  # this error makes the publisher forget the source
            return None
        raise TransportError(f"the source {abridged(source_name)} of published tensors has been closed")
    if method not in _CALLED_BY_PEERS:
        raise CallRefused(f"{abridged(method)} of a source of published tensors cannot be called by other workers")
    if method != "behind":  # the first argument is the source for which the worker that calls speaks
        check_speaks_for(worker_of(args[0]) if args and isinstance(args[0], str) else "")
    return getattr(source, method)(*args)


functions_that_ask.add(f"{__name__}:{_answer.__name__}")


class _AdmittedReader:
    """A source's record of a reader."""

    def __init__(self, name: str, words: memoryview, connection: socket.socket) -> None:
        self.name = name
        self.words = words
        self.socket = connection

    def has_ended(self) -> bool:
        """Whether the reader has closed its end, or its process has ended."""
        with suppress(BlockingIOError, InterruptedError):
            try:
                for _ in range(MAX_RECEIVES):
                    if not self.socket.recv(4096):  # otherwise bytes of a reader that has finished a version
                        return True
            except (ConnectionError, ValueError):
                return True
        return False  # not now, or it sends as fast as this thread reads


class _Memory:
    """The words of a source and its segments, shared with other processes if possible."""

    def __init__(self, size_bytes: int, num_segments: int, is_shared: bool) -> None:
        self.size_bytes = size_bytes
        self.descriptors: list[Segment] = []
        self._mapped: list[MappedSegment] = []
        if is_shared:
            page = Segment.create(PAGE_BYTES, is_for_readers=True)
            self.words = words_of(page, True)
            page.forbid_writing()
            self.descriptors.append(page)
            for number in range(num_segments):
                segment = Segment.create(size_bytes, is_for_readers=True)
                self._mapped.append(MappedSegment(number, segment, is_filled=False))
                segment.forbid_writing()
                self.descriptors.append(segment)
            self.tensors = [memory_of_segment(mapped) for mapped in self._mapped]
        else:
            self.words = memoryview(bytearray(PAGE_BYTES)).cast("q")
            with torch.inference_mode(False):  # as in `memory_of_segment`
                self.tensors = [torch.empty(size_bytes, dtype=torch.uint8, device="cpu") for _ in range(num_segments)]
        self.is_filled = [not is_shared] * num_segments

    def fill(self, segment: int) -> None:
        """Prepares the first write of a segment: one system call instead of a page fault for each page."""
        if not self.is_filled[segment]:
            self.is_filled[segment] = True
            self._mapped[segment].fill()


class VersionSource:
    """Versions of published tensors, for the readers of a host and for the next host. Any thread may use it.

    Of its `keep` + 1 segments, one has the newest version, up to `keep` - 1 have older versions that are being read,
    and one takes the next version.

    Args:
        keep: how many complete versions may exist at once.
        num_shards: with several shards, older versions stay as long as possible: other shards may not have newer ones.

    Attributes:
        address: the address for readers of this host; empty if memory cannot be shared.
        source_name: a unique name; `worker_of` returns its worker.
    """

    def __init__(self, name: str, layout: VersionLayout, keep: int, num_shards: int = 1) -> None:
        agent = current_agent()
        self.name = name
        self.layout = layout
        self._keep = keep
        self.num_shards = num_shards
        # Weak: the future of an actor in torch holds the source, and Python's collector cannot see that cycle.
        self._agent = weakref.ref(agent)
        self._me = agent.worker_name
        self.source_name = f"{self._me}{_SEPARATOR}{secrets.token_hex(4)}"
        self._connections: list[_AdmittedReader] = []
        self._pins: dict[str, tuple[int, int]] = {}  # what each source of another host fetches
        sources_of(agent)[self.source_name] = self
        self._changed = threading.Condition()  # guards the two attributes above, and some of subclasses
        self._fence = threading.Lock()
        # The version in each segment, also when readers cannot get it any more; 0 if it is incomplete.
        self._contents = [0] * (keep + 1)
        # The version in which each chunk of a segment last changed; None if all changed in this version.
        self._changes: list[list[int] | None] = [None] * (keep + 1)
        self._hub: SocketHub | None = None
        self.address = ""
        size_bytes = max(1, layout.offsets()[1])
        self._num_chunks = -(-size_bytes // CHUNK_BYTES)
        network = agent.network
        is_shared = agent.options.share_payloads and isinstance(network, Node) and futex.unsupported_here() is None
        try:
            self._memory = _Memory(size_bytes, keep + 1, is_shared)
        except SegmentError as exc:
            logger.warning("%r is not shared between the processes of this host: %s", name, exc)
            self._memory = _Memory(size_bytes, keep + 1, False)
        self._views: dict[int, list[Tensor]] = {}
        if self._memory.descriptors and isinstance(network, Node) and network.address is not None:
            self._hub = SocketHub(network)
            self._hub.announce(_PURPOSE, self._on_connection, self._refusal)
            self.address = self._hub.open(split_address(network.address)[0], SLOW_ANSWER_LIMIT_S)

    @property
    def agent(self) -> Agent | None:
        """The agent to which it belongs; None after the process has left the job."""
        return self._agent()

    @property
    def newest(self) -> int:
        """The number of the newest complete version; 0 for none."""
        return unpacked(self._memory.words[NEWEST])[0]

    # ------------------------------------------------------------ readers of this host

    def reader(self) -> VersionReader:
        """Makes a reader in this process."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        if self._memory.descriptors:
            self._admit(self._me, ours)
            return VersionReader.received(self.layout, theirs)
        own = memoryview(bytearray(PAGE_BYTES)).cast("q")
        with self._changed:
            self._connections.append(_AdmittedReader(self._me, own, ours))
        return VersionReader(self.layout, self._memory.words, own, self._memory.tensors, theirs, self._changed)

    def _refusal(self, purpose: str, peer: Identity) -> str:
        """Returns why a reader is refused, or nothing; on the I/O loop. A reader can hold up the publisher."""
        name = purpose.removeprefix(_PURPOSE)
        if name != peer.name:
            return f"worker {peer.name!r} cannot read as worker {abridged(name)}: each worker speaks for itself"
        with self._changed:
            self._forget_readers()
            if sum(reader.name == name for reader in self._connections) >= MAX_READERS_OF_WORKER:
                return f"worker {name!r} has {MAX_READERS_OF_WORKER} readers of {self.name!r} already"
        return ""

    def _on_connection(self, purpose: str, connection: StreamSocket) -> None:
        """Admits a reader of this host; runs on the I/O loop."""
        if not isinstance(connection, socket.socket) or connection.family != socket.AF_UNIX:
            connection.close()  # it is on another host, with which memory cannot be shared
            return
        try:
            self._admit(purpose.removeprefix(_PURPOSE), connection)
        except OSError as exc:
            logger.warning("%r cannot be read by %r: %s", self.name, purpose.removeprefix(_PURPOSE), exc)
            with self._changed:  # another thread may have forgotten it already, since it has ended
                self._connections = [reader for reader in self._connections if reader.socket is not connection]
            connection.close()

    def _admit(self, name: str, connection: socket.socket) -> None:
        page = Segment.create(PAGE_BYTES)
        words = words_of(page, True)
        with self._changed:  # before the reader starts
            self._forget_readers()  # a publisher that publishes once never does so otherwise
            self._connections.append(_AdmittedReader(name, words, connection))
        descriptors = self._memory.descriptors
        hello = HELLO.pack(HELLO_MAGIC, self._memory.size_bytes, len(descriptors) - 1)
        with page:
            files = [descriptors[0].fileno(), page.fileno(), *(s.fileno() for s in descriptors[1:])]
            socket.send_fds(connection, [hello], files)

    def _forget_readers(self) -> None:
        """Removes readers that have ended; the lock is held."""
        for connection in [connection for connection in self._connections if connection.has_ended()]:
            self._connections.remove(connection)
            connection.socket.close()

    def _forget_ended(self) -> None:
        """Removes readers and other hosts' workers that have ended; the lock is held."""
        self._forget_readers()
        if self._pins:
            living = {worker.name for worker in rpc.workers()}
            self._pins = {source: pin for source, pin in self._pins.items() if worker_of(source) in living}

    # ------------------------------------------------------------ writing a version

    def _free_segment(self) -> int | None:
        """Returns a segment without readers for the next version, for one writing thread; None if none is free."""
        words = self._memory.words
        with self._changed:
            self._forget_ended()
            newest = words[NEWEST]
            taken = {segment for _, segment in self._pins.values()}
            if newest:
                taken.add(unpacked(newest)[1])
            for segment in sorted(set(range(self._keep + 1)) - taken, key=self._worth):
                held, words[VERSION_IN + segment] = words[VERSION_IN + segment], 0
                with self._fence:  # [Note: hazards]
                    pass
                reading = [word for connection in self._connections if (word := connection.words[READING])]
                if all(unpacked(word)[1] != segment for word in reading):
                    return segment
                words[VERSION_IN + segment] = held
        return None

    def _worth(self, segment: int) -> tuple[bool, int]:
        """Returns a sort key: segments with smaller keys are overwritten first, warm ones, then the oldest."""
        return self.num_shards == 1 and not self._contents[segment], self._contents[segment]

    def _wait_for_segment(self, deadline: Deadline) -> int | None:
        """Waits until `_free_segment` finds a segment; returns None after the deadline."""
        found: list[int | None] = []

        def is_found() -> bool:
            found.append(self._free_segment())
            return found[-1] is not None

        self._wait_for_readers(is_found, deadline)
        return found[-1]

    def _views_of(self, segment: int) -> list[Tensor]:
        """Returns the tensors in a segment that is about to be written."""
        self._memory.fill(segment)
        views = self._views.get(segment)
        if views is None:
            views = self._views[segment] = self.layout.views(self._memory.tensors[segment])
        return views

    def _release(self, version: int, segment: int) -> None:
        """Makes the written version the newest."""
        with self._changed:
            self._contents[segment] = version
            self._memory.words[VERSION_IN + segment] = version
            self._memory.words[NEWEST] = packed(version, segment)
            self._changed.notify_all()
        if self._memory.descriptors:
            futex.wake(address_of(self._memory.words))

    def _holders(self) -> list[str]:
        """Returns the workers that prevent older versions from being overwritten."""
        with self._changed:
            newest = self._memory.words[NEWEST]
            readers = {c.name for c in self._connections if c.words[READING] not in (0, newest)}
            return sorted(readers | set(map(worker_of, self._pins)))

    # ------------------------------------------------------------ what readers have

    def behind(self, version: int, timeout: float) -> dict[str, int]:
        """Waits until all readers of this host have a version or a newer one; returns the others, with their version.

        Args:
            timeout: limit in seconds.
        """

        found: dict[str, int] = {}

        def is_done() -> bool:
            nonlocal found
            found = {c.name: c.words[HAVE] for c in self._connections if c.words[HAVE] < version}
            return not found

        self._wait_for_readers(is_done, Deadline.after(min(PARKED_LIMIT_S, timeout)))
        return found

    def _wait_for_readers(self, is_done: Callable[[], bool], deadline: Deadline) -> bool:
        """Waits for a condition that changes when a reader finishes or ends; returns whether it holds.

        Several threads may wait, and one may read the byte meant for another, so each also checks regularly.
        """
        while True:
            self._memory.words[ASKED] = 1
            with self._changed:  # a fence, too
                self._forget_ended()
                poller = select.poll()
                for connection in self._connections:  # here, since another thread may close one later
                    poller.register(connection.socket, select.POLLIN)
                if is_done():
                    self._memory.words[ASKED] = 0
                    return True
            if deadline.expired():
                self._memory.words[ASKED] = 0
                return False
            poller.poll(1 + 1000 * min(CHECK_INTERVAL_S, deadline.remaining_s()))

    # ------------------------------------------------------------ other hosts

    def begin_fetch(self, fetcher: str, at_least: int, timeout: float) -> tuple[int, list[int] | None]:
        """Keeps a version from being overwritten until another host has fetched it.

        Args:
            fetcher: the name of the source there, which fetches one version at a time.
            at_least: the lowest acceptable version; waits until such a version is here or arriving.
            timeout: limit in seconds.

        Returns:
            Its number, and the version in which each chunk last changed; None if all may have changed in this version.

        Raises:
            CallRefused: no living worker has that source.
            DeadlineExceeded: no such version came in time.
        """
        deadline = Deadline.after(min(SLOW_ANSWER_LIMIT_S, timeout))
        with self._changed:
            while (found := self._fetchable(at_least)) is None:
                if deadline.expired():
                    raise DeadlineExceeded(f"{self._me!r} did not get version {at_least} of {self.name!r} in time")
                self._changed.wait(deadline.wait_s())
            check_fetcher(fetcher, self._pins)
            self._pins[fetcher] = found
            return found[0], self._changes[found[1]]

    def _fetchable(self, at_least: int) -> tuple[int, int] | None:
        """Returns the newest version that is here or arriving, and its segment, unless it is older. Holds the lock."""
        newest = self._memory.words[NEWEST]
        return unpacked(newest) if newest and unpacked(newest)[0] >= at_least else None

    def chunk(self, fetcher: str, version: int, index: int, timeout: float) -> Tensor:
        """Returns one chunk of a version.

        Args:
            fetcher: the name that was passed to `begin_fetch`.
            timeout: limit of the wait for a chunk that this process does not have yet, in seconds.

        Raises:
            TransportError: the version is gone.
            DeadlineExceeded: the chunk did not come in time.
        """
        deadline = Deadline.after(min(SLOW_ANSWER_LIMIT_S, timeout))
        if not 0 <= index < self._num_chunks:
            raise TransportError(f"{self.name!r} has the chunks 0 to {self._num_chunks - 1}, but no chunk {index}")
        with self._changed:
            while True:
                found, segment = self._pins.get(fetcher, (0, 0))
                if found != version:
                    raise TransportError(f"{self._me!r} does not keep version {version} of {self.name!r} any more")
                if self._num_chunks_of(version) > index:
                    return self._memory.tensors[segment][index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
                if deadline.expired():
                    raise DeadlineExceeded(f"{self._me!r} did not get chunk {index} of {self.name!r} in time")
                self._changed.wait(deadline.wait_s())

    def _num_chunks_of(self, version: int) -> int:
        """Returns the number of present chunks of a version that is kept for a fetcher; the lock is held."""
        return self._num_chunks

    def end_fetch(self, fetcher: str) -> None:
        """Ends the fetch of another host, which has the version or has given up."""
        with self._changed:
            self._pins.pop(fetcher, None)

    # ------------------------------------------------------------ the end

    def __del__(self) -> None:
        if hasattr(self, "_memory"):  # otherwise the constructor failed
            self.close()

    def close(self) -> None:
        """Ends all connections; readers keep the memory that they have mapped. Idempotent."""
        agent = self.agent
        if agent is not None:
            sources_of(agent).pop(self.source_name, None)
        hub, self._hub = self._hub, None
        if hub is not None:
            hub.close()
        with self._changed:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.socket.close()
        for segment in self._memory.descriptors:
            segment.close()


_sources: Final[weakref.WeakKeyDictionary[Agent, weakref.WeakValueDictionary[str, VersionSource]]] = (
    weakref.WeakKeyDictionary()
)


def sources_of(agent: Agent) -> weakref.WeakValueDictionary[str, VersionSource]:
    """Returns the sources of a worker, by name."""
    return _sources.setdefault(agent, weakref.WeakValueDictionary())
