"""`DistributedOptimizer`: one optimizer for parameters that live on many workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from rpcdist.autograd._interface import _is_valid_context, backward
from rpcdist.errors import RpcdistError
from rpcdist.optim._local_optimizer import LocalOptimizer, call_local_optimizer, new_local_optimizer
from rpcdist.optim._owner_calls import OwnerCall, ask_owners, ask_owners_async, ask_steps
from rpcdist.optim._param_groups import (
    Group,
    Shard,
    changed_options,
    gather_state,
    options_of,
    parse_groups,
    place,
    scatter_state,
)
from rpcdist.rpc import Future, RRef
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.torch_optimizers import is_watched

Scheduler = TypeVar("Scheduler")


class DistributedOptimizer(torch.optim.Optimizer):
    """Optimizes parameters where they live, with the gradients of a distributed-autograd context.

        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", forward, (x,)).sum()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    Every owner of parameters gets an optimizer of the given class, with a state of its own. Steps of several trainers
    on one owner come one after the other; between owners there is no order.

    It is a `torch.optim.Optimizer`: the classes of `torch.optim.lr_scheduler` accept it, and changes of the options in
    `param_groups` reach the owners with the next step. `param_groups[i]["params"]` are references; the state lives at
    the owners, and `state_dict` gathers it.

    Args:
        optimizer_class: a subclass of `torch.optim.Optimizer`, or another callable that makes one; the owners must be
            able to import it.
        params_rref: references to the parameters, or parameter groups: dictionaries with such a list as "params".
        args, kwargs: for the optimizer's constructor at every owner.

    Attributes:
        remote_optimizers: references to the local optimizers, one for each owner.
        is_functional_optim: false; in torch it is true for optimizers that it compiles with TorchScript.

    Raises:
        TypeError: a parameter is not a reference, or the value behind it is not a tensor.
        ValueError: there are no parameters.
        OwnerLost: an owner died.
        Exception: the constructor's error at an owner; a note of the error names the worker.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params_rref: Iterable[RRef[Any]] | Iterable[dict[str, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        groups, is_flat = parse_groups(params_rref)
        self.is_functional_optim = False
        self._kind = getattr(optimizer_class, "__name__", str(optimizer_class))
        self._shards = place(groups)
        made = ask_owners(
            f"creating a distributed {self._kind}",
            [
                OwnerCall(
                    shard.owner,
                    new_local_optimizer,
                    (optimizer_class, _groups_at(shard, groups), is_flat, shard.numbers, args, kwargs),
                )
                for shard in self._shards
            ],
        )
        self.remote_optimizers: list[RRef[LocalOptimizer]] = [rref for rref, *_ in made]
        self._numbers: list[int] = [number for _, number, *_ in made]
        self._sent: list[list[Group]] = [options for *_, options, _ in made]  # by shard: the options of its groups
        for shard, options in zip(self._shards, self._sent, strict=True):
            for index, group_options in zip(shard.groups, options, strict=True):
                groups[index] |= options_of(group_options)
        self._is_made = False
        super().__init__(groups, made[0][-1])
        self._is_made = True

    # ------------------------------------------------------------ steps

    def step(self, context_id: int, *, hogwild: bool = False) -> None:  # type: ignore[override]
        """Takes one step at every owner, with the gradients of a context; blocks until all are done.

        A parameter without a gradient in the context stays as it is. The step does not change any `.grad`.

        Args:
            context_id: the id from `autograd.context()`, after `backward`.
            hogwild: let the backward passes of other trainers that have saved the parameters before this step continue
                with the new values. Without it they fail: torch sees that a saved tensor changed.

        Raises:
            ContextNotFound: the context has ended.
            OwnerLost: an owner died.
            BlockingInLoop: called on an event loop; write `await optimizer.step_async(...)`.
            Exception: the error of a local optimizer; its notes list the owners that stepped and those that did not.
        """
        if (
            is_watched(self) and type(self).step is DistributedOptimizer.step
        ):  # else torch has wrapped that of the class
            _watched_step(self, context_id, hogwild)
        else:
            self._step(context_id, hogwild)

    # torch's mark of a method that it has wrapped for hooks and profilers: its wrapper takes as long as the calls.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, context_id: int, hogwild: bool) -> None:
        _is_valid_context(context_id)
        calls, sending = self._step_calls(context_id, hogwild)
        took_part = ask_steps(self._doing("step"), context_id, calls, UNSET_RPC_TIMEOUT, "optimizer.step_async(...)")
        if took_part is None:
            took_part = ask_owners(self._doing("step"), calls, "optimizer.step_async(...)")
        self._stepped(context_id, took_part, sending)

    def backward_and_step(
        self,
        context_id: int,
        roots: Sequence[torch.Tensor],
        *,
        hogwild: bool = False,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> None:
        """`autograd.backward(context_id, roots)` and `step(context_id)`, with fewer messages; blocks.

        Each worker steps when the pass cannot fail on any other worker, except on the caller if only one other worker
        takes part; `docs/optim.md` has the table. If something fails after a step, the notes of the error name the
        workers that have stepped; no worker steps twice. To clip gradients by their norm, make the two calls instead.

        Args:
            context_id: the id from `autograd.context()`.
            roots: scalars, computed in the context on this worker.
            hogwild: as for `step`.
            timeout: limit in seconds for both together; 0 means no limit; by default the `rpc_timeout` of `init_rpc`.

        Raises:
            BackwardError: the backward pass failed; no worker has stepped, or a note names the one that has.
            DeadlineExceeded: the timeout expired; the text names the workers that did not finish, and their operation.
            Otherwise as `autograd.backward` and `step`.
        """
        calls: list[OwnerCall] | None = None
        if not is_watched(self, ignores_wrapper=True):  # by hooks of `step`, or a profiler
            _is_valid_context(context_id)
            calls, sending = self._step_calls(context_id, hogwild)
            what, instead = self._doing("backward_and_step"), "asyncio.to_thread(optimizer.backward_and_step, ...)"
            took_part = ask_steps(what, context_id, calls, timeout, instead, roots)
            if took_part is not None:
                self._opt_called = True  # learning-rate schedulers want to know
                self._stepped(context_id, took_part, sending)
                return
        backward(context_id, roots, timeout=timeout)
        self.step(context_id, hogwild=hogwild)

    def step_async(self, context_id: int, *, hogwild: bool = False) -> Future[None]:
        """`step` as a future: await it, or wait for it.

        Cancelling it cancels the steps that have not begun; the future does not say which ones.
        """
        _is_valid_context(context_id)
        self._opt_called = True  # learning-rate schedulers want to know
        calls, sending = self._step_calls(context_id, hogwild)
        return ask_owners_async(
            self._doing("step"), calls, lambda took_part: self._stepped(context_id, took_part, sending)
        )

    def _step_calls(self, context_id: int, hogwild: bool) -> tuple[list[OwnerCall], list[list[Group]]]:
        """The calls, and for each call the options that its groups will have afterwards."""
        calls, sending = [], []
        for index, shard in enumerate(self._shards):
            groups = [self.param_groups[number] for number in shard.groups]
            changes = changed_options(self._sent[index], groups)
            has_changed = any(changes)
            calls.append(self._call(index, "step", context_id, changes if has_changed else None, hogwild))
            sending.append([options_of(group) for group in groups] if has_changed else self._sent[index])
        return calls, sending

    def _stepped(self, context_id: int, took_part: list[bool], sent: list[list[Group]]) -> None:
        self._sent = sent
        if not all(took_part):
            _is_valid_context(context_id)  # it ended during the step, and the gradients with it

    def clip_grad_norm_(
        self, context_id: int, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales the gradients of this optimizer's parameters in a context, so that their norm is at most `max_norm`.

        The norm is that of all gradients on all workers together, as if they were one vector. Call it between
        `backward` and `step`; `get_gradients` shows the result as well.

        Args:
            context_id: the id from `autograd.context()`, after `backward`.
            max_norm: the largest norm.
            norm_type: the p of the p-norm; infinity for the greatest absolute value.
            error_if_nonfinite: raise if the norm is infinite or not a number, and change nothing.

        Returns:
            The norm before, a scalar tensor on the CPU.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.
            Otherwise as `step`.
        """
        _is_valid_context(context_id)
        norms = self._ask_all("norm", context_id, float(norm_type))
        numbers = torch.tensor(norms, dtype=torch.float64, device="cpu")
        total = torch.linalg.vector_norm(numbers, float(norm_type)).item()
        if error_if_nonfinite and not math.isfinite(total):
            raise RpcdistError(
                f"The total norm of order {norm_type} for the gradients in context {context_id} is {total}, so they "
                "cannot be clipped. To scale them anyway, leave error_if_nonfinite out"
            )
        factor = max_norm / (total + 1e-6)
        if not factor >= 1.0:  # also if it is not a number, as torch has it
            involved = [index for index, norm in enumerate(norms) if norm != 0.0]
            ask_owners(self._doing("clip_grad_norm_"), [self._call(i, "scale", context_id, factor) for i in involved])
        return torch.tensor(total, device="cpu")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the `.grad` of all parameters. Gradients of contexts are separate, and end with their contexts."""
        self._ask_all("zero_grad", set_to_none)

    # ------------------------------------------------------------ options and state

    def make_scheduler(self, scheduler_class: Callable[..., Scheduler], *args: Any, **kwargs: Any) -> Scheduler:
        """The same as `scheduler_class(optimizer, *args, **kwargs)`, which works for all schedulers of torch."""
        return scheduler_class(self, *args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported: pass all groups to the constructor."""
        if getattr(self, "_is_made", True):
            raise RpcdistError(
                "a DistributedOptimizer cannot get further parameter groups; give them all to its constructor, or make "
                "a second optimizer for the new parameters"
            )
        self.param_groups.append(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of all local optimizers as one dictionary on the CPU, in the form of `torch.optim`.

        Parameters have numbers, in the order in which the constructor got them; so an ordinary optimizer of the same
        parameters, or a distributed one whose owners have other shares of them, can load the dictionary.
        """
        return gather_state(self._shards, self.param_groups, self._ask_all("state_dict"))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state that `state_dict` or an ordinary optimizer made: every local optimizer gets its part.

        Raises:
            ConfigError: (a ValueError) the state does not fit these parameters.
        """
        parts = scatter_state(self._shards, self.param_groups, state_dict)
        calls = [self._call(index, "load_state_dict", part) for index, part in enumerate(parts)]
        ask_owners(self._doing("load_state_dict"), calls)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            params = group["params"]
            group.clear()
            group |= {"params": params, **options_of(saved)}
        self._sent = [[options_of(self.param_groups[number]) for number in shard.groups] for shard in self._shards]

    # ------------------------------------------------------------ inside

    def _call(self, index: int, method: str, *args: Any) -> OwnerCall:
        return OwnerCall(self._shards[index].owner, call_local_optimizer, (self._numbers[index], method, *args))

    def _ask_all(self, method: str, *args: Any) -> list[Any]:
        calls = [self._call(index, method, *args) for index in range(len(self._shards))]
        return ask_owners(self._doing(method), calls)

    def _doing(self, method: str) -> str:
        return f"{method} of a distributed {self._kind}"

    def __repr__(self) -> str:
        where = ", ".join(f"{shard.num_params} on {shard.owner.name}" for shard in self._shards)
        return f"<DistributedOptimizer {self._kind} [parameters: {where}]>"

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler puts a wrapper of `step` into the object, which refers to this object only.
        return {name: value for name, value in self.__dict__.items() if name != "step"}


_watched_step: Callable[[DistributedOptimizer, int, bool], None] = torch.optim.Optimizer.profile_hook_step(
    DistributedOptimizer._step
)


def _groups_at(shard: Shard, groups: list[Group]) -> list[Group]:
    return [{**groups[index], "params": params} for index, params in zip(shard.groups, shard.params, strict=True)]
