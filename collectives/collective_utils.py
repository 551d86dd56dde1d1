"""Steps that succeed on all ranks or fail on all ranks: every rank raises the exception of a rank that fails.

Without a group (`pg=None`) only this process takes part, and sends nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar, cast, overload

from rpcdist.collectives._api import objects
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.errors import ConfigError, DistBackendError, described_error

__all__ = ["all_gather", "broadcast"]

T = TypeVar("T")


_Outcome = tuple[str | None, bytes | None, Exception | None]
"""The message of a rank to all others: the name of the step that it is in; its pickled value, which is None if it
failed (a value that cannot be pickled is an error of its rank); and why it failed."""


@overload
def broadcast(
    data_or_fn: Callable[[], T],
    *,
    success: bool = True,
    stage_name: str | None = None,
    rank: int = 0,
    pg: ProcessGroup | None = None,
) -> T: ...


@overload
def broadcast(
    data_or_fn: T, *, success: bool = True, stage_name: str | None = None, rank: int = 0, pg: ProcessGroup | None = None
) -> T: ...


def broadcast(
    data_or_fn: T | Callable[[], T],
    *,
    success: bool = True,
    stage_name: str | None = None,
    rank: int = 0,
    pg: ProcessGroup | None = None,
) -> T:
    """Returns the value of one rank on all ranks, or raises on all ranks if that rank failed.

    Args:
        data_or_fn: the value, or a function that returns it, which only that rank calls. It is pickled.
        success: False on that rank if it has already failed; then the value is None.
        stage_name: the name of the step, for errors.
        rank: the rank in the group that has the value.
        pg: the group; None for this process alone.

    Raises:
        DistBackendError: that rank failed; its exception is the cause, on all ranks.
    """
    if not success and data_or_fn is not None:
        raise ConfigError("data_or_fn must be None when success is False: a rank that failed has no value")
    has_value = success and (pg is None or pg.rank() == rank)
    outcome = _outcome(data_or_fn, stage_name) if has_value else (stage_name, None, None)
    if pg is not None:
        received: list[object] = [outcome]
        objects.broadcast_object_list(received, group=pg, group_src=rank)
        outcome = cast(_Outcome, received[0])
    [value] = _values({rank: outcome})
    return cast(T, value)


@overload
def all_gather(
    data_or_fn: Callable[[], T], stage_name: str | None = None, pg: ProcessGroup | None = None
) -> list[T]: ...


@overload
def all_gather(data_or_fn: T, stage_name: str | None = None, pg: ProcessGroup | None = None) -> list[T]: ...


def all_gather(
    data_or_fn: T | Callable[[], T], stage_name: str | None = None, pg: ProcessGroup | None = None
) -> list[T]:
    """Returns the values of all ranks, by rank, or raises on all ranks if one of them failed.

    Args:
        data_or_fn: this rank's value, or a function that returns it. It is pickled.
        stage_name: the name of the step; must be equal on all ranks, so that no rank is a step ahead.
        pg: the group; None for this process alone.

    Raises:
        DistBackendError: some ranks failed, or are in another stage; the first one's exception is the cause.
    """
    own = _outcome(data_or_fn, stage_name)
    outcomes: list[object] = [own]
    if pg is not None:
        outcomes = [None] * pg.size()
        objects.all_gather_object(outcomes, own, pg)
    return cast(list[T], _values(dict(enumerate(cast(list[_Outcome], outcomes)))))


def _outcome(data_or_fn: object, stage: str | None) -> _Outcome:
    """Calls the function of this rank; an error becomes a part of the outcome, for all ranks."""
    try:
        value = data_or_fn() if callable(data_or_fn) else data_or_fn
        return stage, pickle.dumps(value, pickle.HIGHEST_PROTOCOL), None
    except Exception as exc:
        return stage, None, _portable(exc)


def _portable(exc: Exception) -> Exception:
    """Returns the exception, or one with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(exc))
    except Exception:
        return DistBackendError(described_error(exc))
    return exc


def _values(outcomes: dict[int, _Outcome]) -> list[object]:
    """Returns the values by rank. Raises `DistBackendError` if a rank failed, or if they are in different stages."""
    failed = [(rank, stage, error) for rank, (stage, data, error) in outcomes.items() if data is None]
    if failed:
        raise DistBackendError("; ".join(_failure(*each) for each in failed)) from failed[0][-1]
    if len({stage for stage, *_ in outcomes.values()}) > 1:
        said = ", ".join(f"rank {rank} is in {stage!r}" for rank, (stage, *_) in outcomes.items())
        raise DistBackendError(f"the ranks are in different stages: {said}")
    return [pickle.loads(data) for _, data, _ in outcomes.values() if data is not None]


def _failure(rank: int, stage: str | None, error: Exception | None) -> str:
    where = "" if stage is None else f" in stage {stage!r}"
    reason = "" if error is None else f": {type(error).__name__}: {error}"
    return f"rank {rank} failed{where}{reason}"
