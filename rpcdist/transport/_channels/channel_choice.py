"""Which channels this process uses for its sessions: the variable `RPCDIST_CHANNELS`, and what the system has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from rpcdist.errors import ConfigError
from rpcdist.transport.unix_sockets import has_abstract_sockets

CHANNELS_VARIABLE: Final = "RPCDIST_CHANNELS"
_OVERFLOW_UID: Final = Path("/proc/sys/kernel/overflowuid")


class Channels(NamedTuple):
    """What sessions may run over; gRPC is always there.

    Attributes:
        local: Unix sockets, between processes of one user on one host.
        tcp: plain TCP connections.
    """

    local: bool
    tcp: bool


_CHOICES: Final = {
    "auto": Channels(local=True, tcp=True),
    "local": Channels(local=True, tcp=False),
    "tcp": Channels(local=False, tcp=True),
    "grpc": Channels(local=False, tcp=False),
}


def allowed_channels() -> Channels:
    """What `RPCDIST_CHANNELS` allows ("auto" by default), where this system has it.

    Raises:
        ConfigError: the variable has another value than there are.
    """
    text = os.environ.get(CHANNELS_VARIABLE, "auto")
    if text not in _CHOICES:
        raise ConfigError(f"{CHANNELS_VARIABLE} is 'auto', 'local', 'tcp' or 'grpc', not {text!r}")
    local, tcp = _CHOICES[text]
    return Channels(local and has_abstract_sockets() and not _looks_like_anybody(), tcp)


def _looks_like_anybody() -> bool:
    """Whether this user's number is the one that the kernel shows for all users from outside of a user namespace."""
    try:
        return int(_OVERFLOW_UID.read_text()) == os.getuid()
    except (OSError, ValueError):
        return False
