"""The ports that a process may listen at where it is free to choose, so that firewalls can be opened for them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from rpcdist.errors import ConfigError

T = TypeVar("T")

PORTS_VARIABLE: Final = "RPCDIST_PORTS"

_RANGE = re.compile(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?\Z")


class PortRange(NamedTuple):
    """Ports from `first` to `last`, both included. 0 to 0: whichever the system picks."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    @classmethod
    def of_text(cls, text: str, source: str) -> PortRange:
        """Out of "29600-29700" or "29600".

        Raises:
            ConfigError: it is something else; the text names the source.
        """
        match = _RANGE.match(text)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last < 2**16:
            raise ConfigError(f"{source} is a port or a range of ports such as '29600-29700', but it is {text[:80]!r}")
        return cls(first, last)

    @classmethod
    def of_environment(cls, ports: str | None = None) -> PortRange:
        """What an option says, or else `RPCDIST_PORTS`, or else any port. Raises `ConfigError`."""
        if ports is not None:
            return cls.of_text(ports, "ports")
        text = os.environ.get(PORTS_VARIABLE, "")
        return cls.of_text(text, PORTS_VARIABLE) if text.strip() else ANY_PORT

    def bind(self, bind: Callable[[int], T], source: str = PORTS_VARIABLE) -> T:
        """Binds the first port of the range that is free.

        Args:
            bind: binds one; raises `OSError` with `EADDRINUSE` if it is taken.
            source: where a longer range could be given, for the error.

        Raises:
            OSError: as `bind` does, `EADDRINUSE` if all are taken.
        """
        if self == ANY_PORT:
            return bind(0)
        for port in range(self.first, self.last + 1):
            try:
                return bind(port)
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE:
                    raise
        wanted = f"all ports of {self} are in use; give the processes of this host a longer range ({source})"
        raise OSError(errno.EADDRINUSE, wanted)


ANY_PORT: Final = PortRange(0, 0)
