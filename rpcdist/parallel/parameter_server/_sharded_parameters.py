"""The common part of `ParameterServer` and `ShardedEmbedding`: calls to all servers, and their complete state.

The states of all servers are joined to one dictionary, in the form of `torch.optim`, and split for any number of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rpcdist.rpc as rpc
from rpcdist.errors import ConfigError, DeadlineExceeded
from rpcdist.parallel.parameter_server._shard import Gradient, Mode, ParameterShard, ShardConfig, ShardState
from rpcdist.rpc._current import current_agent
from rpcdist.rpc._executors.blocking import async_form, off_loop
from rpcdist.time_limits import ANSWER_LIMIT_S


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The rows of each server, as slices of the first dimension. A tensor without dimensions counts as one row."""

    shape: tuple[int, ...]
    rows: tuple[slice, ...]

    @classmethod
    def in_blocks(cls, shape: Sequence[int], num_servers: int) -> RowLayout:
        """Gives each server a block of consecutive rows."""
        num_rows = shape[0] if shape else 1
        ends = [num_rows * index // num_servers for index in range(num_servers + 1)]
        return cls(tuple(shape), tuple(map(slice, ends, ends[1:])))

    @classmethod
    def in_turns(cls, shape: Sequence[int], num_servers: int) -> RowLayout:
        """Puts row `i` on server `i % num_servers`, to spread consecutive rows, which are often used equally much."""
        return cls(tuple(shape), tuple(slice(index, None, num_servers) for index in range(num_servers)))

    def split(self, whole: Tensor) -> list[Tensor]:
        """Returns the part of each server, as views."""
        matrix = whole if self.shape else whole.reshape(1)
        return [matrix[rows] for rows in self.rows]

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the whole parameter from the parts of all servers. Gradients flow through if rows are in blocks."""
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
        """Returns the shape of one server's part."""
        num_rows = len(range(*self.rows[index].indices(self.shape[0] if self.shape else 1)))
        return (num_rows, *self.shape[1:])

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def join_states(layouts: Mapping[str, RowLayout], trained: Sequence[str], states: Sequence[ShardState]) -> ShardState:
    """Returns the state of the whole parameters, as in one process: `parameters`, by name, and `optimizer`."""
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
    """Returns the part of each server.

    Raises:
        ConfigError: the state belongs to other parameters.
    """
    if not isinstance(state, Mapping) or not {"parameters", "optimizer"} <= state.keys():
        raise ConfigError("this is not a state of parameter servers: load the result of their state_dict()")
    found = {name: tuple(value.shape) for name, value in state["parameters"].items()}
    expected = {name: layout.shape for name, layout in layouts.items()}
    if found != expected:
        raise ConfigError(f"the state belongs to other parameters: it has {found}, but these servers have {expected}")
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
    """Joins one entry of an optimizer's state, which is divided like the parameter or equal on all servers."""
    if not isinstance(parts[0], Tensor) or parts[0].dim() == 0:
        return parts[0]
    if [tuple(part.shape) for part in parts] != [layout.part_shape(index) for index in range(len(parts))]:
        raise ConfigError(
            f"the shape of {key!r} in the optimizer's state differs from the parameter's, so the parts of several "
            "servers cannot be joined; use one server, or an element-wise optimizer"
        )
    return layout.merge(parts)


def _part(layout: RowLayout, whole: Any, server: int) -> Any:
    if not isinstance(whole, Tensor) or tuple(whole.shape) != layout.shape or not layout.shape:
        return whole
    return layout.split(whole)[server].contiguous()


class ShardedParameters:
    """Parameters whose rows are on several servers. It can be sent to other workers, as an argument of a call.

    The parameters live as long as such an object exists on any worker. Its methods may be called on any thread; methods
    that take a step, one at a time.
    """

    def __init__(
        self,
        shards: Sequence[rpc.RRef[ParameterShard]],
        layouts: Mapping[str, RowLayout],
        trained: Sequence[str],
        config: ShardConfig,
        timeout: float,
    ) -> None:
        self._shards = list(shards)
        self._layouts = dict(layouts)
        self._trained = tuple(trained)
        self._waits = config.steps_apart is not None
        self._timeout = timeout
        self._step: int | None = None  # this trainer's last step; None before it takes part
        # Waits until all shards exist, and raises the error if one cannot be made.
        self._server_devices = [torch.device(device) for device in self._ask("device")]

    def __repr__(self) -> str:
        size = sum(layout.num_elements for layout in self._layouts.values())
        return f"<{type(self).__name__} of {size:,} elements on {', '.join(self.servers)}>"

    @property
    def servers(self) -> tuple[str, ...]:
        """The names of the workers that have the parameters."""
        return tuple(shard.owner_name() for shard in self._shards)

    @off_loop("await server.leave_async(...)")
    def leave(self) -> None:
        """Ends the part of this trainer, so that others do not wait for it. With its next step it takes part again."""
        self._step = None
        self._ask("leave", _my_name())

    leave_async = async_form(leave)

    @off_loop("await server.set_options_async(...)")
    def set_options(self, **options: Any) -> None:
        """Changes options of the optimizer on all servers, for example `lr=0.01`.

        Raises:
            ConfigError: the optimizer has no such option, or a number is replaced by another type.
        """
        self._ask("set_options", options)

    set_options_async = async_form(set_options)

    @off_loop("await server.state_dict_async(...)")
    def state_dict(self) -> dict[str, Any]:
        """Returns all parameters and the state of their optimizer on the CPU, in the form of one process.

        `parameters` has the tensors by name, `optimizer` the state of one optimizer of `torch.optim` over all of them.
        Each server's part is consistent; if trainers push meanwhile, the parts of different servers may differ by a
        step.
        """
        return join_states(self._layouts, self._trained, self._ask("state"))

    state_dict_async = async_form(state_dict)

    @off_loop("await server.load_state_dict_async(...)")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state from `state_dict`, also from another number of servers.

        Raises:
            ConfigError: the state belongs to other parameters.
        """
        parts = split_state(self._layouts, self._trained, state)
        self._ask_each("load_state", [(part,) for part in parts])

    load_state_dict_async = async_form(load_state_dict)

    def _sendable(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The parts for the servers, each on the CPU unless it goes from its GPU to that of its server."""
        maps = current_agent().options.device_maps
        sendable: list[Tensor] = []
        for part, device, shard in zip(parts, self._server_devices, self._shards, strict=True):
            way = maps.get(shard.owner_name()) or {part.device: part.device}
            goes_there = device.type == "cuda" and way.get(part.device) == device
            sendable.append(part if goes_there else part.cpu())
        return sendable

    def _push(self, parts: Sequence[Sequence[Gradient]], wants_values: bool) -> list[Any]:
        """Pushes the gradients for each server; returns the servers' answers when this trainer may continue."""
        me, begins = _my_name(), self._step is None
        last = self._step
        if last is None:
            last = self._shards[0].rpc_sync(self._timeout).floor() if self._waits else 0
        try:
            answers = self._ask_each("push", [(me, last + 1, begins, part, wants_values) for part in parts])
        except DeadlineExceeded as exc:
            if slowest := self._slowest():
                raise DeadlineExceeded(
                    f"{me!r} waited for other trainers until the timeout: {slowest}. A trainer must call "
                    "leave() before it ends; if one is only slow, set a longer timeout, or allow more staleness"
                ) from exc
            raise
        except Exception:
            self._step = None  # some servers may count this step, and others not: begin again
            raise
        # A server that took this worker for dead does not count it any more, so the next step begins again.
        self._step = last + 1 if all(takes_part for takes_part, _ in answers) else None
        return [values for _, values in answers]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_step": None}  # the receiving process is another trainer

    def _slowest(self) -> str:
        """Names the trainers for which the servers wait, from servers that answer quickly."""
        found: dict[str, int] = {}
        for call in [shard.rpc_async(ANSWER_LIMIT_S).slowest() for shard in self._shards]:
            if call.exception(timeout=None) is None:
                found |= call.value()
        return ", ".join(f"{name!r} has taken {step} steps" for name, step in sorted(found.items()))

    def _ask(self, method: str, *args: object) -> list[Any]:
        return self._ask_each(method, [args] * len(self._shards))

    def _ask_each(self, method: str, args: Sequence[tuple[object, ...]]) -> list[Any]:
        calls = [
            getattr(shard.rpc_async(self._timeout), method)(*each)
            for shard, each in zip(self._shards, args, strict=True)
        ]
        return rpc.wait_all(calls)


def make_config(
    servers: Sequence[str],
    optimizer_class: Callable[..., torch.optim.Optimizer],
    defaults: Mapping[str, Any],
    mode: Mode,
    staleness: int | None,
    trainers: Sequence[str],
    device: str | torch.device,
) -> ShardConfig:
    """Makes the configuration of the servers.

    Raises:
        ConfigError: the arguments do not fit together.
    """
    if isinstance(servers, str) or not servers or len(set(servers)) < len(servers):
        raise ConfigError(f"servers must be the names of different workers, such as ['server0'], not {servers!r}")
    if isinstance(optimizer_class, torch.optim.Optimizer) or not callable(optimizer_class):
        raise ConfigError(
            f"optimizer_class is {_what(optimizer_class)}: pass the class and its options, such as torch.optim.SGD, "
            "lr=0.1; each server makes an optimizer of its rows"
        )
    if mode not in ("async", "sync"):
        raise ConfigError(f"mode {mode!r}: pass 'async' or 'sync'")
    if staleness is not None and (mode == "sync" or not isinstance(staleness, int) or staleness < 0):
        raise ConfigError(
            f"staleness {staleness} must be a number of steps, at least 0, and requires mode='async'; with 'sync', no "
            "trainer is ahead"
        )
    if isinstance(trainers, str) or len(set(trainers)) < len(trainers):
        raise ConfigError(f"trainers must be the names of different workers, such as ['trainer0'], not {trainers!r}")
    if not trainers and (mode == "sync" or staleness is not None):
        raise ConfigError("name the trainers that wait for each other: trainers=['trainer0', 'trainer1']")
    return ShardConfig(optimizer_class, dict(defaults), mode, staleness, tuple(trainers), str(device))


def _my_name() -> str:
    return rpc.get_worker_info().name


def values_of(parameters: Mapping[str, Tensor] | torch.nn.Module) -> dict[str, Tensor]:
    """Returns the parameters by name.

    Raises:
        ConfigError: the argument is another object.
    """
    if isinstance(parameters, torch.nn.Module):
        return dict(parameters.named_parameters())
    if not isinstance(parameters, Mapping) or not all(isinstance(value, Tensor) for value in parameters.values()):
        raise ConfigError(f"got {_what(parameters)}: pass a module, or a dictionary of its tensors by name")
    return dict(parameters)


def _what(value: object) -> str:
    return repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
