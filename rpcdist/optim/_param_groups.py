"""Parameter groups: distributing them over the owners of the parameters, and merging the owners' optimizer states.

Pure functions: no calls are made here. The *number* of a parameter is its position among all parameters of the
optimizer, in the order in which the user gave them. Checkpoints use the numbers, like those of `torch.optim`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rpcdist.errors import ConfigError
from rpcdist.rpc import RRef, WorkerInfo

_MISSING = object()
_IMMUTABLE = frozenset((bool, float, int, str, type(None)))  # a copy of one is the same object

Group = dict[str, Any]
"""A parameter group in the form of `torch.optim`, with references as `params`, and options such as `lr`."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The parameters that one worker owns.

    Attributes:
        groups: for each of its local groups, the index of the user's group.
        numbers: for each of its local groups, the numbers of the parameters.
        params: for each of its local groups, the references.
    """

    owner: WorkerInfo
    groups: list[int]
    numbers: list[list[int]]
    params: list[list[RRef[torch.Tensor]]]

    @property
    def num_params(self) -> int:
        return sum(map(len, self.numbers))

    def flat_numbers(self) -> list[int]:
        """The numbers of all its parameters, in the order of the local optimizer."""
        return [number for numbers in self.numbers for number in numbers]


def parse_groups(params: Iterable[Any]) -> tuple[list[Group], bool]:
    """The parameter groups of a list of references, or of a list of dictionaries with such lists.

    Returns:
        The groups, copied one level deep, and whether `params` is a plain list.

    Raises:
        TypeError: an element is not a reference.
        ValueError: there are no parameters.
    """
    if isinstance(params, torch.Tensor | RRef):
        raise TypeError(f"params_rref is a {type(params).__name__}; it must be a list of RRefs")
    given = list(params)
    is_flat = not given or not isinstance(given[0], Mapping)
    groups = [{"params": given}] if is_flat else [{**group, "params": list(group["params"])} for group in given]
    if not any(group["params"] for group in groups):
        raise ValueError("DistributedOptimizer got an empty parameter list")
    for number, param in enumerate(param for group in groups for param in group["params"]):
        if not isinstance(param, RRef):
            raise TypeError(
                f"params_rref[{number}] is a {type(param).__name__}, not an RRef; use rpc.RRef(parameter) for a "
                "parameter of this process, and RemoteModule.remote_parameters() for the parameters of a remote module"
            )
    return groups, is_flat


def place(groups: Sequence[Group]) -> list[Shard]:
    """The shard of each owner, in the order of the owners' first parameters."""
    shards: dict[WorkerInfo, Shard] = {}
    number = 0
    for index, group in enumerate(groups):
        for param in group["params"]:
            owner = param.owner()
            shard = shards.setdefault(owner, Shard(owner, [], [], []))
            if not shard.groups or shard.groups[-1] != index:
                shard.groups.append(index)
                shard.numbers.append([])
                shard.params.append([])
            shard.numbers[-1].append(number)
            shard.params[-1].append(param)
            number += 1
    return list(shards.values())


def options_of(group: Mapping[str, Any]) -> Group:
    """A deep copy of a group's options, without its parameters."""
    return copy.deepcopy({name: value for name, value in group.items() if name != "params"})


def changed_options(sent: Sequence[Group], groups: Sequence[Group]) -> list[Group]:
    """For each group, the options that differ from those that were sent before."""
    changed: list[Group] = []
    for before, group in zip(sent, groups, strict=True):
        changes: Group = {}
        for name, value in group.items():
            known = before.get(name, _MISSING)
            if (known is value and type(value) in _IMMUTABLE) or name == "params":
                continue  # nearly always; `nan` is unchanged, too
            if known is _MISSING or not _equal(known, value):
                changes[name] = value
            elif type(value) in _IMMUTABLE:
                before[name] = value  # the same object from now on, which is compared faster
        changed.append(changes)
    return changed


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return type(first) is type(second) and torch.equal(first, second)
    return type(first) is type(second) and bool(first == second)


def gather_state(
    shards: Sequence[Shard], groups: Sequence[Group], parts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The owners' optimizer states as one dictionary, as one optimizer of all parameters would have it."""
    state: dict[Any, Any] = {}
    for shard, part in zip(shards, parts, strict=True):
        numbers = shard.flat_numbers()
        for key, value in part["state"].items():
            state[numbers[key] if isinstance(key, int) else key] = value
    packed: list[Group] = []
    number = 0
    for group in groups:
        count = len(group["params"])
        packed.append({**options_of(group), "params": list(range(number, number + count))})
        number += count
    return {"state": dict(sorted(state.items(), key=_state_order)), "param_groups": packed}


def _state_order(item: tuple[Any, Any]) -> tuple[bool, Any]:
    key = item[0]
    return not isinstance(key, int), key if isinstance(key, int) else str(key)


def scatter_state(
    shards: Sequence[Shard], groups: Sequence[Group], state_dict: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Splits a state that `gather_state` or an optimizer of `torch.optim` has made into one part for each owner.

    Raises:
        ConfigError: (a ValueError) the state does not fit the parameter groups.
    """
    saved: Sequence[Group] = state_dict["param_groups"]
    sizes, saved_sizes = [len(g["params"]) for g in groups], [len(g["params"]) for g in saved]
    if sizes != saved_sizes:
        text = f"the state has parameter groups of {saved_sizes} parameters, but this optimizer has groups of {sizes}"
        raise ConfigError(text)
    keys = [key for group in saved for key in group["params"]]  # of the parameters in the saved state, by number
    parts = []
    for shard in shards:
        local = {keys[number]: index for index, number in enumerate(shard.flat_numbers())}
        state = {
            local[key] if key in local else key: value
            for key, value in state_dict["state"].items()
            if key in local or key not in keys
        }
        parts.append({"state": state, "param_groups": _local_groups(shard, saved)})
    return parts


def _local_groups(shard: Shard, saved: Sequence[Group]) -> list[Group]:
    local: list[Group] = []
    start = 0
    for index, numbers in zip(shard.groups, shard.numbers, strict=True):
        local.append({**saved[index], "params": list(range(start, start + len(numbers)))})
        start += len(numbers)
    return local
