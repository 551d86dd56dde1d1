"""Signed records: what the processes of a job tell each other through a store, such as where they listen.

A store proves nothing about who wrote a value: torchrun's own takes writes from everybody who reaches its port. So
whoever is to be believed signs the record, over the job, the key and the value, with a key that is derived from the job
token.
"""

from __future__ import annotations

import hmac
from typing import Final

from rpcdist.errors import AuthenticationFailed
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.keys import mac

_MARK: Final = b"rpcdist-record-1:"
_HEX_CHARS: Final = 64
_STRANGER: Final = (
    "somebody else writes to it. Nothing was sent to the address in it. Let only the machines of the job reach the "
    "store (MASTER_PORT), and start the job again"
)


class Records:
    """Signs and verifies the records of one job. Any thread may use it.

    Args:
        credentials: with the job's token and name.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._key = mac(credentials.token, b"rpcdist record key")  # the token itself signs handshakes alone
        self._job = credentials.job
        self._token_source = credentials.token_source or "the job token of this process"

    def __repr__(self) -> str:
        return f"<Records of job {self._job!r}>"

    def sign(self, key: str, value: bytes) -> bytes:
        """The record to store.

        Args:
            key: the whole key, with all prefixes: a record counts nowhere else.
            value: what is to be believed.
        """
        return _MARK + self._proof(key, value) + b":" + value

    def verify(self, key: str, record: bytes, place: str) -> bytes:
        """The value of a record that a process of this job has signed.

        Args:
            key: the whole key, as for `sign`.
            record: what the store has.
            place: names the store in the error.

        Raises:
            AuthenticationFailed: the record is not signed, or not with this job's token, for this job and this key.
        """
        text = f"the record {key!r} in the store at {place} "
        proof, colon, value = record[len(_MARK) :].partition(b":")
        if not record.startswith(_MARK) or not colon or len(proof) != _HEX_CHARS:
            raise AuthenticationFailed(
                f"{text}is not signed: a process with another version of rpcdist wrote it, or {_STRANGER}"
            )
        if not hmac.compare_digest(proof, self._proof(key, value)):
            raise AuthenticationFailed(
                f"{text}was not signed by a process of job {self._job!r} with the same token. This process uses "
                f"{self._token_source}: give every process the same RPCDIST_TOKEN (or a copy of the token file) and "
                f"RPCDIST_JOB. If they are the same, {_STRANGER}"
            )
        return value

    def _proof(self, key: str, value: bytes) -> bytes:
        return mac(self._key, b"rpcdist record", self._job.encode(), key.encode(), value).hex().encode()
