"""A part of another store under a name of its own."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

from rpcdist.collectives._stores.store_base import Store, Timeout
from rpcdist.collectives._stores.store_operations import ListKeys, StoreOperation
from rpcdist.deadline import Deadline

__all__ = ["PrefixStore"]


class PrefixStore(Store):
    """Puts `prefix/` before every key, so that users of one store do not get in each other's way.

    It has no timeout of its own: `timeout` and `set_timeout` are the underlying store's, as in torch, and `close` does
    nothing, because others may use that store too.

    Args:
        prefix: text before the keys.
        store: where they are kept.

    Raises:
        TypeError: one of the two is something else.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(prefix, str) or not isinstance(store, Store):
            raise TypeError(f"PrefixStore takes a text and a store, not {prefix!r} and {store!r}")
        self._prefix = prefix
        self._store = store

    @property
    def prefix(self) -> str:
        """The text in front of all keys."""
        return self._prefix

    @property
    def underlying_store(self) -> Store:
        """The store that holds the keys."""
        return self._store

    @property
    def _underlying_non_prefix_store(self) -> Store:
        """The store below all prefixes, under torch's name."""
        store = self._store
        return store._underlying_non_prefix_store if isinstance(store, PrefixStore) else store

    @property
    def address(self) -> str:
        return self._store.address

    def full_key(self, key: str) -> str:
        return self._store.full_key(f"{self._prefix}/{key}")

    def clone(self) -> PrefixStore:
        """A prefix of a clone of the underlying store; close that one through `underlying_store`."""
        return PrefixStore(self._prefix, self._store.clone())

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        """Sets the limit of waits that name none, in seconds or as a `timedelta`."""
        self._store.set_timeout(timeout)

    def note_failure(self, reason: str) -> None:
        self._store.note_failure(reason)

    @property
    def _timeout_s(self) -> float:  # type: ignore[override]  # the base keeps a number here
        return self._store._timeout_s

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    def __repr__(self) -> str:
        return f"<PrefixStore {self._prefix!r} of {self._store!r}>"

    def execute(self, operation: StoreOperation[object], deadline: Deadline) -> object:
        prefix = f"{self._prefix}/"
        result = self._store.execute(operation.under(prefix), deadline)
        if isinstance(operation, ListKeys):
            return tuple(key.removeprefix(prefix) for key in cast(tuple[str, ...], result))
        return result
