"""The sends and receives of a group, messages that arrived before their receive, and the format on the socket.

A socket carries messages from the rank that connected it to the rank that accepted it. Nothing is ever unpickled.

    header  magic, kind, dtype, tag, sequence number on this socket, size of the payload in bytes
    payload the tensor's elements; only of a MESSAGE

In the other direction the receiver sends only refusals: a REFUSED header with the size and dtype that it expected,
then a copy of the header that it refused.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Protocol

import torch

from rpcdist.collectives._operations.dense import copy_bytes, memory_of
from rpcdist.collectives._operations.operation import DTYPES, dtype_code
from rpcdist.collectives.work import Work
from rpcdist.errors import CollectiveError, ProtocolViolation

_HEADER: Final = struct.Struct("<IBBxxqQQ")
_MAGIC: Final = 0x32705250  # "PRp2"
_MOST_BYTES: Final = 1 << 48
HEADER_BYTES: Final = _HEADER.size


# The kinds of header.
MESSAGE: Final = 1
GOODBYE: Final = 2  # the sender destroyed its group on purpose
REFUSED: Final = 3


class Header(NamedTuple):
    """The header before a payload; `code` is `dtype_code` of the elements."""

    kind: int
    code: int
    tag: int
    sequence: int
    size_bytes: int

    def __str__(self) -> str:
        """Describes the payload for errors, e.g. "16 bytes of float32"."""
        return f"{self.size_bytes} bytes of {str(DTYPES[self.code]).removeprefix('torch.')}"


_KINDS: Final = frozenset({MESSAGE, GOODBYE, REFUSED})
_ITEM_BYTES: Final = tuple(dtype.itemsize for dtype in DTYPES)


pack_header: Final[Callable[[int, int, int, int, int], bytes]] = partial(_HEADER.pack, _MAGIC)
"""Returns the bytes of a header, from its fields in order. Raises `struct.error` for a tag of more than 64 bits."""


def unpack_header(data: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """Reads a header. Raises `ProtocolViolation` for anything that `pack_header` does not write."""
    magic, kind, code, tag, sequence, size_bytes = _HEADER.unpack_from(data, offset)
    if magic == _MAGIC and kind in _KINDS and code < len(DTYPES) and size_bytes <= _MOST_BYTES:
        if size_bytes % _ITEM_BYTES[code] == 0:
            return Header(kind, code, tag, sequence, size_bytes)
    raise ProtocolViolation(f"not a header: {bytes(data[offset : offset + HEADER_BYTES]).hex()}")


def refusal(expected: Header, refused: Header) -> bytes:
    expected = Header(REFUSED, expected.code, refused.tag, refused.sequence, expected.size_bytes)
    return pack_header(*expected) + pack_header(*refused)


def take_refusals(data: bytearray) -> list[tuple[Header, Header]]:
    """Removes the complete refusals from the bytes that came from a receiver.

    Returns:
        For each, the header that the receiver expected and the one that it refused.

    Raises:
        ProtocolViolation: the bytes are not refusals.
    """
    refusals = []
    while len(data) >= 2 * HEADER_BYTES:
        expected, refused = unpack_header(data), unpack_header(data, HEADER_BYTES)
        if expected.kind != REFUSED or refused.kind != MESSAGE:
            raise ProtocolViolation(f"not a refusal: {bytes(data[: 2 * HEADER_BYTES]).hex()}")
        refusals.append((expected, refused))
        del data[: 2 * HEADER_BYTES]
    return refusals


class Driver(Protocol):
    """Moves messages between sockets and requests."""

    def drive(self, mine: Request) -> None:
        """Moves messages on the calling thread until the request is done."""

    def ensure_progress(self) -> None:
        """Makes another thread move messages at once."""


class Request(Work):
    """The `Work` of a send or a receive. The messenger's lock guards the attributes that it adds to `Work`.

    Args:
        tensor: dense; read or written until the request is done.
        peer: the other rank in the group; None for any.

    Attributes:
        deadline_at: its deadline on the monotonic clock.
        error: the error with which it failed; set before `done`.
        source: the sender's rank, for a receive that has its message.
        done: no socket reads or writes the tensor any more. `settle` notifies the waiters later.
    """

    def __init__(
        self, title: object, tensor: torch.Tensor, peer: int | None, tag: int, timeout_s: float, driver: Driver
    ) -> None:
        super().__init__(title)
        self.tensor = tensor
        self.peer = peer
        self.tag = tag
        self.timeout_s = timeout_s
        self.deadline_at = time.monotonic() + self.timeout_s
        self.memory = memory_of(tensor)
        self.code = dtype_code(tensor.dtype)
        self._driver = driver
        self.error: BaseException | None = None
        self.source = -1
        self.done = False

    def header(self, sequence: int = 0) -> Header:
        return Header(MESSAGE, self.code, self.tag, sequence, len(self.memory))

    def settle(self) -> None:
        """Notifies all waiters. Call it once, when `done`, without the lock, as it runs callbacks of the user."""
        self._source = -1 if self.error else self.source
        self._finish(self.error)

    def _block(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            self._driver.drive(self)
        if not self._settled:
            super()._block(timeout_s)  # another thread may be about to settle it

    def _ensure_progress(self) -> None:
        self._driver.ensure_progress()


class PostedReceive(Request):
    """A receive; its message may be received directly into its tensor.

    Attributes:
        arrived: its message, if that arrived before the receive was posted.
        finish: called when the tensor holds the message, before the waiters are notified; may be None.
    """

    arrived: UnexpectedMessage | None = None
    finish: Callable[[], None] | None = None

    def settle(self) -> None:
        """See `Request.settle`; an error that `finish` raises is the error of the receive."""
        self._result = [self.tensor]
        try:
            if self.error is None and self.arrived is not None:
                copy_bytes(self.tensor.data_ptr(), self.arrived.tensor.data_ptr(), self.tensor.nbytes)
            if self.error is None and self.finish is not None:
                self.finish()
        except Exception as exc:
            self.error = exc
        except BaseException as exc:  # from a signal handler
            self.error = CollectiveError(self.title, f"it was interrupted by {type(exc).__name__} while it was copied")
            raise
        finally:
            super().settle()


@dataclass(eq=False, slots=True)
class UnexpectedMessage:
    """A message that arrived, completely or in part, before its receive was posted.

    Attributes:
        tensor: memory of the size that the header says; its pages become resident as they are filled.
    """

    source: int
    header: Header
    tensor: torch.Tensor

    @property
    def memory(self) -> memoryview:
        return memory_of(self.tensor)


Target = PostedReceive | UnexpectedMessage
