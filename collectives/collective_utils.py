"""Steps that succeed on all ranks or fail on all ranks: every rank raises the exception of a rank that fails.

Without a group (`pg=None`) only this process takes part, and sends nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast, overload

from rpcdist.collectives._api import objects
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.errors import ConfigError, DistBackendError

__all__ = ["all_gather", "broadcast"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _StageOutcome:
    """The message of a rank to all others: its value, or its error.

    Attributes:
        stage: name of the step that the rank is in.
        data: the pickled value; a value that cannot be pickled is an error of this rank.
        error: why the rank has no value.
        failed: whether the rank failed.
    """

    stage: str | None
    data: bytes = b""
    error: Exception | None = None
    failed: bool = False

    def describe(self, rank: int) -> str:
        stage = "" if self.stage is None else f" in stage {self.stage!r}"
        reason = "" if self.error is None else f": {type(self.error).__name__}: {self.error}"
        return f"rank {rank} failed{stage}{reason}"


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
    outcomes = [_StageOutcome(stage_name)]
    if pg is None or pg.rank() == rank:
        outcomes = [_outcome(data_or_fn, stage_name) if success else _StageOutcome(stage_name, failed=True)]
    if pg is not None:
        received: list[object] = list(outcomes)
        objects.broadcast_object_list(received, group=pg, group_src=rank)
        outcomes = [cast(_StageOutcome, received[0])]
    _raise_failures({rank: outcomes[0]})
    return cast(T, pickle.loads(outcomes[0].data))


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
    gathered = [cast(_StageOutcome, each) for each in outcomes]
    _raise_failures(dict(enumerate(gathered)))
    stages = {outcome.stage for outcome in gathered}
    if len(stages) > 1:
        said = ", ".join(f"rank {rank} is in {outcome.stage!r}" for rank, outcome in enumerate(gathered))
        raise DistBackendError(f"the ranks are in different stages: {said}")
    return [cast(T, pickle.loads(outcome.data)) for outcome in gathered]


def _outcome(data_or_fn: object, stage: str | None) -> _StageOutcome:
    """Calls the function of this rank; an error becomes a part of the outcome, for all ranks."""
    try:
        value = data_or_fn() if callable(data_or_fn) else data_or_fn
        return _StageOutcome(stage, pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    except Exception as exc:
        return _StageOutcome(stage, error=_portable(exc), failed=True)


def _portable(exc: Exception) -> Exception:
    """Returns the exception, or one with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(exc))
    except Exception:
        return DistBackendError(f"{type(exc).__name__}: {exc}")
    return exc


def _raise_failures(outcomes: dict[int, _StageOutcome]) -> None:
    failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.failed}
    if failed:
        text = "; ".join(outcome.describe(rank) for rank, outcome in failed.items())
        raise DistBackendError(text) from next(iter(failed.values())).error
