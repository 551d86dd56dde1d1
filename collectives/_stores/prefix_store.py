"""A part of another store under a name of its own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from rpcdist.collectives._stores.base import Store, Timeout

__all__ = ["PrefixStore"]


class PrefixStore(Store):
    """Puts `prefix/` before every key, so that users of one store do not get in each other's way.

    It has no timeout of its own: `timeout` and `set_timeout` are the underlying store's, as in torch, and `close` does
    nothing, because others may use that store too.

    Args:
        prefix: text before the keys.
        store: where they are kept.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        self._prefix = prefix
        self._store = store

    @property
    def prefix(self) -> str:
        return self._prefix

    @property
    def underlying_store(self) -> Store:
        return self._store

    @property
    def address(self) -> str:
        return self._store.address

    def clone(self) -> PrefixStore:
        """A prefix of a clone of the underlying store; close that one through `underlying_store`."""
        return PrefixStore(self._prefix, self._store.clone())

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        self._store.set_timeout(timeout)

    @property
    def _timeout_s(self) -> float:  # type: ignore[override]  # the base keeps a number here
        return self._store._timeout_s

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    def __repr__(self) -> str:
        return f"<PrefixStore {self._prefix!r} of {self._store!r}>"

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [self._name(key) for key in keys]

    def _set_items(self, items: Sequence[tuple[str, bytes]]) -> None:
        self._store._set_items([(self._name(key), value) for key, value in items])

    def _get_values(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        return self._store._get_values(self._names(keys), timeout_s)

    def _wait_keys(self, keys: Sequence[str], timeout_s: float) -> None:
        self._store._wait_keys(self._names(keys), timeout_s)

    def _add(self, key: str, amount: int) -> int:
        return self._store._add(self._name(key), amount)

    def _append(self, key: str, value: bytes) -> None:
        self._store._append(self._name(key), value)

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._store._compare_set(self._name(key), expected, desired)

    def _missing(self, keys: Sequence[str]) -> list[str]:
        return [name.removeprefix(self._name("")) for name in self._store._missing(self._names(keys))]

    def _delete(self, key: str) -> bool:
        return self._store._delete(self._name(key))

    def _num_keys(self) -> int:
        return self._store._num_keys()

    def _list_keys(self, prefix: str) -> list[str]:
        return [name.removeprefix(self._name("")) for name in self._store._list_keys(self._name(prefix))]

    def _queue_push(self, key: str, value: bytes) -> None:
        self._store._queue_push(self._name(key), value)

    def _queue_pop(self, key: str, timeout_s: float) -> bytes | None:
        return self._store._queue_pop(self._name(key), timeout_s)

    def _queue_len(self, key: str) -> int:
        return self._store._queue_len(self._name(key))
