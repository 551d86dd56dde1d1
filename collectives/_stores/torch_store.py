"""torch's own stores behind this package's interface."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as torch_distributed

from rpcdist.backoff import backoff
from rpcdist.collectives._stores.store_base import Store, Timeout
from rpcdist.collectives._stores.store_operations import (
    Check,
    Get,
    ListKeys,
    Missing,
    QueuePop,
    Set,
    StoreOperation,
    Wait,
)
from rpcdist.deadline import Deadline
from rpcdist.errors import ConfigError, DistError, DistNetworkError, DistStoreError
from rpcdist.time_limits import TORCH_STORE_FIRST_PAUSE_S, TORCH_STORE_LONGEST_PAUSE_S

__all__ = ["TorchStoreAdapter"]


class TorchStoreAdapter(Store):
    """Any store of `torch.distributed`, e.g. the one that `torchrun` serves.

    Errors become this package's. Where torch's store has no `multi_get` and the like (its FileStore), they are done
    one key at a time; it has no queues at all.

    Waiting asks again and again, with random pauses that grow to a quarter of a second at most: a wait inside torch
    cannot be interrupted, keeps other threads off the connection, and if it is cut into short ones, torch prints a
    warning for each.

    Args:
        store: torch's.
        timeout: how long methods wait that take no timeout of their own; torch's setting by default.
    """

    def __init__(self, store: torch_distributed.Store, timeout: Timeout | None = None) -> None:
        if not isinstance(store, torch_distributed.Store):
            raise ConfigError(f"TorchStoreAdapter wraps a store of torch.distributed, not {store!r}")
        self._address = _address_of(store)
        self._underlying: torch_distributed.Store | None = store
        super().__init__(self._store.timeout if timeout is None else timeout)

    @property
    def underlying_store(self) -> torch_distributed.Store:
        if self._underlying is None:
            raise DistStoreError(f"the store at {self.address} was closed by this process")
        return self._underlying

    @property
    def _store(self) -> Any:  # torch's stubs lack some methods and say that values are `str` alone
        return self.underlying_store

    def close(self) -> None:
        """Drops torch's store, which closes its connection when nobody else refers to it. Idempotent."""
        self._underlying = None

    @property
    def address(self) -> str:
        return self._address

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())

    def clone(self) -> TorchStoreAdapter:
        """A clone of torch's store, with its own connection."""
        with self._mapped("clone"):
            return TorchStoreAdapter(self._store.clone(), self._timeout_s)

    def execute(self, operation: StoreOperation[object], deadline: Deadline) -> object:
        pauses = backoff(TORCH_STORE_FIRST_PAUSE_S, TORCH_STORE_LONGEST_PAUSE_S, deadline)
        while isinstance(result := self._attempt(operation), Missing) and not deadline.expired():
            time.sleep(next(pauses))
        return result

    def _attempt(self, operation: StoreOperation[object]) -> object:
        """Carries out an operation without waiting; `Missing` for one that would have to."""
        with self._mapped(operation.method):
            if isinstance(operation, Get | Wait) and not self._store.check(list(operation.keys)):
                return Missing(tuple(key for key in operation.keys if not self._store.check([key])) or operation.keys)
            try:
                return _translated(operation, self._store)
            except torch_distributed.QueueEmptyError:
                if not isinstance(operation, QueuePop):
                    raise
                return Missing((operation.key,))

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
        except (RuntimeError, ValueError, IndexError) as exc:  # the latter two: torch's `add` to what is not a number
            raise DistStoreError(f"{what} failed in torch's store at {self.address}: {_first_line(exc)}") from exc


def _translated(operation: StoreOperation[object], store: Any) -> object:
    """What torch's store returns for an operation. A `Get` or `Wait` comes only when its keys are there."""
    match operation:
        case Set(keys, values) if len(keys) > 1 and store.has_extended_api():
            return store.multi_set(list(keys), list(values))
        case Set(keys, values):
            for key, value in zip(keys, values, strict=True):
                store.set(key, value)
            return None
        case Get(keys) if len(keys) > 1 and store.has_extended_api():
            return tuple(map(bytes, store.multi_get(list(keys))))
        case Get(keys):
            return tuple(map(bytes, map(store.get, keys)))
        case Wait():
            return None
        case Check(keys):
            return store.check(list(keys))
        case ListKeys(prefix):
            return tuple(key for key in store.list_keys() if key.startswith(prefix))
        case QueuePop(key):
            return bytes(store.queue_pop(key, False))
        case _:  # the others have the names and the arguments of torch's methods
            return getattr(store, operation.method)(*operation.arguments)


def _address_of(store: torch_distributed.Store) -> str:
    if isinstance(store, torch_distributed.PrefixStore):
        return _address_of(store.underlying_store)
    if isinstance(store, torch_distributed.TCPStore):
        return f"{store.host}:{store.port}"
    if isinstance(store, torch_distributed.FileStore):
        return f"file {store.path}"  # type: ignore[attr-defined]  # missing in torch's stubs
    return f"torch's {type(store).__name__}"


def _first_line(exc: BaseException) -> str:
    """torch's C++ errors go on with a stack trace."""
    return str(exc).partition("\n")[0] or type(exc).__name__
