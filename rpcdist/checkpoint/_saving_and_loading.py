"""`save` and `load`.

To save, all processes plan, the first one divides the work, all write, and the first one publishes. To load, every
process reads what it needs. `Ranks` are the processes that save or load together. The owners of values behind remote
references save and load the values, so that these do not travel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.stateful import Stateful

import rpcdist.rpc as rpc
from rpcdist import collectives
from rpcdist.checkpoint import _folders
from rpcdist.checkpoint import _storage as storage
from rpcdist.checkpoint._entries import Entries, entries_of
from rpcdist.checkpoint._folders import checkpoint_path
from rpcdist.collectives import ProcessGroup
from rpcdist.errors import CheckpointError, ConfigError, described_error
from rpcdist.own_shortage import names_shortage
from rpcdist.rpc import RRef
from rpcdist.rpc._executors.blocking import async_form, off_loop


@off_loop("await checkpoint.save_async(...)")
def save(
    path: str | os.PathLike[str],
    state: Mapping[str, object],
    *,
    group: ProcessGroup | None = None,
    timeout: float = rpc.constants.UNSET_RPC_TIMEOUT,
    digest: str = "xxh3",
) -> None:
    """Saves a state in one folder; blocks until it is on the disk. All ranks of the group call it.

    Values are tensors, modules, remote references, objects with `state_dict` (optimizers, pipelines, parameter servers,
    schedulers), and all values that pickle supports. The owner of a reference writes the value behind it. An entry that
    several ranks have, such as a parameter of a replicated model, is written once; the others count as equal. Do not
    change the values during the save.

    The old checkpoint stays until the new one is complete: `path` leads to one of the two, even if a process dies.

    Args:
        path: becomes a link to the folder; on a file system that all workers and ranks share.
        state: the values by key.
        group: the ranks that save together, by default the default group, if there is one. Without a group this process
            saves alone, with the owners of its references.
        timeout: limit in seconds of each call to an owner; 0 means no limit; by default the limit of `init_rpc`.
        digest: how `load` detects damaged files: "xxh3" detects faults of disks and networks; "sha256" also detects
            forgery, and takes several times as long.

    Raises:
        ConfigError: `path` is something else than a checkpoint, another save to it runs, two entries have one key, or
            an entry cannot be saved.
        CheckpointError: another rank failed, the disk is full, or this process does not see other workers' files.
        WorkerLost: an owner died. RankLost: a rank died.
    """
    target, algorithm = _folders.checkpoint_path(path), storage.algorithm_of(digest)
    ranks = Ranks(group)
    with ExitStack() as held:
        folder = Path(ranks.first("making the folder", lambda: str(held.enter_context(_folders.new_folder(target)))))
        parts = _Parts(str(folder), timeout, algorithm)
        plans = ranks.all("planning", lambda: parts.plan(state))
        flat = [plan for of_rank in plans for plan in of_rank]
        together = ranks.first("planning", lambda: storage.plan_together(str(folder), flat))
        own = sum(len(of_rank) for of_rank in plans[: ranks.rank])
        results = ranks.all("writing", lambda: parts.write(together[0][own : own + len(plans[ranks.rank])]))
        written = [of_part for of_rank in results for of_part in of_rank]

        def end() -> None:
            storage.end_with_index(str(folder), together[1], written, algorithm)
            with _folders.writing(folder):
                _folders.publish(folder, target)

        ranks.first("ending", end)


save_async = async_form(save)
"""`save` as a coroutine function."""


class _Parts:
    """The parts that this process and the owners of its references write."""

    def __init__(self, folder: str, timeout: float, algorithm: str) -> None:
        self._algorithm = algorithm
        self._folder = folder
        self._timeout = timeout
        self._own: storage.CheckpointPart | None = None
        self._others: list[rpc.RRef[storage.CheckpointPart]] = []

    def plan(self, state: Mapping[str, object]) -> list[SavePlan]:
        here, there = by_owner(state)
        entries: Entries = {}
        for key, value in here.items():
            found = entries_of(key, value)
            if twice := entries.keys() & found.keys():
                raise ConfigError(f"two values of the state have the entry {min(twice)!r}: rename one")
            entries |= found
        self._own = storage.CheckpointPart(self._folder, entries, self._algorithm)
        self._others = [
            rpc.remote(owner, new_part, (self._folder, references, self._algorithm), timeout=self._timeout)
            for owner, references in there.items()
        ]
        return [self._own.plan(), *rpc.wait_all([each.rpc_async(self._timeout).plan() for each in self._others])]

    def write(self, plans: list[SavePlan]) -> list[storage.WrittenFiles]:
        assert self._own is not None  # plan() was called before
        calls = [each.rpc_async(self._timeout).write(plan) for each, plan in zip(self._others, plans[1:], strict=True)]
        return [self._own.write(plans[0]), *rpc.wait_all(calls)]


@off_loop("await checkpoint.load_async(...)")
def load(
    path: str | os.PathLike[str],
    state: MutableMapping[str, object],
    *,
    group: ProcessGroup | None = None,
    timeout: float = rpc.constants.UNSET_RPC_TIMEOUT,
) -> None:
    """Loads what `save` wrote, on any number of ranks and owners. All ranks of the group call it.

    The keys select what is loaded; a checkpoint may have more. Tensors, modules and objects with `load_state_dict` get
    their values in place, at the owner if they are behind a reference. Other values are replaced in `state`.
    `load` unpickles the index and values other than tensors: load only checkpoints that you trust.

    Args:
        path, group, timeout: as for `save`.
        state: the values by key; changed.

    Raises:
        ConfigError: there is no checkpoint, or it does not fit; some values may have changed already.
        CheckpointError: files are damaged, or another rank failed.
        WorkerLost: an owner died. RankLost: a rank died.
    """
    folder = str(checkpoint_path(path).resolve())  # all read the same one, even if a newer one is published now

    def read() -> None:
        here, there = by_owner(state)
        calls = [rpc.rpc_async(owner, load_at_owner, (folder, each), timeout=timeout) for owner, each in there.items()]
        stored = storage.StoredEntries(folder)
        for key, value in here.items():
            state[key] = stored.restore(key, value)
        rpc.wait_all(calls)

    Ranks(group).all("loading", read)


load_async = async_form(load)
"""`load` as a coroutine function."""


References = dict[str, RRef[Any]]


def by_owner(state: Mapping[str, object]) -> tuple[dict[str, object], dict[str, References]]:
    """The values of this process, and the references, by their owner's name.

    Raises:
        ConfigError: `state` is not a dictionary of values by key.
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


def new_part(folder: str, references: References, algorithm: str) -> storage.CheckpointPart:
    """Runs at the owner: the part that it will write."""
    entries: Entries = {}
    for key, reference in references.items():
        entries |= entries_of(key, reference.local_value())
    return storage.CheckpointPart(folder, entries, algorithm)


def load_at_owner(folder: str, references: References) -> None:
    """Runs at the owner: loads the stored values in place.

    Raises:
        ConfigError: a value cannot be changed in place.
    """
    stored = storage.StoredEntries(folder)
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
    """Does a step on all ranks, or on the first; a step that fails on one rank fails on all.

    Raises:
        ConfigError: the group is not one of ours, or this process is not in it.
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
        """Does the step on all ranks, and returns their results. The error names the step as `what`."""
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
            own = (False, described_error(exc))
        outcomes: list[object] = [None] * self._group.size()
        collectives.all_gather_object(outcomes, own, group=self._group)
        found = cast("list[tuple[bool, T | str]]", outcomes)
        if error is not None:
            raise error
        if failed := [f"rank {rank}: {text}" for rank, (succeeded, text) in enumerate(found) if not succeeded]:
            raise CheckpointError(f"{what} failed on {'; '.join(failed)}")
        return [cast(T, result) for _, result in found]

    def first(self, what: str, step: Callable[[], T]) -> T:
        """Does the step on the first rank only, and returns its result on all."""
        return cast(T, self.all(what, lambda: step() if self.is_first else None)[0])
