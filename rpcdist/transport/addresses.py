"""Which local address to listen on, and how addresses are written.

A process listens on loopback when its coordinator is there, or else on the one address from which it reaches the
coordinator: never on all interfaces unless told so.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import struct

from rpcdist.errors import ConfigError, TransportError
from rpcdist.own_shortage import own_shortage

logger = logging.getLogger(__name__)

_HOST_VARIABLE = "RPCDIST_HOST"
_INTERFACE_VARIABLE = "RPCDIST_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_DISCARD_PORT = 9  # nothing is sent there; connecting a datagram socket only looks up the route


def split_address(address: str) -> tuple[str, int]:
    """Takes "host:port" or "[v6]:port" apart.

    Raises:
        ConfigError: it is not written like that, or the port is not within 0 to 65535.
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
    """True for "localhost" and for addresses that never leave the machine; other names are not resolved."""
    address = _literal(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def host_from_environment(variable_of_torch: str) -> str | None:
    """The address to listen on, where the environment names one.

    It is `RPCDIST_HOST` (an address), or the address of the interface that `RPCDIST_SOCKET_IFNAME` or torch's variable
    names.

    Raises:
        ConfigError: the interface does not exist, or has no IPv4 address.
    """
    if explicit := os.environ.get(_HOST_VARIABLE):
        return explicit
    for variable in (_INTERFACE_VARIABLE, variable_of_torch):
        if name := os.environ.get(variable):
            return _interface_address(variable, name)
    return None


def _interface_address(variable: str, name: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError as exc:
            known = ", ".join(interface for _, interface in socket.if_nameindex())
            raise ConfigError(f"{variable}={name!r}: no IPv4 address ({exc.strerror}); interfaces are {known}") from exc


def pick_bind_host(coordinator_host: str, explicit: str | None = None) -> str:
    """Chooses the address to listen on, such that the coordinator and its peers can reach it.

    May block while a name is resolved, so do not call it on an event loop. No packet goes to the coordinator.

    Args:
        coordinator_host: name or address of the coordinator (`MASTER_ADDR`).
        explicit: an address to listen on, given by the user; returned as it is.

    Returns:
        An address; the coordinator's own when that is on loopback.

    Raises:
        ConfigError: the name is unknown, or no interface leads there.
        TransportError: this process has no descriptor to find that out.
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
        "Check MASTER_ADDR, or name the address to listen on (RpcOptions(host=...))."
    )


def _refuse_if_short(exc: Exception) -> None:
    if (shortage := own_shortage(exc)) is not None:
        raise TransportError(f"no address to listen on can be chosen: {shortage}") from exc


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` spells, IPv4 also where it is wrapped into IPv6; None if it is a name."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _resolve(host: str) -> list[tuple[int, str]]:
    """Family and address of all that the name stands for, IPv4 first: a name with both is most likely served there."""
    try:
        found = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as exc:
        _refuse_if_short(exc)
        raise ConfigError(
            f"the coordinator's host name {host!r} is unknown on this machine ({exc}). Check MASTER_ADDR, or write its "
            "IP address."
        ) from exc
    addresses = [(int(entry[0]), str(entry[4][0])) for entry in found]
    if not is_loopback(host) and all(is_loopback(address) for _, address in addresses):
        logger.info("%r is on loopback according to this machine; peers on others will not reach it", host)
    return sorted(addresses, key=lambda entry: entry[0] != socket.AF_INET)


def _source_address(family: int, destination: str) -> str:
    """The local address from which packets to `destination` would leave."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((destination, _DISCARD_PORT))
        if is_loopback(destination):
            # Debian resolves the host's own name to 127.0.1.1, and packets there leave from 127.0.0.1. The coordinator
            # must listen where the others look for it.
            return destination
        source = str(probe.getsockname()[0])
    if ipaddress.ip_address(source.partition("%")[0]).is_unspecified:
        raise OSError(f"the route has no source address ({source})")
    return source
