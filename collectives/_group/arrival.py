"""The start of a group: waits until all its ranks have come, and names those that do not, or ask for another group.

[Note: arrival] The first rank of a group to come writes down what it asks for, and each rank says that it has come
under a key of its own. A rank that asks for something else sees that at once; it overwrites the keys that the others
wait for with its own wish, so that they see it at once, too, and do not wait for a rank that may never come. A rank
that gives up deletes its key: those that come later must not take it for one that still waits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from rpcdist.collectives._stores.prefix_store import PrefixStore
from rpcdist.collectives._stores.store_base import Store
from rpcdist.deadline import Deadline
from rpcdist.errors import CollectiveMismatch, StoreTimeout
from rpcdist.time_limits import MIN_WAIT_S, STORE_CHECK_INTERVAL_S

__all__ = ["join_generation", "wait_for_keys", "wait_for_ranks"]

SHOWN: Final = 10
DEFAULT_GROUP: Final = "the default group"


def wait_for_keys(store: Store, keys: list[str], timeout_s: float, check: Callable[[], None] | None) -> None:
    """`store.wait`, with a `check` now and then that raises when a rank cannot come any more."""
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
            check()  # after the wait: a rank that has left may have set its keys before


def wait_for_ranks(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    what: str,
    timeout_s: float,
    description: str,
    check: Callable[[], None] | None = None,
) -> None:
    """Waits until all ranks of a group have come, and checks that all of them ask for the same group.

    Args:
        store: the part of the store that only this group uses.
        rank: rank of this process in the world.
        ranks: ranks of the members in the world, this one included.
        what: names the group in errors.
        timeout_s: limit for all of them to come.
        description: has to be equal on all of them, as the ranks have.
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
        if rank not in several:  # else the count stays, for the other ranks to see
            store.add(_count(rank), -1)
        late = [other for other in ranks if not store.check([_key(other)]) and not store.check([_gone(other)])]
        raise _missing(late, several, len(ranks), what, timeout_s) from exc
    for other_wish in store.multi_get(keys):
        if not _same(other_wish.decode(), wish):
            _disagree(what, wish, other_wish.decode())


def _key(rank: int) -> str:
    return f"arrived/{rank}"


def _gone(rank: int) -> str:
    """Set by a rank that came and gave up: other ranks, whose time ends a little later, do not count it as missing."""
    return f"gone/{rank}"


def _count(rank: int) -> str:
    """Counts the processes that wait, or died waiting, under this rank."""
    return f"count/{rank}"


def _same(one: str, other: str) -> bool:
    return bool(json.loads(one)[1:] == json.loads(other)[1:])


def _disagree(what: str, own: str, other: str) -> NoReturn:
    views = [f"rank {rank} wants {text} (ranks {ranks})" for rank, ranks, text in map(json.loads, (own, other))]
    raise CollectiveMismatch(f"making {what}", f"{views[0]}, but {views[1]}; all ranks have to pass the same arguments")


def _missing(late: Sequence[int], several: Sequence[int], size: int, what: str, timeout_s: float) -> StoreTimeout:
    shown = ", ".join(map(str, late[:SHOWN])) + (f" and {len(late) - SHOWN} more" if len(late) > SHOWN else "")
    who = f"rank {shown} has" if len(late) == 1 else f"ranks {shown} have" if late else "the last ranks have"
    twice = f" Several processes came as rank {', '.join(map(str, several))}: each needs its own." if several else ""
    if what == DEFAULT_GROUP:
        advice = "Look at those processes, and whether all have the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
    else:
        advice = "Every rank has to make the same groups in the same order; see what those ranks do"
    return StoreTimeout(
        f"Timed out making {what}: {who} not come within {timeout_s:g} s (world size of the group: {size}). "
        f"{advice}, or pass a longer timeout.{twice}"
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
        wait_for_ranks(own, rank, range(world_size), DEFAULT_GROUP, timeout_s, description)
    except CollectiveMismatch:
        own.set("spent", b"1")
        raise
    own.set("spent", b"1")
    store.set("hint", str(number))  # saves time only: a number that is spent is passed over
    return own
