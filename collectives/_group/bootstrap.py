"""How the ranks of a new group find one another: they agree on the members through the store, and publish addresses.

`agreement` decides. This module carries out its steps within the deadline, and turns its results into errors that name
the ranks that did not join.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn, cast

from rpcdist.collectives._group.agreement import (
    Disagreement,
    Displaced,
    Incomplete,
    JoinRequest,
    Made,
    Result,
    Steps,
    agreement,
)
from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._stores.derived_stores import PrefixStore
from rpcdist.collectives._stores.store_base import SignedRecords, Store, timed_out
from rpcdist.collectives._stores.store_operations import Get, Missing, StoreOperation, Wait
from rpcdist.deadline import Deadline
from rpcdist.errors import CollectiveMismatch, RendezvousError, StoreTimeout, listed
from rpcdist.time_limits import INIT_NOTICE_S, MIN_WAIT_S, STORE_CHECK_INTERVAL_S
from rpcdist.transport.hub_connector import HubAddress

logger = logging.getLogger(__name__)

_RANK_0_KEY: Final = "rank 0"
_NOW: Final = Deadline(0.0)


def exchange_values(context: GroupContext, key: str, value: str, deadline: Deadline) -> list[str]:
    """Publishes a signed value of this rank, and returns the values of all ranks, by rank.

    Raises:
        AuthenticationFailed: a value was not written by a process of this job.
        RendezvousError: some ranks did not publish a value in time; names them.
    """
    keys = [f"{key}/{rank}" for rank in range(context.size)]
    signed = SignedRecords(context.store, context.process.credentials())
    signed.set(keys[context.rank], value)
    return _signed_values(context, signed, dict(enumerate(keys)), deadline)


def _signed_values(
    context: GroupContext, signed: SignedRecords, keys: Mapping[int, str], deadline: Deadline
) -> list[str]:
    """Waits for the records of some ranks, whose keys are given by rank, and returns their values."""
    records = _carry_out(context.store, Get(tuple(keys.values())), deadline, context.check)
    if isinstance(records, Missing):
        raise not_made(context, [rank for rank, key in keys.items() if context.store.full_key(key) in records.keys])
    return signed.verified(list(keys.values()), cast("tuple[bytes, ...]", records))


def not_made(context: GroupContext, missing: Sequence[int]) -> RendezvousError:
    return RendezvousError(
        f"group {context.name!r} could not be created: these ranks did not join within {context.timeout_s:g} s: "
        f"{listed([context.ranks[rank] for rank in missing])}. Do they run, and do all ranks call the same functions "
        "in the same order?"
    )


def address_of_rank_0(context: GroupContext, own: HubAddress, deadline: Deadline) -> tuple[str, str]:
    """Returns the address of rank 0's hub and a random name of this group; rank 0 publishes both, signed."""
    signed = SignedRecords(context.store, context.process.credentials())
    if context.rank == 0:
        address, uid = str(own), secrets.token_hex(8)
        signed.set(_RANK_0_KEY, json.dumps([address, uid]))
        return address, uid
    address, uid = json.loads(_signed_values(context, signed, {0: _RANK_0_KEY}, deadline)[0])
    return address, uid


DEFAULT_GROUP: Final = "the default group"


def agree(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    what: str,
    timeout_s: float,
    description: str,
    *,
    fresh: bool,
    check: Callable[[], None] | None = None,
) -> Store:
    """Waits until all ranks of a group have joined, and checks that all of them ask for the same group.

    Args:
        store: the part of the store in which the ranks of groups of this name find each other.
        ranks: ranks of the members in the world, this one included; the first of them leads.
        fresh: whether only processes of this start of the job have used that part of the store.
        check: raises if a member cannot join any more.

    Returns:
        The part of the store that only these processes use, for this group.

    Raises:
        StoreTimeout: some ranks did not join in time; names them.
        CollectiveMismatch: a rank wants another group; names it.
        RendezvousError: another process joined later under this rank.
    """
    request = JoinRequest(rank, tuple(ranks), description)
    deadline = Deadline.after(timeout_s)
    steps = agreement(request, fresh)
    result: object = None
    notice: Deadline | None = Deadline.after(INIT_NOTICE_S)
    try:
        while True:
            operation = _next_wait(store, steps, result)
            if notice is not None:
                result = _carry_out(store, operation, min(notice, deadline, key=lambda limit: limit.at), check)
                if not isinstance(result, Missing) or deadline.expired():
                    continue
                notice = None
                _log_waiting(what, request, result.keys, timeout_s)
            result = _carry_out(store, operation, deadline, check)
    except StopIteration as done:
        match done.value:
            case Made(number):
                return PrefixStore(str(number), store)
            case Disagreement(other):
                _disagree(what, request, other)
            case Displaced():
                raise RendezvousError(
                    f"making {what} failed: another process joined as rank {rank} after this one, and replaces it. "
                    "If both belong to the job, give each its own RANK; otherwise end this process, which is left "
                    "from an earlier start."
                ) from None
            case Incomplete(missing, twice):
                raise _missing(missing, twice, len(ranks), what, timeout_s) from None
        raise AssertionError(done.value) from None


def _next_wait(store: Store, steps: Steps[Result], result: object) -> StoreOperation[object]:
    """Returns the next step that has to wait, or just the next one if the store cannot do several at once."""
    operation, held = steps.send(result), store._held()
    if held is None or isinstance(operation, Get | Wait):
        return operation
    with held:
        while not isinstance(result := store.execute(operation, _NOW), Missing):
            operation = steps.send(result)
    return operation


def _carry_out(
    store: Store, operation: StoreOperation[object], deadline: Deadline, check: Callable[[], None] | None
) -> object:
    """Runs one operation of the store; a waiting operation waits until the deadline, and calls `check` regularly."""
    while True:
        limit = deadline
        if check is not None and isinstance(operation, Get | Wait):
            limit = Deadline.after(max(MIN_WAIT_S, min(STORE_CHECK_INTERVAL_S, deadline.remaining_s())))
        result = store.execute(operation, limit)
        if not isinstance(result, Missing) or check is None or deadline.expired():
            return result
        check()  # after the wait, because a rank may have set its keys before it left


def wait_for_keys(store: Store, keys: list[str], timeout_s: float, check: Callable[[], None] | None) -> None:
    """Like `store.wait`, but regularly calls `check`, which raises if a rank cannot join any more."""
    result = _carry_out(store, Wait(tuple(keys)), Deadline.after(timeout_s), check)
    if isinstance(result, Missing):
        raise timed_out("wait", timeout_s, result.keys, store.address)


def _disagree(what: str, own: JoinRequest, other: JoinRequest) -> NoReturn:
    views = [f"rank {each.rank} wants {each.description} (ranks {listed(each.ranks)})" for each in (own, other)]
    raise CollectiveMismatch(f"making {what}", f"{views[0]}, but {views[1]}; all ranks must pass the same arguments")


def _log_waiting(what: str, request: JoinRequest, keys: Sequence[str], timeout_s: float) -> None:
    here = [key.rpartition("/here/")[2] for key in keys if "/here/" in key]
    waits = f"for ranks {listed(here)}" if here else f"for rank {request.ranks[0]}, which waits for all of them"
    logger.warning(
        "making %s (ranks %s): rank %d still waits after %g s %s; it gives up after %g s. Do those ranks run, and does "
        "every rank make the same groups in the same order?",
        what, listed(request.ranks), request.rank, INIT_NOTICE_S, waits, timeout_s,
    )  # fmt: skip


def _missing(late: Sequence[int], twice: int | None, size: int, what: str, timeout_s: float) -> StoreTimeout:
    who = f"rank {late[0]} has" if len(late) == 1 else f"ranks {listed(late)} have" if late else "the last ranks have"
    several = "" if twice is None else f" Several processes came as rank {twice}: each needs its own."
    if what == DEFAULT_GROUP:
        advice = "Check those processes, and that all have the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
    else:
        advice = "Every rank must create the same groups in the same order; check what those ranks do"
    return StoreTimeout(
        f"Timed out making {what}: {who} not come within {timeout_s:g} s (world size of the group: {size}; timeout "
        f"after {1000 * timeout_s:.0f}ms). {advice}, or pass a longer timeout.{several}"
    )
