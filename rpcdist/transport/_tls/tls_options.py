"""Which certificate files of one's own a process shows, in place of the certificates that the job token vouches for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Final

from rpcdist.errors import ConfigError
from rpcdist.transport._tls.certificate import PEER_NAME

TLS_VARIABLE: Final = "RPCDIST_TLS"


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
