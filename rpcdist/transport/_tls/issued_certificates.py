"""The certificates that a process issues itself, with the authority that the job token is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rpcdist.ids import Identity
from rpcdist.transport._tls.certificate import Certificate

if TYPE_CHECKING:
    from rpcdist.transport._tls.job_authority import JobAuthority


class IssuedCertificates:
    """Issues a certificate when it is first asked for, and again when its time or the process's name has changed.

    See `CertificateSource`.

    Args:
        token: the job token.
        job: the job's name.
        owner: returns who the process is at present.
    """

    def __init__(self, token: bytes, job: str, owner: Callable[[], Identity]) -> None:
        self._token = token
        self._job = job
        self._owner = owner
        self._authority: JobAuthority | None = None
        self._current: tuple[Identity, Certificate] | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<IssuedCertificates {self._current}>"

    def current(self) -> Certificate:
        """What is to be shown now."""
        with self._lock:
            owner = self._owner()
            if self._current is None or self._current[0] != owner or datetime.now(UTC) >= self._current[1].renew_at:
                self._current = owner, self._issue(owner)
            return self._current[1]

    def _issue(self, owner: Identity) -> Certificate:
        if self._authority is None:
            from rpcdist.transport._tls.job_authority import JobAuthority

            self._authority = JobAuthority(self._token)
        return self._authority.issue(owner, self._job)
