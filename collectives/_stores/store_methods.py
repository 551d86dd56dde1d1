"""Operations on a store with torch's methods: a store of torch, or a program's own Python store with some of them.

Like torch, this module needs only the methods `set`, `get` and `add`. If a store has no `check`, its `get` of a missing
key may raise a `LookupError` or a `TimeoutError`, or return an empty value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as torch_distributed

from rpcdist.collectives._stores import store_operations as operations
from rpcdist.deadline import Deadline, backoff
from rpcdist.errors import DistStoreError
from rpcdist.giving_up import pause
from rpcdist.time_limits import LONGEST_PAUSE_S, POLL_S, STORE_GRACE_S

Offers = Callable[[str], bool]
"""Whether the store has a method of this name."""


def carry_out(store: Any, operation: operations.StoreOperation[object], deadline: Deadline, offers: Offers) -> object:
    """Like `Store.execute`; a wait polls, with random pauses that grow."""
    pauses = backoff(POLL_S, LONGEST_PAUSE_S, deadline)
    while isinstance(result := _at_once(store, operation, offers), operations.Missing) and not deadline.expired():
        pause(next(pauses))
    return result


def _at_once(store: Any, operation: operations.StoreOperation[object], offers: Offers) -> object:
    """Runs an operation without waiting; returns `Missing` if it would have to wait."""
    match operation:
        case operations.Set(keys, values) if len(keys) > 1 and offers("multi_set") and store.has_extended_api():
            return store.multi_set(list(keys), list(values))
        case operations.Set(keys, values):
            for key, value in zip(keys, values, strict=True):
                _method(store, "set", offers)(key, value)
            return None
        case operations.Get(keys):
            return _get(store, keys, offers)
        case operations.Wait(keys):
            return None if _check(store, keys, offers) else operations.Missing(_missing(store, keys, offers))
        case operations.Check(keys):
            return _check(store, keys, offers)
        case operations.CompareSet(key, b"", desired) if not offers("compare_set"):
            return _set_once(store, key, desired, offers)
        case operations.ListKeys(prefix):
            return tuple(key for key in _method(store, "list_keys", offers)() if key.startswith(prefix))
        case operations.QueuePop(key):
            try:
                return bytes(_method(store, "queue_pop", offers)(key, False))
            except torch_distributed.QueueEmptyError:
                return operations.Missing((key,))
        case _:  # other operations have the names and arguments of torch's methods
            return _method(store, operation.method, offers)(*operation.arguments)


def _method(store: Any, name: str, offers: Offers) -> Callable[..., Any]:
    if not offers(name):
        text = f"{type(store).__name__} has no method {name}(), which is needed here; add it to the class"
        raise DistStoreError(text)
    return getattr(store, name)  # type: ignore[no-any-return]


def _get(store: Any, keys: Sequence[str], offers: Offers) -> object:
    if not offers("check"):
        values = [_value(store, key, offers) for key in keys]
        missing = tuple(key for key, value in zip(keys, values, strict=True) if value is None)
        return operations.Missing(missing) if missing else tuple(values)
    if not store.check(list(keys)):
        return operations.Missing(_missing(store, keys, offers))
    if len(keys) > 1 and offers("multi_get") and store.has_extended_api():
        return tuple(map(bytes, store.multi_get(list(keys))))
    return tuple(_bytes(_method(store, "get", offers)(key)) for key in keys)


def _check(store: Any, keys: Sequence[str], offers: Offers) -> bool:
    if offers("check"):
        return bool(store.check(list(keys)))
    return all(_value(store, key, offers) is not None for key in keys)


def _missing(store: Any, keys: Sequence[str], offers: Offers) -> tuple[str, ...]:
    return tuple(key for key in keys if not _check(store, [key], offers)) or tuple(keys)


def _value(store: Any, key: str, offers: Offers) -> bytes | None:
    """Returns the value of a key in a store without `check`; None if it is missing or empty, which look the same."""
    try:
        value = _method(store, "get", offers)(key)
    except (LookupError, TimeoutError):
        return None
    return _bytes(value) if value else None


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _set_once(store: Any, key: str, desired: bytes, offers: Offers) -> bytes:
    """Like `compare_set` with an empty expected value, for stores without it: the first caller to count sets."""
    if (value := _value_if_there(store, key, offers)) is not None:
        return value
    if _method(store, "add", offers)(f"{key}/claims", 1) == 1:
        _method(store, "set", offers)(key, desired)
        return desired
    deadline = Deadline.after(STORE_GRACE_S)
    pauses = backoff(POLL_S, LONGEST_PAUSE_S, deadline)
    while (value := _value_if_there(store, key, offers)) is None:
        if deadline.expired():
            raise DistStoreError(
                f"the process that first claimed {key!r} did not set it within {STORE_GRACE_S:g} s; has it ended? With "
                f"a method compare_set(), {type(store).__name__} would not depend on that process."
            )
        pause(next(pauses))
    return value


def _value_if_there(store: Any, key: str, offers: Offers) -> bytes | None:
    found = _get(store, [key], offers)
    return None if isinstance(found, operations.Missing) else bytes(found[0])  # type: ignore[index]
