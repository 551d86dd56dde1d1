"""The TLS policy of a process: its mode, its certificate files, and the networks in which plain connections are
allowed.

gRPC's port always uses TLS, unless TLS is off. Raw TCP connections use it beyond loopback and trusted networks. Each
side of a raw connection decides for itself: a side that requires TLS refuses plain connections, and a side that does
not accepts both.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Final, Literal, cast

from rpcdist.errors import ConfigError
from rpcdist.transport._tls.certificate import PEER_NAME
from rpcdist.transport.addresses import is_loopback, literal

TLS_VARIABLE: Final = "RPCDIST_TLS"
TRUSTED_NETWORKS_VARIABLE: Final = "RPCDIST_TRUSTED_NETWORKS"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Your own certificates. Besides the job token, peers then need one from your authority that names their worker.

    If the files are replaced while the process runs, the next connection uses the new ones. The key is an RSA key (2048
    bits or more) or an EC key (P-256, P-384 or P-521), without a password.

    Attributes:
        certificate: PEM file with this worker's certificate, which intermediate ones may follow. It names the worker as
            `rpcdist://JOB/WORKER` (a URI), or else as its common name or one of its DNS names; it may name several.
        key: PEM file with the private key of that certificate.
        authority: PEM file with the certificates of the authorities that sign the peers' certificates.
        server_name: a DNS name that all certificates of the job have in addition: gRPC verifies it.
    """

    certificate: str | PathLike[str]
    key: str | PathLike[str]
    authority: str | PathLike[str]
    server_name: str = PEER_NAME

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "authority"):  # as plain text, so that equal options compare equal
            file = getattr(self, name)
            if not isinstance(file, (str, PathLike)):
                raise TypeError(f"TlsOptions: {name} must be the path of a PEM file, but it is a {type(file).__name__}")
            object.__setattr__(self, name, os.path.abspath(fspath(file)))

    def __str__(self) -> str:
        return f"the certificate {self.certificate} and the authority {self.authority}"

    @classmethod
    def of_words(cls, words: Sequence[str]) -> TlsOptions:
        """Parses the files in `RPCDIST_TLS`: `certificate=...`, `key=...`, `authority=...`, and optionally
        `server_name=...`.

        Raises:
            ConfigError: a file is missing, or a word is unknown.
        """
        given = dict(word.partition("=")[::2] for word in words)
        missing = [name for name in ("certificate", "key", "authority") if not given.get(name)]
        if missing:
            raise ConfigError(
                f"your own certificates are written {TLS_VARIABLE}=certificate=FILE,key=FILE,authority=FILE, but "
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
            )
        try:
            return cls(**given)
        except TypeError as exc:
            raise ConfigError(f"{TLS_VARIABLE} has certificate files and an unknown word: {exc}") from None


TlsMode = Literal["auto", "always", "off"]
"""The modes that `RPCDIST_TLS` can name: "auto" encrypts gRPC always, and raw TCP connections beyond loopback and
trusted networks; "always" encrypts raw TCP connections everywhere, too; "off" encrypts nothing, and allows only
loopback and trusted networks."""


@dataclass(frozen=True)
class TlsPolicy:
    """Decides which connections are encrypted.

    Attributes:
        mode: see `TlsMode`.
        trusted_networks: networks in which plain connections are allowed, as on loopback.
        files: the process's own certificates; None for certificates made from the job token.
    """

    mode: TlsMode = "auto"
    trusted_networks: tuple[Network, ...] = ()
    files: TlsOptions | None = None

    @classmethod
    def of_environment(cls, tls: bool | TlsOptions | None = None) -> TlsPolicy:
        """The policy of `RPCDIST_TLS` (a mode, certificate files, or both, with commas) and `RPCDIST_TRUSTED_NETWORKS`.

        Args:
            tls: an option that overrides the variable: False means "off", and True means "auto" if the variable is
                "off". Certificate files replace those of the variable, and imply True.

        Raises:
            ConfigError: a variable has an invalid value, or there are certificate files, and TLS is off.
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
        if text not in ("auto", "always", "off"):
            why = f"{TLS_VARIABLE} must be 'auto', 'always' or 'off', or name certificate files, but it is {text!r}"
            raise ConfigError(why)
        if files is not None and text == "off":
            raise ConfigError(f"TLS is off, so {files} would have no effect. Remove one of the two settings")
        return cls(cast(TlsMode, text), _networks(os.environ.get(TRUSTED_NETWORKS_VARIABLE, "")), files)

    @property
    def encrypts_grpc(self) -> bool:
        """Whether gRPC's port speaks TLS; the same in every process of a job."""
        return self.mode != "off"

    def encrypts_raw(self, host: str) -> bool:
        """Whether a raw TCP connection with the address `host` must be encrypted."""
        return self.mode == "always" or not self.trusts(host)

    def trusts(self, host: str) -> bool:
        """Whether plain connections with an address are allowed; names other than "localhost" are not resolved."""
        if is_loopback(host):
            return True
        address = literal(host)
        return address is not None and any(address in network for network in self.trusted_networks)

    def plain_beyond_loopback(self, host: str) -> str | None:
        """A warning about the unencrypted connections of a process that serves `host`; None if there are none."""
        if is_loopback(host) or self.encrypts_raw(host):
            return None
        what = "nothing is" if self.mode == "off" else "raw connections are not"
        networks = ", ".join(map(str, self.trusted_networks))
        return f"{what} encrypted between {host} and the trusted networks: {networks}"

    async def check_plain(self, host: str) -> None:
        """Raises `ConfigError` if TLS is off, and `host` is, or resolves to, an address that is not trusted."""
        if self.mode != "off" or self.trusts(host):
            return
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            found = []  # an unknown name is reported by the attempt to connect to it
        strange = [str(entry[4][0]) for entry in found if not self.trusts(str(entry[4][0]))]
        if strange:
            raise ConfigError(
                f"TLS is off, but {strange[0]} is neither on loopback nor in a trusted network: data sent there could "
                f"be read and changed in transit. Turn TLS on (remove {TLS_VARIABLE}=off and RpcOptions(tls=False)), "
                f"or declare the network trusted, such as {TRUSTED_NETWORKS_VARIABLE}=10.0.0.0/8."
            )


def _networks(text: str) -> tuple[Network, ...]:
    networks = []
    for part in filter(None, (word.strip() for word in text.split(","))):
        try:
            networks.append(ipaddress.ip_network(part))
        except ValueError as exc:
            raise ConfigError(
                f"{TRUSTED_NETWORKS_VARIABLE} must be a list of networks such as '10.0.0.0/8,fd00::/8', but contains "
                f"{part!r} ({exc})"
            ) from None
    return tuple(networks)
