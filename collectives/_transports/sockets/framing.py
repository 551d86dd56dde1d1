"""The header before every message of a group, and the error when it is not the expected one."""

from __future__ import annotations

import struct
from typing import Final

from rpcdist.collectives._operations.operation import FINGERPRINT_BYTES, describe_fingerprint
from rpcdist.collectives._transports.transport_base import TransportMismatch

_MAGIC: Final = b"rpcC"
_HEADER: Final = struct.Struct(
    f"<4sIIQQ{FINGERPRINT_BYTES}s"
)  # magic, round, detail, sequence, payload bytes, fingerprint
HEADER_BYTES: Final = _HEADER.size


class OperationFrame:
    """Makes and compares the headers of one operation on one rank.

    Args:
        rank: this process's rank in the group, for errors.
        fingerprint: `Control.fingerprint`.
        sequence: `Control.sequence`.
        detail: a number that has to be equal on all ranks beside the fingerprint.
    """

    __slots__ = ("_detail", "_fingerprint", "_rank", "_sequence")

    def __init__(self, rank: int, fingerprint: bytes, sequence: int, detail: int) -> None:
        self._rank = rank
        self._fingerprint = fingerprint
        self._sequence = sequence
        self._detail = detail

    def header(self, round_number: int, size_bytes: int) -> bytes:
        """The header of a message, as it is sent and as its receiver expects it, byte for byte."""
        return _HEADER.pack(_MAGIC, round_number, self._detail, self._sequence, size_bytes, self._fingerprint)

    def mismatch(self, peer: int, expected: bytes, got: bytes) -> TransportMismatch:
        """The error for a header that differs."""
        mine, theirs = describe_fingerprint(self._fingerprint), self._describe(got)
        if mine == theirs:
            difference = _differences(_HEADER.unpack(expected), _HEADER.unpack(got))
            mine, theirs = f"{mine}{difference[0]}", f"{theirs}{difference[1]}"
        return TransportMismatch({self._rank: mine, peer: theirs})

    def _describe(self, got: bytes) -> str:
        fields = _HEADER.unpack(got)
        return describe_fingerprint(fields[5]) if fields[0] == _MAGIC else f"unreadable bytes {got[:16].hex()}"


def _differences(expected: tuple[object, ...], got: tuple[object, ...]) -> tuple[str, str]:
    """Describes in which field two headers with the same fingerprint differ: the expected value, the other value."""
    if expected[2] != got[2]:
        return f" with chunks {expected[2]:08x}", f" with chunks of other lengths {got[2]:08x}"
    if expected[4] != got[4]:
        return f" expecting {expected[4]} bytes", f" sending {got[4]} bytes"
    return f" at step {expected[3]}.{expected[1]}", f" at step {got[3]}.{got[1]}"
