"""Groups begin when all their ranks have come; a rank that never comes is named, as is one that wants another group.

[Note: arrival] The first rank of a group to come writes down what it wants, and each rank says that it has come under
a key of its own. One that wants something else finds out at once; it overwrites the keys that the others wait for with
its own wish, so that they find out at once, too, and do not wait for somebody who may never come. A rank that gives up
takes back its key: whoever comes later must not take it for one that still waits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from rpcdist.collectives._stores.base import Store
from rpcdist.collectives._stores.prefix_store import PrefixStore
from rpcdist.deadline import Deadline
from rpcdist.errors import CollectiveMismatch, StoreTimeout
from rpcdist.time_limits import MIN_WAIT_S, STORE_CHECK_INTERVAL_S

__all__ = ["join_generation", "wait_for_keys", "wait_for_ranks"]

SHOWN: Final = 10


def wait_for_keys(store: Store, keys: list[str], timeout_s: float, check: Callable[[], None] | None) -> None:
    """`store.wait`, with a `check` now and then that raises when there is nobody to wait for any more."""
    if check is None:
        store.wait(keys, timeout_s)
        return
    deadline = Deadline.after(timeout_s)
    while True:
        try:
            store.wait(keys, max(MIN_WAIT_S, min(STORE_CHECK_INTERVAL_S, deadline.remaining_s())))
            return
        except StoreTimeout:
            if deadline.expired():
                raise
            check()  # only now: who has left already may have done its part before


def wait_for_ranks(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    what: str,
    timeout_s: float,
    description: str,
    check: Callable[[], None] | None = None,
) -> None:
    """Waits until all ranks of a group have come, and checks that all of them want the same.

    Args:
        store: the group's own key space.
        rank: of this process in the world.
        ranks: the members, in the world; this process is one.
        what: the group, for errors.
        timeout_s: limit.
        description: what has to be equal on all of them, besides the ranks.
        check: raises when one of them cannot come any more.

    Raises:
        StoreTimeout: naming the ranks that did not come.
        CollectiveMismatch: naming one that wants something else.
    """
    wish = json.dumps([rank, list(ranks), description])
    first = store.compare_set("first", "", wish).decode()
    if not _same(first, wish):
        store.multi_set([_key(other) for other in json.loads(first)[1]], [wish] * len(json.loads(first)[1]))
        _disagree(what, wish, first)
    store.delete_key(_gone(rank))
    store.add(_count(rank), 1)
    store.set(_key(rank), wish)
    keys = [_key(other) for other in ranks]
    try:
        wait_for_keys(store, keys, timeout_s, check)
    except StoreTimeout as exc:
        store.set(_gone(rank), b"1")
        store.delete_key(_key(rank))
        several = [other for other in ranks if store.add(_count(other), 0) > 1]
        if rank not in several:  # else the others shall see it as well
            store.add(_count(rank), -1)
        late = [other for other in ranks if not store.check([_key(other)]) and not store.check([_gone(other)])]
        raise _missing(late, several, len(ranks), what, timeout_s) from exc
    for found in store.multi_get(keys):
        if not _same(found.decode(), wish):
            _disagree(what, wish, found.decode())


def _key(rank: int) -> str:
    return f"arrived/{rank}"


def _gone(rank: int) -> str:
    """It came, and gave up: other ranks, whose time ends a little later, do not count it as missing."""
    return f"gone/{rank}"


def _count(rank: int) -> str:
    """How many processes wait, or died waiting, under this rank."""
    return f"count/{rank}"


def _same(one: str, other: str) -> bool:
    return bool(json.loads(one)[1:] == json.loads(other)[1:])


def _disagree(what: str, mine: str, other: str) -> NoReturn:
    views = [f"rank {rank} wants {text} (ranks {ranks})" for rank, ranks, text in map(json.loads, (mine, other))]
    raise CollectiveMismatch(f"making {what}", f"{views[0]}, but {views[1]}; all ranks have to pass the same arguments")


def _missing(late: Sequence[int], several: Sequence[int], size: int, what: str, timeout_s: float) -> StoreTimeout:
    shown = ", ".join(map(str, late[:SHOWN])) + (f" and {len(late) - SHOWN} more" if len(late) > SHOWN else "")
    who = f"rank {shown} has" if len(late) == 1 else f"ranks {shown} have" if late else "the last ranks have"
    twice = f" Several processes came as rank {', '.join(map(str, several))}: each needs its own." if several else ""
    return StoreTimeout(
        f"Timed out making {what}: {who} not come within {timeout_s:g} s (world size of the group: {size}). "
        "Every rank has to make the same groups in the same order; see what those ranks do, or pass a longer timeout."
        f"{twice}"
    )


def join_generation(store: Store, rank: int, world_size: int, timeout_s: float, description: str) -> Store:
    """The key space of one initialisation of the world, for which all ranks have come.

    The same store may serve several initialisations one after the other: those of a process that destroys its group
    and makes a new one, and of a process that takes the place of one that died. Initialisations are numbered; a number
    is spent once all ranks have come or two of them disagreed, and whoever comes takes the first that is not spent. So
    an attempt that failed because a rank was missing can be repeated, by any of the ranks, and meets the others.
    """
    number = int(store.add("hint", 0))
    while store.check([f"{number}/spent"]):
        number += 1
    own = PrefixStore(str(number), store)
    try:
        wait_for_ranks(own, rank, range(world_size), "the default group", timeout_s, description)
    except CollectiveMismatch:
        own.set("spent", b"1")
        raise
    own.set("spent", b"1")
    store.set("hint", str(number))  # saves time only: a number that is spent is passed over
    return own
