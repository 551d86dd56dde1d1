"""The contents of one server: its rows of the parameters, their optimizer, and the waiting trainers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.futures import Future
from torch.utils._pytree import tree_map_only

import rpcdist.rpc as rpc
from rpcdist.errors import ConfigError, abridged
from rpcdist.rpc._devices.handler_streams import in_default_streams
from rpcdist.torch_optimizers import take_step

SparseGradient = tuple[Tensor, Tensor]
"""The numbers of rows (n,) int64, in which a row may occur twice, and their gradients (n, ...)."""

Gradient = Tensor | SparseGradient | None
"""The gradient of one parameter; None if the loss did not depend on it."""


def check_gradients(parameters: Sequence[Tensor], gradients: Sequence[Gradient]) -> None:
    """Checks that one trainer's gradients fit; others would fail the step of all, or be written outside the rows.

    Raises:
        ConfigError: a gradient does not fit.
    """
    if gradients and len(gradients) != len(parameters):
        raise ConfigError(f"{len(gradients)} gradients were pushed, for {len(parameters)} parameters")
    for parameter, gradient in zip(parameters, gradients, strict=False):
        if gradient is None:
            continue
        if isinstance(gradient, Tensor):
            values, shape = gradient, parameter.shape
        else:
            rows, values = gradient
            shape = torch.Size((len(rows), *parameter.shape[1:]))
            if rows.dtype != torch.int64 or rows.dim() != 1:
                raise ConfigError(
                    f"rows must be numbers (n,) of int64, but {rows.dtype} of {tuple(rows.shape)} was pushed"
                )
            if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(parameter):
                raise ConfigError(f"gradients were pushed for rows outside the {len(parameter)} rows of this server")
        if values.shape != shape or values.dtype != parameter.dtype:
            raise ConfigError(
                f"a gradient of {values.dtype} {tuple(values.shape)} was pushed, but {parameter.dtype} "
                f"{tuple(shape)} is required"
            )


def mean_gradient(parameter: Tensor, gradients: Sequence[Gradient]) -> Tensor | None:
    """Returns the gradient of one process with all inputs: the mean over the trainers, in the given order.

    If some trainers have no gradient, theirs count as zeros.

    Args:
        parameter: has the shape and device of the result.
        gradients: the gradient of each trainer, all dense or all sparse.

    Returns:
        A dense tensor, or a sparse one (COO); None if no trainer has a gradient.
    """
    present = [each for each in gradients if each is not None]
    if not present:
        return None
    if isinstance(present[0], Tensor):
        dense = [each.to(parameter.device) for each in present if isinstance(each, Tensor)]
        total = dense[0]
        for other in dense[1:]:
            total = total + other
        return total if len(gradients) == 1 else total / len(gradients)
    sparse = [each for each in present if not isinstance(each, Tensor)]
    rows = torch.cat([rows for rows, _ in sparse]).to(parameter.device)
    values = torch.cat([values for _, values in sparse]).to(parameter.device)
    if len(gradients) > 1:
        values = values / len(gradients)
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, parameter.shape, device=values.device, check_invariants=False
    ).coalesce()


T = TypeVar("T")


class StepClock(Generic[T]):
    """Counts the steps of each trainer; a stale synchronous parallel clock (Ho and others, 2013).

    Pure: no lock, no thread, no clock of the machine. Each server has one, and they must not wait for each other:

     1. A trainer numbers its steps. When it begins it gets `floor` of the first server, and counts from there. So a
        step has the same number on all servers, even if it arrives at them in different orders.
     2. `floor` is the lowest step of the trainers that take part, and never falls. A step is answered when it is at
        most `floor + staleness`: it waits only for lower numbers, so all servers answer the slowest trainer.
     3. A staleness of 0 makes rounds: all trainers arrive with the same number, then all continue.
     4. Others do not wait for a trainer that leaves or dies. The same number may arrive again, from a call that was
        given up or a process that was replaced.

    Args:
        trainers: the trainers that take part from the start, by name.
        staleness: steps that a trainer may be ahead of the slowest one.

    Attributes:
        floor: the number of steps that all trainers have taken.
    """

    def __init__(self, trainers: Iterable[str], staleness: int) -> None:
        self.floor = 0
        self._staleness = staleness
        self._steps = dict.fromkeys(trainers, 0)
        self._waiting: list[tuple[int, T]] = []

    def __contains__(self, trainer: str) -> bool:
        return trainer in self._steps

    def arrive(self, trainer: str, step: int, ticket: T, takes_part: bool = True) -> list[T]:
        """Notes a trainer's step; the trainer may take the next one when its ticket is returned, now or later.

        Args:
            ticket: any object that represents its call.
            takes_part: whether the others wait for the trainer from now on.

        Returns:
            The tickets of the trainers that may continue.
        """
        if takes_part:
            self._steps[trainer] = step
        self._waiting.append((step, ticket))
        return self._released()

    def remove(self, trainer: str) -> list[T]:
        """Removes a trainer that left or died. Returns the tickets of the trainers that may continue without it."""
        self._steps.pop(trainer, None)
        return self._released()

    def slowest(self) -> dict[str, int]:
        """Returns the trainers for which others wait, with their steps; empty if no trainer waits."""
        if not self._waiting:
            return {}
        return {trainer: step for trainer, step in self._steps.items() if step == self.floor}

    def _released(self) -> list[T]:
        newest = max((step for step, _ in self._waiting), default=self.floor)  # if no trainer takes part
        self.floor = max(self.floor, min(self._steps.values(), default=newest))
        limit = self.floor + self._staleness
        free = [ticket for step, ticket in self._waiting if step <= limit]
        self._waiting = [(step, ticket) for step, ticket in self._waiting if step > limit]
        return free


Mode = Literal["async", "sync"]
Values = list[Tensor]
Reply = Future[tuple[bool, Values | None]]
"""Whether the trainer takes part, and the new values if it wanted them."""

Ticket = tuple[Reply, bool, bool]
"""A waiting call: its reply, whether the trainer takes part, and whether it wants the new values."""

ShardState = dict[str, Any]
"""`values`, the tensors by number, and `optimizer`, the state of the optimizer of `torch.optim`; on the CPU."""


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """The configuration of all servers; see `ParameterServer`."""

    optimizer_class: Callable[..., torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    mode: Mode = "async"
    staleness: int | None = None
    trainers: tuple[str, ...] = ()
    device: str = "cpu"

    @property
    def steps_apart(self) -> int | None:
        """Steps that a trainer may be ahead of the slowest one; None if trainers do not wait for each other."""
        return 0 if self.mode == "sync" else self.staleness


class ParameterShard:
    """Rows of parameters on this server. Calls of several trainers run on several threads.

    One lock guards the values, so gradients are applied atomically, and trainers get consistent values.
    """

    def __init__(self, config: ShardConfig, values: Sequence[Tensor], is_trained: Sequence[bool]) -> None:
        self._config = config
        self._parameters = [
            value.detach().to(config.device, copy=True).requires_grad_(trained)
            for value, trained in zip(values, is_trained, strict=True)
        ]
        trained_ones = [parameter for parameter in self._parameters if parameter.requires_grad]
        self._optimizer = config.optimizer_class(trained_ones, **config.defaults)
        self._lock = threading.Lock()
        self._clock: StepClock[Ticket] | None = None
        self._rounds: dict[int, dict[str, Sequence[Gradient]]] = {}  # by step and trainer, until all have come
        self._gone: set[str] = set()  # workers that were lost or have left
        if config.steps_apart is not None:
            self._clock = StepClock(config.trainers, config.steps_apart)
            _watch_trainers(self)

    # ------------------------------------------------------------ values

    def pull(self, requires_grad: bool = False) -> Values:
        """Returns the values; with `requires_grad`, gradients flow back to them in an autograd context."""
        with self._lock:
            return self._copies(requires_grad)

    def _copies(self, requires_grad: bool = False) -> Values:
        return [each.clone() if requires_grad else each.detach().clone() for each in self._parameters]

    def pull_rows(self, rows: Tensor) -> Tensor:
        """Returns rows (n, ...) of the first parameter, by their numbers (n,) on this server."""
        with self._lock:
            return self._parameters[0].detach()[rows.to(self._parameters[0].device)]

    def device(self) -> str:
        """Returns the device of the values, with its index."""
        return str(self._parameters[0].device)

    def parameter(self, number: int) -> Tensor:
        """Returns the parameter itself, for `rref.remote()`."""
        return self._parameters[number]

    # ------------------------------------------------------------ steps

    def floor(self) -> int:
        """Returns the step from which a trainer that begins now counts."""
        if self._clock is None:
            return 0
        with self._lock:
            return self._clock.floor

    @rpc.functions.async_execution
    def push(self, trainer: str, step: int, begins: bool, gradients: Sequence[Gradient], wants_values: bool) -> Reply:
        """Takes a step of a trainer. The call ends when the trainer may take the next step; no thread waits for that.

        Args:
            begins: whether this is the trainer's first step after `floor`.
            gradients: the gradient of each parameter; empty for a step whose gradients are applied elsewhere.
            wants_values: whether the result has the new values.

        Raises:
            ConfigError: a gradient does not fit its parameter. The step does not count, and does not affect other
                trainers.
        """
        check_gradients(self._parameters, gradients)
        with in_default_streams(gradients) if self._parameters[0].is_cuda else nullcontext():
            return self._push(trainer, step, begins, gradients, wants_values)

    def _push(self, trainer: str, step: int, begins: bool, gradients: Sequence[Gradient], wants_values: bool) -> Reply:
        reply: Reply = Future()
        with self._lock:
            if self._config.mode == "async":
                self._step(gradients)
            if self._clock is None:
                free = [(reply, True, wants_values)]
            else:
                takes_part = trainer in self._clock or (begins and self._lives(trainer))
                step = step if takes_part else self._clock.floor + 1
                if self._config.mode == "sync" and step > self._clock.floor:  # otherwise a new trainer's round is over
                    self._rounds.setdefault(step, {})[trainer] = gradients
                free = self._clock.arrive(trainer, step, (reply, takes_part, wants_values), takes_part)
            answer = self._go_on(free)
        answer()
        return reply

    def leave(self, trainer: str) -> None:
        """Removes a trainer that takes no more steps, so that the others continue without it."""
        if self._clock is None:
            return
        with self._lock:
            answer = self._go_on(self._clock.remove(trainer))
        answer()

    def slowest(self) -> dict[str, int]:
        """Returns the trainers for which others wait, with the number of their steps."""
        if self._clock is None:
            return {}
        with self._lock:
            return self._clock.slowest()

    def _lives(self, trainer: str) -> bool:
        """Returns False for a trainer whose call arrived after its death, for which others must not wait."""
        return trainer not in self._gone or any(worker.name == trainer for worker in rpc.workers())

    def on_change(self, change: rpc.MembershipChange) -> None:
        """A worker came or went."""
        with self._lock:
            (self._gone.discard if change.kind == "joined" else self._gone.add)(change.worker.name)
        if change.kind != "joined":
            self.leave(change.worker.name)

    def _go_on(self, free: Sequence[Ticket]) -> Callable[[], None]:
        """Takes the steps of rounds that are over; the lock is held.

        Returns:
            A function that sends the replies to trainers that may take the next step, to be called without the lock.
        """
        values: Values | None = None
        error: Exception | None = None
        try:
            for ended in [step for step in sorted(self._rounds) if self._clock and step <= self._clock.floor]:
                gradients = self._rounds.pop(ended)
                self._step(*(gradients[trainer] for trainer in sorted(gradients)))
            if any(wants_values for _, _, wants_values in free):
                values = self._copies()
        except Exception as exc:  # of the optimizer: all that waited for its step get it
            error = exc

        def answer() -> None:
            for reply, takes_part, wants_values in free:
                if error is None:
                    reply.set_result((takes_part, values if wants_values else None))
                else:
                    reply.set_exception(error)  # type: ignore[arg-type]  # torch annotates it with its type variable

        return answer

    def _step(self, *of_trainers: Sequence[Gradient]) -> None:
        """Steps with the mean of the gradients of some trainers. The lock is held."""
        pushed = [gradients for gradients in of_trainers if gradients]
        if not pushed:
            return
        try:
            for number, parameter in enumerate(self._parameters):
                if parameter.requires_grad:
                    parameter.grad = mean_gradient(parameter, [gradients[number] for gradients in pushed])
            take_step(self._optimizer)
        finally:
            self._optimizer.zero_grad(set_to_none=True)

    # ------------------------------------------------------------ options and state

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Changes options of the optimizer, the learning rate for example."""
        known = self._optimizer.defaults
        optimizer = type(self._optimizer).__name__
        if unknown := options.keys() - known.keys():
            raise ConfigError(f"{optimizer} has no options {sorted(unknown)}; it has {sorted(known)}")
        for name, value in options.items():
            if isinstance(known[name], (int, float)) and not isinstance(value, (int, float, Tensor)):
                raise ConfigError(f"the option {name} of {optimizer} is a number, but not {abridged(value)}")
        with self._lock:
            for group in self._optimizer.param_groups:
                group.update(options)

    def state(self) -> ShardState:
        """A copy of everything."""
        with self._lock:
            values = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]
            return {"values": values, "optimizer": _copied(self._optimizer.state_dict())}

    def load_state(self, state: ShardState) -> None:
        with self._lock, torch.no_grad():
            self._optimizer.load_state_dict(_copied(state["optimizer"]))
            for parameter, value in zip(self._parameters, state["values"], strict=True):
                parameter.copy_(value)


def new_embedding_shard(config: ShardConfig, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> ParameterShard:
    """A shard whose one parameter is drawn here from the normal distribution, as `torch.nn.Embedding` does."""
    generator = torch.Generator(config.device).manual_seed(seed)
    rows = torch.empty(shape, dtype=dtype, device=config.device).normal_(generator=generator)
    return ParameterShard(config, [rows], [True])


def _watch_trainers(shard: ParameterShard) -> None:
    """Notifies the shard of workers that leave or are lost, as long as the shard lives."""
    known = weakref.ref(shard)

    def on_change(change: rpc.MembershipChange) -> None:
        living = known()
        stop_watching() if living is None else living.on_change(change)

    stop_watching = rpc.on_membership_change(on_change)


def _copied(value: Any) -> Any:
    """A copy of a state on the CPU; sparse tensors, as SGD keeps them for sparse gradients, become dense."""

    def copied(tensor: Tensor) -> Tensor:
        return (tensor.to_dense() if tensor.is_sparse else tensor).detach().to("cpu", copy=True)

    return tree_map_only(Tensor, copied, value)
