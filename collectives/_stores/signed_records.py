"""Records in a store that processes of the job have signed: all that a process may trust goes through here."""

from __future__ import annotations

from collections.abc import Sequence

from rpcdist.collectives._stores.store_base import Store
from rpcdist.transport.credentials import Records


class SignedRecords:
    """Any thread may use it."""

    def __init__(self, store: Store, records: Records) -> None:
        self._store = store
        self._records = records

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._records.sign(self._store.full_key(key), value.encode()))

    def replace(self, key: str, value: str, wanted: str) -> bool:
        """Replaces the record of a key if it is still the given one; whether it was. The record must be there."""
        full_key, found = self._store.full_key(key), self._store.get(key)
        if self._records.verify(full_key, found, self._store.address).decode(errors="replace") != value:
            return False
        record = self._records.sign(full_key, wanted.encode())
        return self._store.compare_set(key, found, record) == record

    def get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[str]:
        """Waits for all of them, up to the store's timeout or the one given; bytes that are no text become U+FFFD.

        Raises:
            AuthenticationFailed: a record was not signed by a process of the job; names its key.
            DistStoreError: they did not come in time, or the operation failed.
        """
        if timeout_s is not None:
            self._store.wait(keys, timeout_s)
        place = self._store.address
        return [
            self._records.verify(self._store.full_key(key), record, place).decode(errors="replace")
            for key, record in zip(keys, self._store.multi_get(keys), strict=True)
        ]
