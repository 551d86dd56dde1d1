"""`ElasticDataParallel`: data-parallel training whose ranks may die and be replaced while the others continue."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from os import PathLike
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import nn

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup, Store
from rpcdist.collectives.elastic_group import ElasticGroup
from rpcdist.errors import CollectiveError, CollectiveTimeout, ConfigError, GroupAborted, RankLost
from rpcdist.parallel._ddp._state_transfer import HasState, receive_state, send_state, take_over
from rpcdist.parallel.distributed import DistributedDataParallel
from rpcdist.time_limits import STORE_CHECK_INTERVAL_S
from rpcdist.torch_optimizers import take_step

__all__ = ["ElasticDataParallel", "ElasticStep", "HasState"]

MAX_TIMEOUTS = 3
"""The number of timeouts of a step, without a lost rank, that count as a mistake in the program."""
_OURS = ("process_group", "device_mesh", "init_sync", "delay_all_reduce_named_params", "param_to_hook_all_reduce")

_STATE_METHODS = ("state_dict", "load_state_dict")


class Optimizer(HasState, Protocol):
    """`torch.optim.Optimizer`, or an object with its methods."""

    def zero_grad(self) -> object: ...
    def step(self) -> object: ...


@dataclass(slots=True)
class ElasticStep:
    """One attempt at a step; `with step:` around the forward and the backward pass.

    Attributes:
        number: the number of the step, from 0, equal on all ranks.
        rank: the rank of this process in this attempt.
        world_size: number of ranks in this attempt.
        counted: whether the optimizer stepped; otherwise the step is tried again, perhaps with other ranks.
    """

    number: int
    rank: int
    world_size: int
    _model: ElasticDataParallel = field(repr=False)
    counted: bool = False
    _entered: bool = field(default=False, repr=False)

    def __enter__(self) -> Self:
        self._entered = True
        self._model._begin_step()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self._model._commit()
            self.counted = True
            return False
        return self._model._take_back(error)


class ElasticDataParallel(nn.Module):
    """`DistributedDataParallel` for ranks that join and leave; it also replaces `init_process_group`.

        model = ElasticDataParallel(module, optimizer, store, num_ranks=4, min_ranks=2)
        for step in model.steps(1000):
            with step:
                inputs, targets = batch_of(step.number, step.rank, step.world_size)
                criterion(model(inputs), targets).backward()

    The `with` block computes gradients, which are cleared at its start. At its end they are averaged over all ranks,
    and the optimizer steps. If a rank is lost meanwhile, the block ends, and the same step is repeated with the
    remaining ranks. A process that is started later gets module, optimizer and step from a rank that trains. A rank
    takes a step completely or not at all; a rank that missed a step of another rank gets the state from that rank.

    A step that does not count is undone, also in buffers such as running statistics, but not in random number
    generators. After the last step the group stays open, e.g. for common measurements, until `close`. In evaluation
    mode the module is called without communication.

    Args:
        module: on the CPU, or on a GPU with a backend that goes through the CPU.
        optimizer: the optimizer of the module's parameters, or several. The block must not step them.
        store, num_ranks, min_ranks, timeout, backend: see `rpcdist.collectives.elastic_group.ElasticGroup`.
        stateful: other objects whose state new ranks need, with `state_dict` and `load_state_dict`.
        first_step: the number of steps of a state that was loaded from a checkpoint.
        comm_hook: a communication hook without a state; see `register_comm_hook`.
        **ddp_options: other arguments of `DistributedDataParallel`.

    Attributes:
        module: the module.
        step: the number of steps that the state contains.
        num_restarts: the number of times that the group was formed again.

    Raises:
        ConfigError: an argument is wrong, or a process group exists already.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        store: Store,
        *,
        num_ranks: int,
        min_ranks: int = 1,
        timeout: timedelta | None = None,
        backend: str = "tcp",
        stateful: Sequence[HasState] = (),
        first_step: int = 0,
        comm_hook: Any = None,
        **ddp_options: Any,
    ) -> None:
        super().__init__()
        for name in _OURS:
            if name in ddp_options:
                raise ConfigError(f"ElasticDataParallel takes no {name!r}: the ranks change while it trains")
        if "nccl" in backend:
            raise ConfigError("a GPU reports a lost rank too late to undo a step: pass backend='tcp'")
        self.step = first_step
        self.num_restarts = -1
        self._optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        _check_arguments(module, self._optimizers, store, stateful)
        self.module = module
        self._stateful = list(stateful)
        self._comm_hook = comm_hook
        self._ddp_options = ddp_options
        self._wrapped: list[DistributedDataParallel] = []  # in a list, so that it is not a submodule
        self._buffers_before: list[torch.Tensor] = []
        self._inside = self._started = False
        self._is_new = True
        self._failure: CollectiveError | None = None
        self._num_timeouts = 0
        self._checked_at_s = 0.0
        self._elastic = ElasticGroup(
            store,
            num_ranks=num_ranks,
            min_ranks=min_ranks,
            timeout=timeout,
            backend=backend,
            description=_description(module, self._optimizers, backend, ddp_options),
        )
        self._group: ProcessGroup | None = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass. Within a step, its backward pass averages the gradients over the ranks."""
        target = self._wrapped[0] if self._inside and self.training else self.module
        return target(*inputs, **kwargs)

    # ------------------------------------------------------------ steps

    def steps(self, total: int) -> Iterator[ElasticStep]:
        """Yields the steps below `total`; a step that did not count is repeated. Call it once.

        It joins the group first, and ends on all ranks together, with the same state.

        Raises:
            ConfigError: it was called twice, or a step was not entered with `with`.
            JobEnded: the others have already finished.
            CollectiveTimeout: a step timed out several times, although no rank is lost.
            RendezvousError, DistStoreError: see `ElasticGroup.form`.
        """
        if self._started:
            raise ConfigError(
                "steps() can be called only once: a new process could not know in which call the other ranks are"
            )
        self._started = True
        finished = False
        try:
            while not finished:
                group = self._current_group()
                if self.step < total:
                    yield (step := ElasticStep(self.step, group.rank(), group.size(), self))
                    if not step._entered:  # it would be repeated forever
                        raise ConfigError("the step was not taken: write `with step:` around forward and backward pass")
                else:
                    finished = self._finish(group)
        finally:
            if not finished:
                self.close()  # after an error or `break` the others continue

    def _current_group(self) -> ProcessGroup:
        """Returns the group, formed again if it has failed or a process wants to join."""
        now = time.monotonic()
        if self._group is not None and self._failure is None and now - self._checked_at_s > STORE_CHECK_INTERVAL_S:
            self._checked_at_s = now
            if self._elastic.others_wait():
                self._group = None
        while self._group is None or self._failure is not None:
            self._count_timeouts()
            group = self._elastic.form(self.step, is_new=self._is_new)
            try:
                self._synchronise(group)
            except (RankLost, CollectiveTimeout, GroupAborted) as exc:
                self._failure = exc
                continue
            self._group, self._failure = group, None
            self.num_restarts += 1
        return self._group

    def _count_timeouts(self) -> None:
        failure, self._failure = self._failure, None
        if isinstance(failure, CollectiveTimeout):
            self._num_timeouts += 1
            if self._num_timeouts >= MAX_TIMEOUTS:
                raise failure

    def _synchronise(self, group: ProcessGroup) -> None:
        """Sends the newest state to ranks that are behind, and changes the model's group."""
        closed = self._elastic.round
        assert closed is not None, "the group is formed"
        if group.rank() == closed.source:
            send_state(self._state(), group, closed.behind)
        elif group.rank() in closed.behind:
            step = closed.members[closed.source].progress
            others = (*self._optimizers, *self._stateful)
            take_over(receive_state(group, closed.source), self.module, others, closed.source, step)
            self.step = step
        if closed.behind:
            collectives.barrier(group)  # the state of new ranks does not count until all have it
        self._is_new = False
        if self._wrapped:
            self._wrapped[0]._update_process_group(group)
            return
        wrapped = DistributedDataParallel(self.module, process_group=group, init_sync=False, **self._ddp_options)
        if self._comm_hook is not None:
            wrapped.register_comm_hook(None, self._comm_hook)
        self._wrapped.append(wrapped)

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "module": self.module.state_dict(),
            "others": [each.state_dict() for each in (*self._optimizers, *self._stateful)],
        }

    def _finish(self, group: ProcessGroup) -> bool:
        """Returns whether all ranks have taken the last step, and so have the same final state."""
        try:
            collectives.barrier(group)
        except (RankLost, CollectiveTimeout, GroupAborted) as exc:
            self._failure = exc
            return False
        self._elastic.end()
        return True

    # ------------------------------------------------------------ one step

    def _begin_step(self) -> None:
        self._inside = True
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self._buffers_before = [buffer.clone() for buffer in self.module.buffers()]

    def _commit(self) -> None:
        """Finishes a step whose gradients are complete, which needs no other rank."""
        self._inside = False
        for optimizer in self._optimizers:
            take_step(optimizer)
        self.step += 1
        self._num_timeouts = 0

    def _take_back(self, error: BaseException) -> bool:
        """Undoes the step; returns whether to try it again."""
        self._inside = False
        if not isinstance(error, RankLost | CollectiveTimeout | GroupAborted):
            return False
        with torch.no_grad():
            for buffer, before in zip(self.module.buffers(), self._buffers_before, strict=True):
                buffer.copy_(before)
        self._failure = error
        return True

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Leaves the group; if the training has not ended, the other ranks continue. Idempotent, bounded."""
        self._group = None
        self._elastic.leave()


def _check_arguments(module: object, optimizers: Sequence[object], store: object, stateful: object) -> None:
    """Raises `ConfigError`, which says what to pass instead."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module is a {type(module).__name__}: pass an nn.Module")
    for each in optimizers:
        if isinstance(each, type) or not all(hasattr(each, name) for name in ("step", "zero_grad", *_STATE_METHODS)):
            raise ConfigError(
                f"{each!r} is not an optimizer: pass one, such as torch.optim.SGD(module.parameters(), lr=0.1)"
            )
    stepped = {id(it) for each in optimizers for group in getattr(each, "param_groups", ()) for it in group["params"]}
    if stepped and stepped.isdisjoint(map(id, module.parameters())):
        raise ConfigError("the optimizer has none of the module's parameters: make it from module.parameters()")
    if isinstance(store, (str, PathLike)):
        raise ConfigError(f"store is {store!r}: pass a store, such as rpcdist.collectives.FileStore({str(store)!r})")
    if not isinstance(stateful, Sequence) or not all(hasattr(it, name) for it in stateful for name in _STATE_METHODS):
        raise ConfigError(
            "stateful must be a list of objects with state_dict() and load_state_dict(), such as [scheduler]"
        )


def _description(module: nn.Module, optimizers: Sequence[Optimizer], backend: str, options: dict[str, Any]) -> str:
    """Describes the facts that must be equal on all ranks, with a digest of the details."""
    parameters = list(module.named_parameters())
    details = [(name, str(each.dtype), tuple(each.shape), each.requires_grad) for name, each in parameters]
    kinds = [type(each).__name__ for each in optimizers]
    digest = hashlib.sha256(repr((details, kinds, backend, sorted(options))).encode()).hexdigest()[:12]
    elements = sum(each.numel() for _, each in parameters)
    return f"{len(parameters)} parameters of {elements} elements with {', '.join(kinds)} (digest {digest})"
