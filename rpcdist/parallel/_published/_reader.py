"""Reads the versions that a process of this host holds, for a consumer.

`SmallTensors` copies many small tensors at once, for source and reader: a call of torch for each takes longer than the
copy.
"""

from __future__ import annotations

import ctypes
import operator
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Final

import torch
from torch import Tensor

from rpcdist.collectives._transports.shm import futex
from rpcdist.deadline import Deadline
from rpcdist.errors import ConfigError, TransportError
from rpcdist.parallel._published._layout import VersionLayout
from rpcdist.parallel._published._parts import (
    ASKED,
    HAVE,
    MANY_TENSORS,
    MAX_SEGMENTS,
    NEWEST,
    PAGE_BYTES,
    READING,
    VERSION_IN,
    packed,
    unpacked,
)
from rpcdist.time_limits import CHECK_INTERVAL_S, SLOW_ANSWER_LIMIT_S
from rpcdist.transport._tls.tls_socket import NO_SIGPIPE
from rpcdist.transport.memory_copies import memory_view
from rpcdist.transport.shared_memory import MappedSegment, Segment

HELLO: Final = struct.Struct("<8sQQ")
"""The bytes in the message with the descriptors of a source's page, the reader's page and the segments."""
HELLO_MAGIC: Final = b"rpcdpub1"


def memory_of_segment(mapped: MappedSegment) -> Tensor:
    """Returns the bytes of a mapped segment, which stays mapped while they are referenced."""
    with torch.inference_mode(False):  # otherwise only threads in inference mode could write to it
        return torch.frombuffer(memory_view(mapped.address, mapped.size_bytes, mapped), dtype=torch.uint8)


def words_of(page: Segment, is_writable: bool) -> memoryview:
    """Returns the words of a page."""
    mapped = MappedSegment(0, page, is_writable=is_writable, is_filled=False)
    return memory_view(mapped.address, mapped.size_bytes, mapped).cast("q")


def address_of(words: memoryview) -> int:
    """Returns the address of the first of the words of a page."""
    return ctypes.addressof(words.obj)  # type: ignore[arg-type]


_MAX_LOOKS: Final = 1000  # attempts that each find another version


@dataclass(eq=False, repr=False)
class VersionReader:
    """Reads the versions of one source. Used by one thread at a time.

    Args:
        layout: the layout of the versions.
        source_page: words of the source.
        own_page: words of this reader.
        segments: memory of the versions.
        connection: a socket to the source, which ends when the source does.
        changed: notified of versions of a source in this process; None if the source's page is shared memory.

    Attributes:
        beginning: the number of the version that `begin` last returned.
        small: the indices of tensors that are copied without a call of torch for each.
        large: the indices of the others.
    """

    layout: VersionLayout
    _source: memoryview
    _own: memoryview
    _segments: Sequence[Tensor]
    _connection: socket.socket
    _changed: threading.Condition | None = None
    beginning: int = 0
    _views: dict[int, list[Tensor]] = field(default_factory=dict)
    _small_in: dict[int, SmallTensors] = field(default_factory=dict)
    _fence: threading.Lock = field(default_factory=threading.Lock)
    _has_ended: bool = False

    def __post_init__(self) -> None:
        self.small = small_ones(self.layout)
        self.large = sorted(set(range(len(self.layout.names))) - set(self.small))

    def __del__(self) -> None:
        self._connection.close()

    @classmethod
    def received(cls, layout: VersionLayout, connection: socket.socket) -> VersionReader:
        """Makes a reader of the source at the other end of a Unix socket, which sends its descriptors at once.

        Raises:
            TransportError: the descriptors did not come, or are invalid.
        """
        connection.settimeout(SLOW_ANSWER_LIMIT_S)
        message, descriptors, _, _ = socket.recv_fds(connection, HELLO.size, MAX_SEGMENTS + 2, socket.MSG_CMSG_CLOEXEC)
        connection.setblocking(False)
        segments: list[Segment] = []
        try:
            if len(message) != HELLO.size or not message.startswith(HELLO_MAGIC):
                raise TransportError(f"a source of published tensors sent an unexpected message: {message[:32]!r}")
            _, size_bytes, num_segments = HELLO.unpack(message)
            if len(descriptors) != num_segments + 2:
                raise TransportError(f"a source of published tensors sent {len(descriptors)} descriptors")
            sizes = [PAGE_BYTES, PAGE_BYTES, *[size_bytes] * num_segments]
            while descriptors:
                segments.append(Segment.received(descriptors.pop(0), sizes[len(segments)]))
            if layout.offsets()[1] > size_bytes:
                raise TransportError(f"a source of published tensors has {size_bytes} bytes, too few for the tensors")
            memory = [memory_of_segment(MappedSegment(0, s, is_writable=False, is_filled=False)) for s in segments[2:]]
            return cls(layout, words_of(segments[0], False), words_of(segments[1], True), memory, connection)
        finally:
            for descriptor in descriptors:
                Segment(descriptor, 0).close()
            for segment in segments:
                segment.close()

    @property
    def newest(self) -> int:
        """The newest complete version; 0 for none."""
        return unpacked(self._source[NEWEST])[0]

    @property
    def has_ended(self) -> bool:
        """Whether the source has ended; its versions can still be read."""
        if not self._has_ended:
            with suppress(BlockingIOError, InterruptedError):
                try:
                    self._has_ended = not self._connection.recv(4096)
                except (ConnectionError, ValueError):
                    self._has_ended = True
        return self._has_ended

    def versions(self) -> set[int]:
        """The versions that can be read now; the source may overwrite all except the newest before `begin`."""
        return {version for version in self._source[VERSION_IN : VERSION_IN + len(self._segments)] if version}

    def begin(self, version: int = 0) -> list[Tensor] | None:
        """Returns the tensors of a version, which stay valid until `end`; None if the version does not exist any more.

        Args:
            version: its number; 0 for the newest, which must exist. `beginning` then has the number.

        Raises:
            TransportError: the source's words are invalid.
        """
        source, own = self._source, self._own
        for _ in range(_MAX_LOOKS):
            newest = source[NEWEST]
            number, segment = unpacked(newest)
            if version and number != version:
                held = list(source[VERSION_IN : VERSION_IN + len(self._segments)])
                if version not in held:
                    own[READING] = 0
                    return None
                number, segment = version, held.index(version)
            own[READING] = packed(number, segment)
            with self._fence:  # [Note: hazards]
                pass
            if segment < len(self._segments) and source[VERSION_IN + segment] == number:
                break
        else:
            own[READING] = 0
            raise TransportError(f"a source announced version {number} as its newest, but does not have it")
        views = self._views.get(segment)
        if views is None:
            views = self._views[segment] = self.layout.views(self._segments[segment])
        self.beginning = number
        return views

    def small_tensors(self) -> SmallTensors:
        """Returns the memory of the small tensors of the version that `begin` last returned."""
        segment = unpacked(self._own[READING])[1]
        found = self._small_in.get(segment)
        if found is None:
            small = SmallTensors.of([self._views[segment][index] for index in self.small], None)
            assert small is not None
            found = self._small_in[segment] = small
        return found

    def small_of(self, tensors: list[Tensor]) -> list[Tensor]:
        """Selects, from the tensors of a version or targets for all of them, those that are copied without torch."""
        return [tensors[index] for index in self.small] if self.large else tensors

    def end(self, version: int) -> None:
        """Ends the use of the tensors of `begin`; `version` is the version that was taken, or 0."""
        self._own[READING] = 0
        self.note(version or self._own[HAVE])

    def note(self, version: int) -> None:
        """Reports that this consumer has a version of `begin`, which it may continue to read."""
        self._own[HAVE] = version
        with self._fence:
            pass
        if self._source[ASKED]:
            with suppress(OSError):  # the source has ended, or has not read earlier bytes
                self._connection.send(b"r", NO_SIGPIPE)

    def wait_for_newer(self, version: int, deadline: Deadline) -> bool:
        """Waits for a newer version, or the end of the source, which it notices within `CHECK_INTERVAL_S`.

        Returns:
            Whether a newer version exists.
        """
        while True:
            word = self._source[NEWEST]
            if unpacked(word)[0] > version:
                return True
            if self.has_ended or deadline.expired():
                return False
            limit_s = min(CHECK_INTERVAL_S, deadline.remaining_s())
            if self._changed is None:
                futex.wait(address_of(self._source), word, limit_s)  # unless the word has changed already
                continue
            with self._changed:
                if self._source[NEWEST] == word:
                    self._changed.wait(limit_s)

    def close(self) -> None:
        """Ends the connection. Tensors of `begin` stay mapped while referenced, but may be overwritten."""
        self._has_ended = True
        self._connection.close()


_MAX_BYTES: Final = 16 << 10
_AT_ONCE: Final = 256  # other threads may take the interpreter's lock between steps of this many
_ALL: Final = slice(None)
_set_bytes: Final[Any] = operator.setitem
_is_on_cpu: Final[Callable[[Tensor], bool]] = operator.attrgetter("is_cpu")


def small_ones(layout: VersionLayout) -> list[int]:
    """Returns the indices of a layout's small tensors, if it has many."""
    starts, end = layout.offsets()
    found = [
        index
        for index, (start, stop) in enumerate(zip(starts, (*starts[1:], end), strict=True))
        if start < stop <= start + _MAX_BYTES and not layout.dtypes[index].is_complex
    ]
    return found if len(found) >= MANY_TENSORS else []


class SmallTensors:
    """The places of tensors in this process's memory.

    Args:
        tensors: the tensors, whose memory must stay while this object is used.
        addresses: their addresses.
        seen: see `Pieces`.
    """

    def __init__(self, tensors: Sequence[Tensor], addresses: list[int], seen: object = None) -> None:
        self.addresses = addresses
        self.seen = seen
        self.memory = [
            memoryview((ctypes.c_char * tensor.nbytes).from_address(address)).cast("B")
            for tensor, address in zip(tensors, addresses, strict=True)
        ]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], last: SmallTensors | None, seen: object = None) -> SmallTensors | None:
        """Returns the memory of tensors; None if one is strided, on a device, without memory, or an inference tensor.

        Args:
            tensors: tensors with the sizes of a layout.
            last: the memory of tensors with the same sizes, which usually are the same tensors.
            seen: see `Pieces`.
        """
        if (last is None or seen is None or last.seen is not seen) and not (
            all(map(Tensor.is_contiguous, tensors))
            and not any(map(Tensor.is_neg, tensors))
            and not any(map(Tensor.is_inference, tensors))  # torch does not count writes to inference tensors
        ):
            return None
        if last is not None and all(map(operator.eq, map(Tensor.data_ptr, tensors), last.addresses)):
            last.seen = seen
            return last
        addresses = list(map(Tensor.data_ptr, tensors))
        return cls(tensors, addresses, seen) if all(addresses) and all(map(_is_on_cpu, tensors)) else None

    def copy_to(self, targets: SmallTensors) -> None:
        """Copies all bytes to tensors of the same sizes."""
        for begin in range(0, len(self.memory), _AT_ONCE):
            end = begin + _AT_ONCE
            steps = map(_set_bytes, targets.memory[begin:end], repeat(_ALL), self.memory[begin:end])
            deque(steps, maxlen=0)


def copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies tensors with torch, which converts them if necessary.

    Raises:
        ConfigError: a tensor has no memory, with which torch would end the process; nothing was copied.
    """
    for tensor in (*targets, *sources) if not all(map(Tensor.data_ptr, (*targets, *sources))) else ():
        if tensor.numel() and not tensor.data_ptr():
            raise ConfigError(
                f"a tensor of shape {tuple(tensor.shape)} has lost its memory since the last call: its storage "
                f"has the size {tensor.untyped_storage().size()}. Give it memory again, or leave it out"
            )
    if targets:
        with torch.inference_mode():  # allows writes to inference tensors and all others
            torch._foreach_copy_(targets, sources)
