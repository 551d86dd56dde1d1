"""Stores on top of other stores: a named part of a store, and torch's stores with the interface of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Final, cast

import torch
import torch.distributed as torch_distributed

from rpcdist.collectives._stores.store_base import Store, Timeout
from rpcdist.collectives._stores.store_methods import Offers, carry_out
from rpcdist.collectives._stores.store_operations import ListKeys, StoreOperation
from rpcdist.deadline import Deadline
from rpcdist.errors import ConfigError, DistError, DistNetworkError, DistStoreError

__all__ = ["PrefixStore", "TorchStoreAdapter"]


class PrefixStore(Store):
    """Puts `prefix/` before every key, so that users of one store do not interfere with each other.

    It has no timeout of its own: `timeout` and `set_timeout` are the underlying store's, as in torch. `close` does
    nothing, because the underlying store may have other users.

    Args:
        prefix: the text before the keys.
        store: the store that holds the keys.

    Raises:
        TypeError: an argument has another type.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(prefix, str) or not isinstance(store, Store):
            raise TypeError(f"PrefixStore needs a string and a store, not {prefix!r} and {store!r}")
        self.prefix = prefix
        self.underlying_store = store

    @property
    def _underlying_non_prefix_store(self) -> Store:
        """The store below all prefixes, under torch's name."""
        store = self.underlying_store
        return store._underlying_non_prefix_store if isinstance(store, PrefixStore) else store

    @property
    def address(self) -> str:
        return self.underlying_store.address

    def full_key(self, key: str) -> str:
        return self.underlying_store.full_key(f"{self.prefix}/{key}")

    def clone(self) -> PrefixStore:
        """Returns the same prefix of a clone of the underlying store; close the clone through `underlying_store`."""
        return PrefixStore(self.prefix, self.underlying_store.clone())

    @property
    def timeout(self) -> timedelta:
        return self.underlying_store.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        """Sets the limit of waits without a timeout of their own, in seconds or as a `timedelta`."""
        self.underlying_store.set_timeout(timeout)

    @property
    def is_served_here(self) -> bool:
        return self.underlying_store.is_served_here

    def note_failure(self, reason: str) -> None:
        self.underlying_store.note_failure(reason)

    def _held(self) -> AbstractContextManager[None] | None:
        return self.underlying_store._held()

    @property
    def _timeout_s(self) -> float:  # type: ignore[override]  # the base keeps a number here
        return self.underlying_store._timeout_s

    def has_extended_api(self) -> bool:
        return self.underlying_store.has_extended_api()

    def __repr__(self) -> str:
        return f"<PrefixStore {self.prefix!r} of {self.underlying_store!r}>"

    def execute(self, operation: StoreOperation[object], deadline: Deadline) -> object:
        prefix, store = f"{self.prefix}/", self.underlying_store
        while isinstance(store, PrefixStore):
            prefix, store = f"{store.prefix}/{prefix}", store.underlying_store
        result = store.execute(operation.under(prefix), deadline)
        if isinstance(operation, ListKeys):
            return tuple(key.removeprefix(prefix) for key in cast(tuple[str, ...], result))
        return result


TORCH_TCP_BYTES: Final = 8 << 20  # torch's own limit for one text or value


class TorchStoreAdapter(Store):
    """Any store of `torch.distributed`, e.g. the one that `torchrun` serves.

    Errors become errors of this package. If torch's store has no `multi_get` and similar methods (like its FileStore),
    the adapter handles one key at a time, and has no queues.

    A wait polls, with random pauses of at most a quarter of a second. A wait inside torch could not be interrupted and
    would block the connection for other threads; if it were cut into short waits, torch would print many warnings.

    Args:
        store: torch's store.
        timeout: the limit of waits without a timeout of their own; torch's setting by default.
    """

    def __init__(self, store: torch_distributed.Store, timeout: Timeout | None = None) -> None:
        if not isinstance(store, torch_distributed.Store):
            raise ConfigError(f"TorchStoreAdapter wraps a store of torch.distributed, not {store!r}")
        self._address = _address_of(store)
        self._underlying: torch_distributed.Store | None = store
        self._offers = _offers(store)
        self._is_tcp = isinstance(_innermost(store), torch_distributed.TCPStore)
        super().__init__(self._store.timeout if timeout is None else timeout)

    @property
    def underlying_store(self) -> torch_distributed.Store:
        """torch's store. Raises `DistStoreError` after `close`."""
        if self._underlying is None:
            raise DistStoreError(f"the store at {self.address} was closed by this process")
        return self._underlying

    @property
    def _store(self) -> Any:  # torch's stubs lack some methods and declare values as `str` only
        return self.underlying_store

    def close(self) -> None:
        """Drops torch's store, which closes its connection unless other references exist. Idempotent."""
        self._underlying = None

    @property
    def address(self) -> str:
        return self._address

    def has_extended_api(self) -> bool:
        return self._offers("has_extended_api") and bool(self._store.has_extended_api())

    def clone(self) -> TorchStoreAdapter:
        """Returns a clone of torch's store, with its own connection."""
        with self._mapped("clone"):
            return TorchStoreAdapter(self._store.clone(), self._timeout_s)

    def execute(self, operation: StoreOperation[object], deadline: Deadline) -> object:
        if self._is_tcp:
            _check_size(operation, self.address)
        with self._mapped(operation.method):
            return carry_out(self._store, operation, deadline, self._offers)

    @contextmanager
    def _mapped(self, what: str) -> Iterator[None]:
        try:
            yield
        except DistError:
            raise
        except torch_distributed.DistNetworkError as exc:
            raise DistNetworkError(f"{what} failed in torch's store at {self.address}: {_first_line(exc)}") from exc
        except NotImplementedError as exc:
            raise DistStoreError(f"torch's store at {self.address} has no {what}: {_first_line(exc)}") from exc
        except (RuntimeError, ValueError, IndexError) as exc:  # the latter two: `add` to a value that is no number
            raise DistStoreError(f"{what} failed in torch's store at {self.address}: {_first_line(exc)}") from exc


def _check_size(operation: StoreOperation[object], address: str) -> None:
    """Refuses sizes for which torch's server would close the connection."""
    for argument in operation.arguments:
        for item in argument if isinstance(argument, tuple) else (argument,):
            if isinstance(item, str | bytes) and len(item) > TORCH_TCP_BYTES:
                raise DistStoreError(
                    f"{operation.method}() has a key or value of {len(item)} bytes, but torch's store at {address} "
                    f"takes at most {TORCH_TCP_BYTES} bytes ({TORCH_TCP_BYTES >> 20} MiB). Use several keys."
                )


def _innermost(store: torch_distributed.Store) -> torch_distributed.Store:
    while isinstance(store, torch_distributed.PrefixStore):
        store = store.underlying_store
    return store


def _offers(store: torch_distributed.Store) -> Offers:
    """Returns which methods a store has: all for a store of torch, those of its class for a program's own store."""
    kind = type(_innermost(store))
    torchs: Any = torch._C._distributed_c10d
    known = (*torch_distributed.Store.__mro__, getattr(torchs, kind.__name__, None))
    classes = [each for each in kind.__mro__ if each not in known]
    if not classes:
        return lambda name: True
    defined = {name for each in classes for name in vars(each)}
    return lambda name: name in defined


def _address_of(store: torch_distributed.Store) -> str:
    if isinstance(store, torch_distributed.PrefixStore):
        return _address_of(store.underlying_store)
    if isinstance(store, torch_distributed.TCPStore):
        return f"{store.host}:{store.port}"
    if isinstance(store, torch_distributed.FileStore):
        return f"file {store.path}"  # type: ignore[attr-defined]  # missing in torch's stubs
    return f"torch's {type(store).__name__}"


def _first_line(exc: BaseException) -> str:
    """Cuts the stack trace off a C++ error of torch."""
    return str(exc).partition("\n")[0] or type(exc).__name__
