"""Groups begin when all their ranks have come; a rank that never comes is named, as is one that wants another group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rpcdist.collectives._store._prefix import PrefixStore
from rpcdist.errors import CollectiveMismatch, StoreTimeout

if TYPE_CHECKING:
    from rpcdist.collectives._store._base import Store

__all__ = ["arrive", "join_generation"]

SHOWN: Final = 10


def arrive(store: Store, rank: int, ranks: tuple[int, ...], what: str, timeout_s: float, description: str) -> None:
    """Waits until all ranks of a group have come, and checks that all of them want the same.

    Args:
        store: the group's own key space.
        rank: of this process in the group.
        ranks: the members, in the world.
        what: the group, for errors.
        timeout_s: limit.
        description: what has to be equal on all of them.

    Raises:
        StoreTimeout: naming the ranks that did not come.
        CollectiveMismatch: naming one with another description.
    """
    store.set(_key(rank), description)
    keys = [_key(other) for other in range(len(ranks))]
    try:
        store.wait(keys, timeout_s)
    except StoreTimeout as exc:
        raise _missing(store, ranks, what, timeout_s) from exc
    for other, found in enumerate(store.multi_get(keys)):
        if found.decode(errors="replace") != description:
            raise CollectiveMismatch(
                f"making {what}",
                f"rank {ranks[rank]} wants {description}, but rank {ranks[other]} wants "
                f"{found.decode(errors='replace')}; all ranks have to pass the same arguments",
            )


def _key(rank: int) -> str:
    return f"arrived/{rank}"


def _missing(store: Store, ranks: tuple[int, ...], what: str, timeout_s: float) -> StoreTimeout:
    late = [world_rank for place, world_rank in enumerate(ranks) if not store.check([_key(place)])]
    shown = ", ".join(map(str, late[:SHOWN])) + (f" and {len(late) - SHOWN} more" if len(late) > SHOWN else "")
    who = f"rank {shown} has" if len(late) == 1 else f"ranks {shown} have" if late else "all ranks, too late, have"
    return StoreTimeout(
        f"Timed out making {what}: {who} not come within {timeout_s:g} s (world size of the group: {len(ranks)}). "
        "Every rank has to make the same groups in the same order; see what those ranks do, or pass a longer timeout."
    )


def join_generation(store: Store, rank: int, world_size: int, timeout_s: float, description: str) -> Store:
    """The key space of one initialisation of the world, for which all ranks have come.

    The same store may serve several initialisations one after the other: those of a process that destroys its group
    and makes a new one, and of a process that takes the place of one that died. Initialisations are numbered; a number
    is spent once all ranks have come, and whoever comes takes the first that is not spent. So an attempt that failed
    because a rank was missing can be repeated, by any of the ranks, and meets the others.
    """
    number = int(store.add("hint", 0))
    while store.check([f"{number}/spent"]):
        number += 1
    own = PrefixStore(str(number), store)
    arrive(own, rank, tuple(range(world_size)), "the default group", timeout_s, description)
    own.set("spent", b"1")
    store.set("hint", str(number))  # saves time only: a number that is spent is passed over
    return own
