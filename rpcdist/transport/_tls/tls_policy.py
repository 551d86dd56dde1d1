"""Which connections of a process are encrypted: its mode, and the networks that were declared trusted.

gRPC's port speaks TLS, always, unless TLS is off. Raw TCP connections do beyond loopback and trusted networks. The two
sides of a raw connection decide each for itself: one that wants TLS speaks nothing else, one that does not takes both.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from dataclasses import dataclass
from enum import Enum
from typing import Final

from rpcdist.errors import ConfigError
from rpcdist.transport._tls.tls_options import TLS_VARIABLE, TlsOptions
from rpcdist.transport.addresses import is_loopback

TRUSTED_NETWORKS_VARIABLE: Final = "RPCDIST_TRUSTED_NETWORKS"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class TlsMode(Enum):
    """What the variable `RPCDIST_TLS` can say."""

    AUTO = "auto"
    """gRPC always, raw TCP connections beyond loopback and trusted networks."""

    ALWAYS = "always"
    """Raw TCP connections everywhere, too."""

    OFF = "off"
    """Nothing is encrypted, and only loopback and trusted networks are used."""


@dataclass(frozen=True, repr=False)
class TlsPolicy:
    """Says which connections are encrypted.

    Attributes:
        mode: see there.
        trusted_networks: where plain connections are allowed, beside loopback.
        files: certificates of one's own; None: those that the job token vouches for.
    """

    mode: TlsMode = TlsMode.AUTO
    trusted_networks: tuple[Network, ...] = ()
    files: TlsOptions | None = None

    def __repr__(self) -> str:
        return f"<TlsPolicy {self.mode.value} [trusted: {', '.join(map(str, self.trusted_networks)) or 'loopback'}]>"

    @classmethod
    def of_environment(cls, tls: bool | TlsOptions | None = None) -> TlsPolicy:
        """What `RPCDIST_TLS` (a mode, certificate files, or both, with commas) and `RPCDIST_TRUSTED_NETWORKS` say.

        Args:
            tls: an option's word: False is "off" whatever the variable says, and True "auto" where that says "off".
                Certificate files count instead of those that the variable names, and mean True.

        Raises:
            ConfigError: a variable cannot be understood, or there are certificate files, and TLS is off.
        """
        first, *words = os.environ.get(TLS_VARIABLE, "").split(",")
        text = first or "auto"
        if "=" in first:
            text, words = "auto", [first, *words]
        files = TlsOptions.of_words(words) if words else None
        if isinstance(tls, TlsOptions):
            files, tls = tls, True
        if tls is not None and (text == "off") == tls:
            text = "auto" if tls else "off"
        try:
            mode = TlsMode(text)
        except ValueError:
            raise ConfigError(
                f"{TLS_VARIABLE} is 'auto', 'always' or 'off', perhaps with certificate files, not {text!r}"
            ) from None
        if files is not None and mode is TlsMode.OFF:
            raise ConfigError(f"TLS is off, and {files} would do nothing: leave one of the two out")
        return cls(mode, _networks(os.environ.get(TRUSTED_NETWORKS_VARIABLE, "")), files)

    @property
    def encrypts_grpc(self) -> bool:
        """Whether gRPC's port speaks TLS; the same in every process of a job."""
        return self.mode is not TlsMode.OFF

    def encrypts_raw(self, host: str) -> bool:
        """Whether a raw TCP connection with the address `host` must be encrypted."""
        return self.mode is TlsMode.ALWAYS or not self.trusts(host)

    def trusts(self, host: str) -> bool:
        """Whether plain connections with an address are allowed; names other than "localhost" are not resolved."""
        if is_loopback(host):
            return True
        try:
            address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
        except ValueError:
            return False
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return any((mapped or address) in network for network in self.trusted_networks)

    def plain_beyond_loopback(self, host: str) -> str | None:
        """What is not encrypted of a process that serves `host`; None if everything is, or stays on the machine."""
        if is_loopback(host) or self.encrypts_raw(host):
            return None
        what = "nothing is" if self.mode is TlsMode.OFF else "raw connections are not"
        networks = ", ".join(map(str, self.trusted_networks))
        return f"{what} encrypted between {host} and the networks that are declared trusted: {networks}"

    async def check_plain(self, host: str) -> None:
        """Raises `ConfigError` if TLS is off, and `host` is or stands for an address that is not trusted."""
        if self.mode is not TlsMode.OFF or self.trusts(host):
            return
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            found = []  # an unknown name is told by whoever connects to it
        strange = [str(entry[4][0]) for entry in found if not self.trusts(str(entry[4][0]))]
        if strange:
            raise ConfigError(
                f"TLS is off, and {strange[0]} is neither on loopback nor in a trusted network: everything that is "
                f"sent there could be read and changed on its way. Leave {TLS_VARIABLE} and RpcOptions(tls=False) "
                f"out, or declare the network trusted, such as {TRUSTED_NETWORKS_VARIABLE}=10.0.0.0/8."
            )


def _networks(text: str) -> tuple[Network, ...]:
    networks = []
    for part in filter(None, (word.strip() for word in text.split(","))):
        try:
            networks.append(ipaddress.ip_network(part))
        except ValueError as exc:
            raise ConfigError(
                f"{TRUSTED_NETWORKS_VARIABLE} is a list of networks such as '10.0.0.0/8,fd00::/8', but one of it is "
                f"{part!r} ({exc})"
            ) from None
    return tuple(networks)
