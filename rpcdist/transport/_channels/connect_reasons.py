"""Why gRPC could not connect, in the words of a user: its own texts name its classes and repeat the address."""

from __future__ import annotations

import re
from typing import Final

_REASONS: Final = (
    ("Connection refused", "connection refused: no process listens there"),
    ("errors resolving", "the host name cannot be resolved; is it spelled right?"),
    ("is unreachable", "no route leads there; is it the right network?"),
    ("No route to host", "no route leads there; is it the right network, and does its firewall let this host in?"),
    ("parsing HTTP/2", "what answered is no rpcdist process"),
    ("http2 header with status", "what answered is no rpcdist process"),
    ("timed out", "no answer in time; is it the right address, and does its firewall let this host in?"),
    ("Socket closed", "the process there closed the connection; it may be ending"),
    ("reset by peer", "the process there closed the connection; it may be ending"),
)
"""What gRPC's text has, and what it means."""

_PREFIX: Final = re.compile(r"^failed to connect to all addresses; last error: ([A-Z_]+: )?(\w+:\S+: )?")

_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ufffd]")  # gRPC appends memory that nobody has set to some texts


def connect_reason(details: str) -> str:
    """What a connection failed with, from gRPC's text; the rest of that text where it is none of the usual ones."""
    for words, reason in _REASONS:
        if words in details:
            return reason
    return _UNPRINTABLE.split(_PREFIX.sub("", details), maxsplit=1)[0]
