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
"""A step that times out so often without a lost rank is a mistake in the program."""
_OURS = ("process_group", "device_mesh", "init_sync", "delay_all_reduce_named_params", "param_to_hook_all_reduce")

_STATE_METHODS = ("state_dict", "load_state_dict")


class Optimizer(HasState, Protocol):
    """`torch.optim.Optimizer`, or what works like it."""

    def zero_grad(self) -> object: ...
    def step(self) -> object: ...


@dataclass(slots=True)
class ElasticStep:
    """One attempt at a step; `with step:` around the forward and the backward pass.

    Attributes:
        number: of the step, from 0: equal on all ranks.
        rank: of this process in this attempt.
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

    The `with` block computes gradients. At its end they are averages over all ranks, and the optimizer steps; gradients
    are cleared at its beginning. If a rank is lost meanwhile, the block ends, and the same step comes again with the
    ranks that are left. A process that is started later gets module, optimizer and step from one that trains. A step is
    done on a rank wholly or not at all; a rank that missed what another one has done gets it from that one.

    Buffers, such as running statistics, are set back with a step that does not count; random numbers are not. After the
    last step the group stays, e.g. for measuring together, until `close`. In evaluation mode the module is called
    alone, without communication.

    Args:
        module: on the CPU, or on a GPU with a backend that goes through the CPU.
        optimizer: of the module's parameters; several are stepped together. The block must not step them.
        store, num_ranks, min_ranks, timeout, backend: see `rpcdist.collectives.elastic_group.ElasticGroup`.
        stateful: what else newcomers need, with `state_dict` and `load_state_dict`.
        first_step: of a state that was loaded from a checkpoint: the number of steps that it has behind it.
        comm_hook: a communication hook without a state; see `register_comm_hook`.
        **ddp_options: other arguments of `DistributedDataParallel`.

    Attributes:
        module: the module.
        step: the number of steps that the state contains.
        num_restarts: the number of times that the group was formed again.

    Raises:
        ConfigError: an argument is wrong, or there is a process group already.
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
        self._wrapped: list[DistributedDataParallel] = []  # in a list, as it holds the module, and is no part of it
        self._buffers_before: list[torch.Tensor] = []
        self._inside = self._started = False
        self._is_new = True
        self._failure: CollectiveError | None = None
        self._num_timeouts = 0
        self._looked_at_s = 0.0
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
        """The module's forward pass. Inside of a step, its backward pass averages the gradients over the ranks."""
        target = self._wrapped[0] if self._inside and self.training else self.module
        return target(*inputs, **kwargs)

    # ------------------------------------------------------------ steps

    def steps(self, total: int) -> Iterator[ElasticStep]:
        """The steps up to number `total`; a step that did not count comes again. To be used once.

        It joins the group first, and ends on all ranks together, with the same state.

        Raises:
            ConfigError: it was called twice, or a step was not entered by `with`.
            JobEnded: the others have finished already.
            CollectiveTimeout: a step ran out of time several times, and nobody is lost.
            RendezvousError, DistStoreError: see `ElasticGroup.form`.
        """
        if self._started:
            raise ConfigError(
                "steps() can be called only once, because a new process could not know in which call the others are"
            )
        self._started = True
        finished = False
        try:
            while not finished:
                group = self._current_group()
                if self.step < total:
                    yield (step := ElasticStep(self.step, group.rank(), group.size(), self))
                    if not step._entered:  # it would come again for ever
                        raise ConfigError("the step was not taken: write `with step:` around forward and backward pass")
                else:
                    finished = self._finish(group)
        finally:
            if not finished:
                self.close()  # an error, or `break`: the others go on

    def _current_group(self) -> ProcessGroup:
        """The group, formed again if it has failed or a process wants to come in."""
        now = time.monotonic()
        if self._group is not None and self._failure is None and now - self._looked_at_s > STORE_CHECK_INTERVAL_S:
            self._looked_at_s = now
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
        """Gives the ranks that are behind the state of the one that is ahead, and averages in the new group."""
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
            collectives.barrier(group)  # until all have it, the state of the newcomers does not count
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
        """Returns whether all ranks have done the last step; then they have the same state, for good."""
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
        """All gradients are complete: the rest of the step needs no other rank."""
        self._inside = False
        for optimizer in self._optimizers:
            take_step(optimizer)
        self.step += 1
        self._num_timeouts = 0

    def _take_back(self, error: BaseException) -> bool:
        """Returns whether the step is tried again."""
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
    """Raises `ConfigError`, which says what to give instead."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module is a {type(module).__name__}: give an nn.Module")
    for each in optimizers:
        if isinstance(each, type) or not all(hasattr(each, name) for name in ("step", "zero_grad", *_STATE_METHODS)):
            raise ConfigError(
                f"{each!r} is not an optimizer: give one, such as torch.optim.SGD(module.parameters(), lr=0.1)"
            )
    stepped = {id(it) for each in optimizers for group in getattr(each, "param_groups", ()) for it in group["params"]}
    if stepped and stepped.isdisjoint(map(id, module.parameters())):
        raise ConfigError("the optimizer has none of the module's parameters: make it from module.parameters()")
    if isinstance(store, (str, PathLike)):
        raise ConfigError(f"store is {store!r}: give a store, such as rpcdist.collectives.FileStore({str(store)!r})")
    if not isinstance(stateful, Sequence) or not all(hasattr(it, name) for it in stateful for name in _STATE_METHODS):
        raise ConfigError(
            "stateful must be a list of objects with state_dict() and load_state_dict(), such as [scheduler]"
        )


def _description(module: nn.Module, optimizers: Sequence[Optimizer], backend: str, options: dict[str, Any]) -> str:
    """The facts that must be equal on all ranks, in words, with a digest of the details."""
    parameters = list(module.named_parameters())
    details = [(name, str(each.dtype), tuple(each.shape), each.requires_grad) for name, each in parameters]
    kinds = [type(each).__name__ for each in optimizers]
    digest = hashlib.sha256(repr((details, kinds, backend, sorted(options))).encode()).hexdigest()[:12]
    elements = sum(each.numel() for _, each in parameters)
    return f"{len(parameters)} parameters of {elements} elements with {', '.join(kinds)} (digest {digest})"
