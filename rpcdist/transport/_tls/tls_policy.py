"""Which connections of a process are encrypted, with which certificates: its mode, files, and trusted networks.

gRPC's port speaks TLS, always, unless TLS is off. Raw TCP connections do beyond loopback and trusted networks. The two
sides of a raw connection decide each for itself: one that wants TLS speaks nothing else, one that does not takes both.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from os import PathLike, fspath
from typing import Final

from rpcdist.errors import ConfigError
from rpcdist.transport._tls.certificate import PEER_NAME
from rpcdist.transport.addresses import is_loopback

TLS_VARIABLE: Final = "RPCDIST_TLS"
TRUSTED_NETWORKS_VARIABLE: Final = "RPCDIST_TRUSTED_NETWORKS"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Certificates of your own: peers need one of your authority, with the name of their worker, beside the job token.

    Files that are replaced while the process runs count from the next connection on. The key is of RSA (2048 bits or
    more) or of the curves P-256, P-384 or P-521, and has no password.

    Attributes:
        certificate: PEM file with this worker's certificate, perhaps followed by intermediate ones. It names the worker
            as `rpcdist://JOB/WORKER` (a URI), or else as its common name or one of its DNS names; it may name several.
        key: PEM file with the private key of that certificate.
        authority: PEM file with the certificates by which those of the peers must be signed.
        server_name: a DNS name that all certificates of the job have, beside those of their workers: gRPC asks for one.
    """

    certificate: str | PathLike[str]
    key: str | PathLike[str]
    authority: str | PathLike[str]
    server_name: str = PEER_NAME

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "authority"):  # plain texts, so that equal options compare equal
            file = getattr(self, name)
            if not isinstance(file, (str, PathLike)):
                raise TypeError(f"TlsOptions: {name} is the path of a PEM file, but got a {type(file).__name__}")
            object.__setattr__(self, name, os.path.abspath(fspath(file)))

    def __str__(self) -> str:
        return f"the certificate {self.certificate} and the authority {self.authority}"

    @classmethod
    def of_words(cls, words: Sequence[str]) -> TlsOptions:
        """The files that `RPCDIST_TLS` names: `certificate=...`, `key=...`, `authority=...`, perhaps `server_name=...`.

        Raises:
            ConfigError: a file is missing, or a word means nothing.
        """
        given = dict(word.partition("=")[::2] for word in words)
        missing = [name for name in ("certificate", "key", "authority") if not given.get(name)]
        if missing:
            raise ConfigError(
                f"certificates of your own are written {TLS_VARIABLE}=certificate=FILE,key=FILE,authority=FILE, but "
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
            )
        try:
            return cls(**given)
        except TypeError as exc:
            raise ConfigError(f"{TLS_VARIABLE} has a word that means nothing beside certificate files: {exc}") from None


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
