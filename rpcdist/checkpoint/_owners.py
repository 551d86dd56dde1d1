"""Values behind remote references: their owners save and load them, so that they do not travel.

`Ranks` are the processes that save or load together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from torch import Tensor, nn

import rpcdist.rpc as rpc
from rpcdist import collectives
from rpcdist.checkpoint._entries import Entries, Stateful, entries_of
from rpcdist.checkpoint._storage import CheckpointPart, StoredEntries
from rpcdist.collectives import ProcessGroup
from rpcdist.errors import CheckpointError, ConfigError
from rpcdist.own_shortage import names_shortage
from rpcdist.rpc import RRef

References = dict[str, RRef[Any]]


def by_owner(state: Mapping[str, object]) -> tuple[dict[str, object], dict[str, References]]:
    """The values of this process, and the references, by their owner's name.

    Raises:
        ConfigError: it is no dictionary of values by key.
    """
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        what = f"a {type(state).__name__}" if not isinstance(state, Mapping) else f"of keys {list(state)!r:.80}"
        raise ConfigError(f"the state is {what}: give a dictionary of values by name, such as {{'model': model}}")
    here: dict[str, object] = {}
    there: dict[str, References] = {}
    for key, value in state.items():
        if isinstance(value, RRef):
            there.setdefault(value.owner_name(), {})[key] = value
        else:
            here[key] = value
    return here, there


def entries_at_owner(references: References) -> Entries:
    """At the owner: the entries of its values."""
    entries: Entries = {}
    for key, reference in references.items():
        entries |= entries_of(key, reference.local_value())
    return entries


def new_part(folder: str, references: References, algorithm: str) -> CheckpointPart:
    """At the owner: what it will write."""
    return CheckpointPart(folder, entries_at_owner(references), algorithm)


def load_at_owner(folder: str, references: References) -> None:
    """At the owner: its values get what was stored.

    Raises:
        ConfigError: one of them cannot be changed in place.
    """
    stored = StoredEntries(folder)
    for key, reference in references.items():
        value = reference.local_value()
        if not isinstance(value, (Tensor, nn.Module, Stateful)):
            raise ConfigError(
                f"{key!r} refers to a {type(value).__name__} on {rpc.get_worker_info().name!r}, which cannot be "
                "changed in place; refer to a tensor, a module, or an object with state_dict() and load_state_dict()"
            )
        stored.restore(key, value)


T = TypeVar("T")


class Ranks:
    """Does a step on all ranks, or on the first; where it fails on one, it fails on all.

    Raises:
        ConfigError: it is not a group of ours with this rank in it.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        if group is None and collectives.is_initialized():
            group = collectives.group.WORLD
        if group is not None and not isinstance(group, ProcessGroup):
            raise ConfigError(
                f"group is {group!r}: give a group of rpcdist.collectives with this rank in it; groups of torch save "
                "by torch.distributed.checkpoint"
            )
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.is_first = self.rank == 0

    def all(self, what: str, step: Callable[[], T]) -> list[T]:
        """The results of all ranks. `what` is for the error."""
        if self._group is None:
            with names_shortage(f"{what} of a checkpoint", CheckpointError):
                return [step()]
        error: Exception | None = None
        own: tuple[bool, T | str]
        try:
            with names_shortage(f"{what} of a checkpoint", CheckpointError):
                own = (True, step())
        except Exception as exc:
            error = exc
            own = (False, f"{type(exc).__name__}: {exc}")
        outcomes: list[object] = [None] * self._group.size()
        collectives.all_gather_object(outcomes, own, group=self._group)
        found = cast("list[tuple[bool, T | str]]", outcomes)
        if error is not None:
            raise error
        if failed := [f"rank {rank}: {text}" for rank, (succeeded, text) in enumerate(found) if not succeeded]:
            raise CheckpointError(f"{what} failed on {'; '.join(failed)}")
        return [cast(T, result) for _, result in found]

    def first(self, what: str, step: Callable[[], T]) -> T:
        """The result of the first rank, which alone does the step."""
        return cast(T, self.all(what, lambda: step() if self.is_first else None)[0])
