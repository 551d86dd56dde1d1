"""The states of all servers as one dictionary, in the form of `torch.optim`, and back, for any number of servers.

`RowLayout` says how the rows of a parameter are divided among the servers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rpcdist.errors import ConfigError
from rpcdist.parallel.parameter_server._shard import ShardState


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The rows of each server. A tensor without dimensions counts as one row.

    Attributes:
        shape: of the whole parameter.
        rows: of each server, as a slice of the first dimension.
    """

    shape: tuple[int, ...]
    rows: tuple[slice, ...]

    @classmethod
    def in_blocks(cls, shape: Sequence[int], num_servers: int) -> RowLayout:
        """Each server has a block of neighbouring rows."""
        num_rows = shape[0] if shape else 1
        ends = [num_rows * index // num_servers for index in range(num_servers + 1)]
        return cls(tuple(shape), tuple(map(slice, ends, ends[1:])))

    @classmethod
    def in_turns(cls, shape: Sequence[int], num_servers: int) -> RowLayout:
        """Row `i` is on server `i % num_servers`, so that neighbours, which are often used alike, are divided."""
        return cls(tuple(shape), tuple(slice(index, None, num_servers) for index in range(num_servers)))

    def split(self, whole: Tensor) -> list[Tensor]:
        """The part of each server; views."""
        matrix = whole if self.shape else whole.reshape(1)
        return [matrix[rows] for rows in self.rows]

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole parameter from the parts of all servers. Gradients flow through it where rows are in blocks."""
        if self.rows[0].step is None:
            return torch.cat(list(parts)).view(self.shape)
        whole = parts[0].new_empty(self.shape)
        self.write(parts, whole)
        return whole

    def write(self, parts: Sequence[Tensor], whole: Tensor) -> None:
        """Copies the parts of all servers into a tensor of the whole shape, on any device."""
        for part, target in zip(parts, self.split(whole), strict=True):
            target.copy_(part)

    def part_shape(self, index: int) -> tuple[int, ...]:
        """The shape of one server's part."""
        num_rows = len(range(*self.rows[index].indices(self.shape[0] if self.shape else 1)))
        return (num_rows, *self.shape[1:])

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def join_states(layouts: Mapping[str, RowLayout], trained: Sequence[str], states: Sequence[ShardState]) -> ShardState:
    """The state of the whole parameters, as one process would have it.

    Args:
        layouts: of all parameters, by name, in their order.
        trained: the names of those that the optimizer has, in its order.
        states: of all servers.

    Returns:
        `parameters`, the tensors by name, and `optimizer`.
    """
    parameters = {
        name: layout.merge([state["values"][number] for state in states])
        for number, (name, layout) in enumerate(layouts.items())
    }
    parts = [state["optimizer"] for state in states]
    joined = {
        number: {
            key: _join(layouts[name], key, [part["state"][number][key] for part in parts])
            for key in parts[0]["state"][number]
        }
        for number, name in enumerate(trained)
        if all(number in part["state"] for part in parts)
    }
    return {"parameters": parameters, "optimizer": {**parts[0], "state": joined}}


def split_state(layouts: Mapping[str, RowLayout], trained: Sequence[str], state: Mapping[str, Any]) -> list[ShardState]:
    """The part of each server.

    Raises:
        ConfigError: the state is of other parameters.
    """
    if not isinstance(state, Mapping) or not {"parameters", "optimizer"} <= state.keys():
        raise ConfigError("this is no state of parameter servers: load what their state_dict() returned")
    found = {name: tuple(value.shape) for name, value in state["parameters"].items()}
    expected = {name: layout.shape for name, layout in layouts.items()}
    if found != expected:
        raise ConfigError(f"the state is of other parameters: it has {found}, but these servers have {expected}")
    num_servers = len(next(iter(layouts.values())).rows)
    values = [layouts[name].split(state["parameters"][name]) for name in layouts]
    optimizer = state["optimizer"]
    return [
        {
            "values": [parts[server].contiguous() for parts in values],
            "optimizer": {
                **optimizer,
                "state": {
                    number: {key: _part(layouts[trained[number]], item, server) for key, item in entries.items()}
                    for number, entries in optimizer["state"].items()
                },
            },
        }
        for server in range(num_servers)
    ]


def _join(layout: RowLayout, key: str, parts: Sequence[Any]) -> Any:
    """One entry of an optimizer's state: divided like the parameter, or the same on all servers."""
    if not isinstance(parts[0], Tensor) or parts[0].dim() == 0:
        return parts[0]
    if [tuple(part.shape) for part in parts] != [layout.part_shape(index) for index in range(len(parts))]:
        raise ConfigError(
            f"the optimizer keeps {key!r} in another shape than the parameter, so it cannot be joined from several "
            "servers; use one server, or an optimizer that works element by element"
        )
    return layout.merge(parts)


def _part(layout: RowLayout, whole: Any, server: int) -> Any:
    if not isinstance(whole, Tensor) or tuple(whole.shape) != layout.shape or not layout.shape:
        return whole
    return layout.split(whole)[server].contiguous()
