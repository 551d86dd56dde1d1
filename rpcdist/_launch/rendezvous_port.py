"""The port at which the processes of a job find each other, kept from other programs while the job runs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rpcdist.errors import ConfigError

HOST: Final = "127.0.0.1"


@contextmanager
def held_port(port: int, host: str = HOST) -> Iterator[int]:
    """A port on which rank 0 can listen, and no other program meanwhile.

    Our socket is bound but does not listen. With SO_REUSEADDR on both sides, the kernel lets a second socket bind and
    listen there, which all servers for rendezvous do, torch's too. But it gives the port to no program that asks for
    any free port, and none that connects somewhere gets it as its own.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"master_port {port}: must be between 0 and 65535")
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((host, port))
        except OSError as exc:
            raise ConfigError(f"master_port {port}: {exc.strerror}") from exc
        yield holder.getsockname()[1]
