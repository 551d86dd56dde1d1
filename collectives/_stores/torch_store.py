"""torch's own stores behind this package's interface."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, Protocol, TypeVar, cast

import torch.distributed as torch_distributed

from rpcdist.collectives._stores.base import Store, Timeout, timed_out
from rpcdist.deadline import Deadline
from rpcdist.errors import ConfigError, DistError, DistNetworkError, DistStoreError

__all__ = ["TorchStoreAdapter"]

T = TypeVar("T")

SHORTEST_PAUSE_S: Final = 0.001
LONGEST_PAUSE_S: Final = 0.25


class _TorchStore(Protocol):
    """torch's stores as they are; torch's stubs lack some methods and say that values are `str` alone."""

    timeout: timedelta

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def append(self, key: str, value: bytes) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def delete_key(self, key: str) -> bool: ...
    def num_keys(self) -> int: ...
    def list_keys(self) -> list[str]: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def multi_set(self, keys: list[str], values: list[bytes]) -> None: ...
    def queue_push(self, key: str, value: bytes) -> None: ...
    def queue_pop(self, key: str, block: bool) -> bytes: ...
    def queue_len(self, key: str) -> int: ...
    def has_extended_api(self) -> bool: ...
    def clone(self) -> torch_distributed.Store: ...


class TorchStoreAdapter(Store):
    """Any store of `torch.distributed`, e.g. the one that `torchrun` serves.

    Errors become this package's. Where torch's store has no `multi_get` and the like (its FileStore), they are done
    one key at a time; it has no queues at all.

    Waiting asks again and again, with pauses of a tenth of the time waited so far, a quarter of a second at most: a
    wait inside torch cannot be interrupted, keeps other threads off the connection, and when it is cut into slices,
    torch prints a warning for each.

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
    def _store(self) -> _TorchStore:
        return cast(_TorchStore, self.underlying_store)

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

    # ------------------------------------------------------------ errors and waits

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

    def _do(self, what: str, operation: Callable[[], T]) -> T:
        with self._mapped(what):
            return operation()

    def _wait_keys(self, keys: Sequence[str], timeout_s: float) -> None:
        deadline = Deadline.after(timeout_s)
        names = list(keys)
        while missing := self._missing(names):
            if deadline.expired():
                raise timed_out("wait", timeout_s, missing, self.address)
            _pause(timeout_s, deadline)

    def _missing(self, keys: Sequence[str]) -> list[str]:
        names = list(keys)
        return [] if self._do("check", lambda: self._store.check(names)) else self._missing_of(names)

    def _missing_of(self, keys: list[str]) -> list[str]:
        return [key for key in keys if not self._do("check", lambda key=key: self._store.check([key]))]  # type: ignore[misc]

    # ------------------------------------------------------------ the interface

    def _set_items(self, items: Sequence[tuple[str, bytes]]) -> None:
        if len(items) > 1 and self.has_extended_api():
            keys, values = [key for key, _ in items], [value for _, value in items]
            self._do("multi_set", lambda: self._store.multi_set(keys, values))
        else:
            for key, value in items:
                self._do("set", lambda key=key, value=value: self._store.set(key, value))  # type: ignore[misc]

    def _get_values(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        self._wait_keys(keys, timeout_s)
        if len(keys) > 1 and self.has_extended_api():
            return [bytes(value) for value in self._do("multi_get", lambda: self._store.multi_get(list(keys)))]
        return [bytes(self._do("get", lambda key=key: self._store.get(key))) for key in keys]  # type: ignore[misc]

    def _add(self, key: str, amount: int) -> int:
        return int(self._do("add", lambda: self._store.add(key, amount)))

    def _append(self, key: str, value: bytes) -> None:
        self._do("append", lambda: self._store.append(key, value))

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._do("compare_set", lambda: self._store.compare_set(key, expected, desired)))

    def _delete(self, key: str) -> bool:
        return bool(self._do("delete_key", lambda: self._store.delete_key(key)))

    def _num_keys(self) -> int:
        return int(self._do("num_keys", self._store.num_keys))

    def _list_keys(self, prefix: str) -> list[str]:
        return [key for key in self._do("list_keys", self._store.list_keys) if key.startswith(prefix)]

    def _queue_push(self, key: str, value: bytes) -> None:
        self._do("queue_push", lambda: self._store.queue_push(key, value))

    def _queue_pop(self, key: str, timeout_s: float) -> bytes | None:
        deadline = Deadline.after(timeout_s)
        while True:
            try:
                with self._mapped("queue_pop"):
                    return bytes(self._store.queue_pop(key, False))
            except DistStoreError as exc:
                if not isinstance(exc.__cause__, torch_distributed.QueueEmptyError):
                    raise
            if deadline.expired():
                return None
            _pause(timeout_s, deadline)

    def _queue_len(self, key: str) -> int:
        return int(self._do("queue_len", lambda: self._store.queue_len(key)))


def _address_of(store: torch_distributed.Store) -> str:
    if isinstance(store, torch_distributed.PrefixStore):
        return _address_of(store.underlying_store)
    if isinstance(store, torch_distributed.TCPStore):
        return f"{store.host}:{store.port}"
    if isinstance(store, torch_distributed.FileStore):
        return f"file {store.path}"  # type: ignore[attr-defined]  # missing in torch's stubs
    return f"torch's {type(store).__name__}"


def _pause(timeout_s: float, deadline: Deadline) -> None:
    waited_s = timeout_s - deadline.remaining_s()
    time.sleep(min(max(SHORTEST_PAUSE_S, waited_s / 10), LONGEST_PAUSE_S, deadline.remaining_s()))


def _first_line(exc: BaseException) -> str:
    """torch's C++ errors go on with a stack trace."""
    return str(exc).partition("\n")[0] or type(exc).__name__
