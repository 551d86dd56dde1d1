"""Local addresses and ports to listen on, and the written form of addresses.

A process listens on loopback if its coordinator does, otherwise on the one address from which it reaches the
coordinator. It listens on all interfaces only if it is configured to.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import logging
import os
import re
import socket
import struct
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from rpcdist.errors import ConfigError, TransportError
from rpcdist.own_shortage import own_shortage

logger = logging.getLogger(__name__)

_HOST_VARIABLE = "RPCDIST_HOST"
_SIOCGIFADDR = 0x8915
_DISCARD_PORT = 9  # nothing is sent there; connecting a datagram socket only looks up the route


def split_address(address: str) -> tuple[str, int]:
    """Splits "host:port" or "[v6]:port".

    Raises:
        ConfigError: the text has another form, or the port is not within 0 to 65535.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not host or (":" in host) != bracketed:
        raise ConfigError(f"an address is written host:port, or [host]:port for IPv6, but it is {address!r}")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"the port in {address!r} is not a number from 0 to 65535")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True for "localhost" and for loopback addresses; other names are not resolved."""
    address = literal(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def host_from_environment(variable_of_torch: str) -> str | None:
    """The address to listen on that the environment names, or None.

    `RPCDIST_HOST` is an address or an interface; torch's variable names an interface.

    Raises:
        ConfigError: the interface does not exist, or has no IPv4 address; or the name has no address.
    """
    if explicit := os.environ.get(_HOST_VARIABLE):
        if any(explicit == name for _, name in socket.if_nameindex()):
            return _interface_address(_HOST_VARIABLE, explicit)
        if literal(explicit) is None:
            try:
                socket.getaddrinfo(explicit, None)
            except (OSError, UnicodeError) as exc:
                known = ", ".join(name for _, name in socket.if_nameindex())
                text = f"{_HOST_VARIABLE}={explicit!r} is neither an address nor an interface; interfaces are {known}"
                raise ConfigError(text) from exc
        return explicit
    name = os.environ.get(variable_of_torch)
    return _interface_address(variable_of_torch, name) if name else None


def _interface_address(variable: str, name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError as exc:
            known = ", ".join(interface for _, interface in socket.if_nameindex())
            raise ConfigError(f"{variable}={name!r}: no IPv4 address ({exc.strerror}); interfaces are {known}") from exc


def pick_bind_host(coordinator_host: str, explicit: str | None = None) -> str:
    """Chooses a local address to listen on that the coordinator and the peers can reach.

    It may block while a name is resolved, so do not call it on an event loop. It sends no packet to the coordinator.

    Args:
        coordinator_host: name or address of the coordinator (`MASTER_ADDR`).
        explicit: an address to listen on, given by the user; returned unchanged.

    Returns:
        An address; the coordinator's own if that is on loopback.

    Raises:
        ConfigError: the name is unknown, or no interface leads to it.
        TransportError: this process has no free descriptor for the check.
    """
    if explicit:
        return explicit.strip("[]")
    reasons = []
    for family, host in _resolve(coordinator_host.strip("[]")):
        try:
            return _source_address(family, host)
        except OSError as exc:
            _refuse_if_short(exc)
            reasons.append(f"{host}: {exc.strerror or exc}")
    raise ConfigError(
        f"no network interface of this machine leads to the coordinator {coordinator_host!r} ({'; '.join(reasons)}). "
        "Check MASTER_ADDR, or set the address to listen on (RpcOptions(host=...))."
    )


def why_not_here(host: str, exc: OSError) -> str:
    """Why this process cannot listen on a port of a host, for the text of an error, and what to do."""
    reason = exc.strerror or str(exc)
    if isinstance(exc, socket.gaierror):
        return f"this host cannot resolve the name {host!r} ({reason}). Check MASTER_ADDR or the init_method"
    if exc.errno == errno.EACCES:
        return f"{reason}. Choose a port above 1023 (MASTER_PORT, or RpcOptions(port=...))"
    if exc.errno == errno.EADDRINUSE:
        return f"{reason}. Choose another port (MASTER_PORT, or RpcOptions(port=...)), or end the process that uses it"
    if exc.errno == errno.EADDRNOTAVAIL:
        reason += ". This machine has no such address: start rank 0 on the machine that MASTER_ADDR names"
        return f"{reason}, and check {_HOST_VARIABLE} if it is set"
    return reason


def _refuse_if_short(exc: Exception) -> None:
    if (shortage := own_shortage(exc)) is not None:
        raise TransportError(f"cannot choose an address to listen on: {shortage}") from exc


def literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` spells, without brackets and zone, and with IPv4 unwrapped from IPv6; None if it is a
    name.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _resolve(host: str) -> list[tuple[int, str]]:
    """Family and address of all addresses of the name, IPv4 first: most servers of a name with both listen there."""
    name = host.encode() if host.isascii() else host  # with a `str`, Python would import the tables of its IDNA codec
    try:
        found = socket.getaddrinfo(name, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as exc:
        _refuse_if_short(exc)
        raise ConfigError(
            f"the coordinator's host name {host!r} cannot be resolved on this machine ({exc}). Check MASTER_ADDR, or "
            "set it to an IP address."
        ) from exc
    addresses = [(int(entry[0]), str(entry[4][0])) for entry in found]
    if not is_loopback(host) and all(is_loopback(address) for _, address in addresses):
        logger.info("%r resolves to loopback on this machine, so peers on other machines will not reach it", host)
    return sorted(addresses, key=lambda entry: entry[0] != socket.AF_INET)


def _source_address(family: int, destination: str) -> str:
    """The local address from which packets to `destination` would leave."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((destination, _DISCARD_PORT))
        if is_loopback(destination):
            # Debian resolves the host's own name to 127.0.1.1, but packets to it leave from 127.0.0.1. The coordinator
            # must listen on the address to which the workers connect.
            return destination
        source = str(probe.getsockname()[0])
    if ipaddress.ip_address(source.partition("%")[0]).is_unspecified:
        raise OSError(f"the route has no source address ({source})")
    return source


# ---------------------------------------------------------------- ports for which firewalls can be opened

T = TypeVar("T")

PORTS_VARIABLE: Final = "RPCDIST_PORTS"

_RANGE = re.compile(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?\Z")


class PortRange(NamedTuple):
    """Ports from `first` to `last`, both included. 0 to 0 means any port that the system chooses."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    @classmethod
    def of_text(cls, text: str, source: str) -> PortRange:
        """Parses "29600-29700" or "29600".

        Raises:
            ConfigError: the text has another form; the message names the source.
        """
        match = _RANGE.match(text)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last < 2**16:
            why = f"{source} must be a port or a range of ports such as '29600-29700', but it is {text[:80]!r}"
            raise ConfigError(why)
        return cls(first, last)

    @classmethod
    def of_environment(cls, ports: str | None = None) -> PortRange:
        """The range of an option, or of `RPCDIST_PORTS`, or any port. Raises `ConfigError`."""
        if ports is not None:
            return cls.of_text(ports, "ports")
        text = os.environ.get(PORTS_VARIABLE, "")
        return cls.of_text(text, PORTS_VARIABLE) if text.strip() else ANY_PORT

    def bind(self, bind: Callable[[int], T], source: str = PORTS_VARIABLE) -> T:
        """Binds the first port of the range that is free.

        Args:
            bind: binds a port; raises `OSError` with `EADDRINUSE` if it is in use.
            source: the option or variable of the range, for the error.

        Raises:
            OSError: from `bind`; `EADDRINUSE` if all ports are in use.
        """
        if self == ANY_PORT:
            return bind(0)
        for port in range(self.first, self.last + 1):
            try:
                return bind(port)
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE:
                    raise
        wanted = f"all ports of {self} are in use. Set {source} to a larger range for the processes of this host"
        raise OSError(errno.EADDRINUSE, wanted)


ANY_PORT: Final = PortRange(0, 0)
