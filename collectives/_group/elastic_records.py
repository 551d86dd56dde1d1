"""Records of the processes of an elastic group in the store: all of them signed, and checked when read.

The signature proves the writer. It does not prove that a record makes sense: a process of the job may be of another
version, or broken. Either is an error that names the record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final, TypeVar

from rpcdist.collectives._group.elastic_rounds import Candidate, ClosedRound
from rpcdist.collectives._stores.signed_records import SignedRecords
from rpcdist.collectives._stores.store_base import Store
from rpcdist.errors import AuthenticationFailed, RendezvousError
from rpcdist.transport.credentials import Records

T = TypeVar("T")

MAX_PROCESSES: Final = 4096
"""So many may want to be in one group."""
_MAX_CANDIDATE_CHARS: Final = 16 * 1024
_ENDED: Final = "ended"


class ElasticRecords:
    """Any thread may use it.

    Raises (whatever reads):
        AuthenticationFailed: somebody who is no process of the job wrote to the store.
        RendezvousError: a process of the job wrote what makes no sense.
        DistStoreError: the store is gone.
    """

    def __init__(self, store: Store, records: Records) -> None:
        self._store = store
        self._records = records
        self._signed = SignedRecords(store, records)

    # ------------------------------------------------------------ rounds

    def first_open_round(self, after: int) -> int:
        """The first round with a greater number that nobody has closed; rounds are closed in their order.

        Asks a number of times that grows with the logarithm of the rounds that were missed.
        """
        closed, step = after, 1
        while self.is_closed(closed + step):
            closed, step = closed + step, 2 * step
        while step > 1:
            step //= 2
            if self.is_closed(closed + step):
                closed += step
        return closed + 1

    def is_closed(self, number: int) -> bool:
        return self._store.check([f"{number}/closed"])

    def wait_until_closed(self, number: int, timeout_s: float) -> None:
        """Raises `StoreTimeout` when the time is over."""
        self._store.wait([f"{number}/closed"], timeout_s)

    def closed_round(self, number: int) -> ClosedRound:
        """The outcome of a round that is closed."""
        size = MAX_PROCESSES * _MAX_CANDIDATE_CHARS
        return self._read([f"{number}/closed"], size, ClosedRound.from_json)[0]

    def close_round(self, number: int, outcome: ClosedRound) -> ClosedRound:
        """Writes the outcome down, unless somebody was faster; returns the one that counts."""
        key = f"{number}/closed"
        self._store.compare_set(key, b"", self._records.sign(self._store.full_key(key), outcome.to_json().encode()))
        return self.closed_round(number)

    # ------------------------------------------------------------ candidates

    def register(self, number: int, own: Candidate) -> None:
        """Asks to be in a round. A process that dies before the last line of this has not come."""
        self._signed.set(f"{number}/candidate/{own.identity}", json.dumps(asdict(own)))
        self._store.append(f"{number}/came", f"{own.identity} ")

    def somebody_came(self, number: int) -> bool:
        return self._store.check([f"{number}/came"])

    def candidates(self, number: int, own: Candidate) -> list[Candidate]:
        """Those who have come to a round, in their order; `own` has come."""
        names = self._store.get(f"{number}/came") if self.somebody_came(number) else b""
        came = list(dict.fromkeys(names[: MAX_PROCESSES * 64].decode(errors="replace").split()))
        if len(came) > MAX_PROCESSES:
            raise RendezvousError(f"more than {MAX_PROCESSES} processes want to be in round {number} {self._where()}")
        keys = [f"{number}/candidate/{identity}" for identity in came]
        if own.identity not in came or not self._store.check(keys):  # written before the list
            raise AuthenticationFailed(
                f"the list {self._store.full_key(f'{number}/came')!r} of who has come, {self._where()}, was changed by "
                "somebody else. Let only the machines of the job reach the store, and start the job again"
            )
        found = self._read(keys, _MAX_CANDIDATE_CHARS, Candidate.from_json)
        for identity, candidate in zip(came, found, strict=True):
            if candidate.identity != identity:
                raise RendezvousError(f"process {candidate.identity} wrote the record of {identity} {self._where()}")
        return found

    # ------------------------------------------------------------ the end

    def leave(self, identity: str) -> None:
        """Says that a process leaves, so that nobody waits for it."""
        self._signed.set(f"gone/{identity}", "left")

    def has_left(self, identity: str) -> bool:
        return self._says(f"gone/{identity}")

    def end(self) -> None:
        """Says that the job has finished."""
        self._signed.set(_ENDED, "ended")

    def has_ended(self) -> bool:
        return self._says(_ENDED)

    # ------------------------------------------------------------ inside

    def _says(self, key: str) -> bool:
        """Whether the record is there; its signature is what counts of it."""
        if not self._store.check([key]):
            return False
        self._signed.get([key])
        return True

    def _read(self, keys: Sequence[str], max_chars: int, parse: Callable[[str], T]) -> list[T]:
        found = []
        for key, text in zip(keys, self._signed.get(keys), strict=True):
            try:
                if len(text) > max_chars:
                    raise ValueError(f"it has {len(text)} characters, and at most {max_chars} are taken")
                found.append(parse(text))
            except (ValueError, RecursionError) as exc:
                raise RendezvousError(
                    f"the record {self._store.full_key(key)!r} makes no sense: {exc}. A process of the job wrote it, "
                    f"{self._where()}: start all of them with the same version of rpcdist"
                ) from exc
        return found

    def _where(self) -> str:
        return f"in the store at {self._store.address}"
