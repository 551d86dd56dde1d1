"""How the address of a socket hub is written."""

from __future__ import annotations

from dataclasses import dataclass

from rpcdist.errors import ConfigError
from rpcdist.transport.addresses import join_address, split_address


@dataclass(frozen=True, slots=True)
class HubAddress:
    """Where a hub listens.

    Attributes:
        host: host of the TCP listener.
        port: port of the TCP listener.
        unix_name: name of the abstract Unix listener, without the leading zero byte; empty where there is none.
        taker: which hub of the process is meant; they share the listeners.
    """

    host: str
    port: int
    unix_name: str = ""
    taker: str = ""

    def __str__(self) -> str:
        tcp = f"{join_address(self.host, self.port)}/{self.taker}"
        return f"{tcp},@{self.unix_name}" if self.unix_name else tcp

    @classmethod
    def parse(cls, text: str) -> HubAddress:
        """The inverse of `str`. Raises `ConfigError` for anything else."""
        tcp, comma, unix = text.partition(",")
        address, slash, taker = tcp.partition("/")
        if not slash or (comma and (len(unix) < 2 or not unix.startswith("@") or len(unix) > 100)):
            raise ConfigError(f"a hub's address is written host:port/hub or host:port/hub,@name, not {text[:200]!r}")
        return cls(*split_address(address), unix[1:], taker)
