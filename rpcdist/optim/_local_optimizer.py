"""The local optimizers: at each owner of parameters, an ordinary optimizer for those that live there."""

from __future__ import annotations

import itertools
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from traceback import clear_frames
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rpcdist.autograd._interface import _retrieve_context
from rpcdist.autograd._step_part import workers
from rpcdist.deadline import Deadline, current_deadline
from rpcdist.errors import DeadlineExceeded, RpcdistError
from rpcdist.optim._param_groups import Group, options_of
from rpcdist.rpc import RRef, get_rpc_timeout
from rpcdist.rpc._current import agent_local, current_agent
from rpcdist.rpc._executors.blocking import blocking
from rpcdist.rpc._values.buffers import keep_for_current_streams
from rpcdist.rpc._values.plain import FREE_BYTES, PlainWriter, read_plain
from rpcdist.torch_optimizers import take_step

MAX_KEPT_ERRORS: Final = 64
MAX_OPTIONS_BYTES: Final = 64 << 10


class LocalOptimizer:
    """An optimizer over the parameters of this process, driven by a `DistributedOptimizer` on any worker.

    Args:
        lock: held by all of its methods. Several trainers, each with its own optimizer here, may share the
            parameters; only one of them changes the parameters at a time.
        groups: the parameter groups, with references to parameters of this worker.
        is_flat: whether the user gave a plain list of parameters instead of groups.
        numbers: for each group, the numbers of its parameters in the distributed optimizer.
        args, kwargs: for `optimizer_class`.
    """

    def __init__(
        self,
        lock: threading.Lock,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        groups: Sequence[Group],
        is_flat: bool,
        numbers: Sequence[Sequence[int]],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        resolved = [
            {**group, "params": [_tensor_of(*pair) for pair in zip(names, group["params"], strict=True)]}
            for names, group in zip(numbers, groups, strict=True)
        ]
        self.optim = optimizer_class(resolved[0]["params"] if is_flat else resolved, *args, **kwargs)
        self._lock = lock
        self._has_fused = type(self.optim) in _FUSED
        self._parameters: list[Tensor] = list(dict.fromkeys(p for group in resolved for p in group["params"]))

    def step(self, context_id: int, options: Sequence[Group] | None, hogwild: bool) -> bool:
        """Steps with the gradients of a context, and leaves every `.grad` as it was.

        Args:
            options: for each group, the options that have changed since the last step; None if none has.
            hogwild: as for `DistributedOptimizer.step`.

        Returns:
            False if this process took no part in the context, so it did nothing.
        """
        parameters = self._parameters
        gradients = _gradients_of(context_id, parameters)
        if gradients is not None and parameters[0].is_cuda:  # their memory may be of the streams of earlier calls
            dense = [one for one in gradients if one is not None and one.is_cuda and not one.is_sparse]
            keep_for_current_streams(dense)
        if not self._lock.acquire(blocking=False):
            self._begin_alone("step")
        try:
            if options is not None:
                self._set_options(options)
            kept: list[Tensor | None] = []
            try:
                for parameter, gradient in zip(parameters, gradients or [None] * len(parameters), strict=True):
                    kept.append(parameter.grad)
                    parameter.grad = gradient
                if self._has_fused:
                    with fused_if_possible(self.optim, parameters):
                        self._step(hogwild)
                else:
                    self._step(hogwild)
            finally:
                for parameter, before in zip(parameters, kept, strict=False):
                    parameter.grad = before
        finally:
            self._lock.release()
        return gradients is not None

    def _step(self, hogwild: bool) -> None:
        if hogwild:
            # Changes of the parameters do not invalidate the tensors that other backward passes have saved.
            with torch.autograd._unsafe_preserve_version_counter(tuple(self._parameters)):
                take_step(self.optim)
        else:
            take_step(self.optim)

    def zero_grad(self, set_to_none: bool) -> None:
        self._begin_alone("zero_grad")
        try:
            self.optim.zero_grad(set_to_none)
        finally:
            self._lock.release()

    def state_dict(self) -> dict[str, Any]:
        """A copy on the CPU, which can be sent without a device map; loading moves it to the parameters' device."""
        self._begin_alone("state_dict")
        try:
            state: dict[str, Any] = _copied(self.optim.state_dict())
        finally:
            self._lock.release()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._begin_alone("load_state_dict")
        try:
            self.optim.load_state_dict(_copied(state_dict))  # a caller on this worker must not share the state
        finally:
            self._lock.release()

    def norm(self, context_id: int, norm_type: float) -> float:
        """The norm of all gradients of the context here, as if they were one vector."""
        gradients = [gradient for gradient in _gradients_of(context_id, self._parameters) or () if gradient is not None]
        values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        return torch.nn.utils.get_total_norm(values, norm_type).item()

    def scale(self, context_id: int, factor: float) -> None:
        """Multiplies the gradients of the context here."""
        _retrieve_context(context_id).gradients.scale(self._parameters, factor)

    def _begin_alone(self, what: str) -> None:
        """Takes the lock; waits for it until the deadline of the call.

        The caller releases it in a `finally`: leaving a `contextmanager` sets attributes of an error that the optimizer
        raised, which its class may refuse. [Note: hostile exceptions]
        """
        if not self._lock.acquire(blocking=False):
            wait_s = current_deadline.get().earlier(Deadline.after(get_rpc_timeout() or None)).wait_s()
            with blocking():
                taken = self._lock.acquire(timeout=-1 if wait_s is None else wait_s)
            if not taken:
                text = f"{what} of a distributed optimizer waited for another one's step on this worker"
                raise DeadlineExceeded(text)

    def _set_options(self, options: Sequence[Group]) -> None:
        for group, changed in zip(self.optim.param_groups, options, strict=True):
            for name, value in changed.items():
                if name == "params":
                    raise RpcdistError("a step would set the parameters of its group, which are not an option")
                if isinstance(group.get(name), Tensor):  # a capturable optimizer keeps this tensor object
                    group[name].copy_(torch.as_tensor(value, device=group[name].device))
                else:
                    group[name] = value


def _tensor_of(number: int, rref: RRef[Tensor]) -> Tensor:
    value: object = rref.local_value()
    if not isinstance(value, Tensor):
        raise TypeError(
            f"optimizer can only optimize Tensors, but params_rref[{number}] refers to a {type(value).__name__} on "
            f"worker {rref.owner_name()!r}"
        )
    return value


def _gradients_of(context_id: int, parameters: Sequence[Tensor]) -> Sequence[Tensor | None] | None:
    """In the order of the parameters; None if this process took no part in the context."""
    hooks: Any = current_agent().autograd
    context = hooks.contexts.look_up(context_id)
    return None if context is None else context.gradients.of(parameters)  # the caller checks whether it is over


def _copied(value: Any) -> Any:
    """A copy of a state on the CPU."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), value)


class OptimizerTable:
    """The local optimizers of one agent that a `DistributedOptimizer` refers to.

    Calls identify an optimizer by its number: a call with plain arguments costs half as much as one with a reference.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._errors: OrderedDict[int, BaseException] = OrderedDict()
        self._by_number: WeakValueDictionary[int, LocalOptimizer] = WeakValueDictionary()

    def add(self, local: LocalOptimizer) -> int:
        """Adds an optimizer; returns its number."""
        number = next(self._numbers)
        self._by_number[number] = local
        return number

    def find(self, number: int) -> LocalOptimizer:
        local = self._by_number.get(number)
        if local is None:
            raise RpcdistError(
                f"optimizer {number} does not exist any more: no DistributedOptimizer refers to it, or the lease of "
                "the last one ended; make a new one"
            )
        return local

    def keep_error(self, error: BaseException) -> int:
        """Keeps the error of a step for the worker that requested the step; returns the number that identifies it."""
        number = next(self._numbers)
        clear_frames(error.__traceback__)  # they hold gradients
        self._errors[number] = error
        if len(self._errors) > MAX_KEPT_ERRORS:
            self._errors.popitem(last=False)
        return number

    def raise_error(self, number: int) -> None:
        """Raises the stored error of a step."""
        raise self._errors.pop(number, None) or RpcdistError("the step failed, and its error is not kept any more")


own_table = agent_local(OptimizerTable)


# ---------------------------------------------------------------- called by RPC


def new_local_optimizer(*arguments: Any) -> tuple[RRef[LocalOptimizer], int, list[Group], dict[str, Any]]:
    """Makes a local optimizer; the arguments are those of the class, without the lock.

    Returns:
        A reference that keeps the local optimizer alive, its number, the options of its groups, and the default
        options of its class.
    """
    table = own_table()
    local = LocalOptimizer(table.lock, *arguments)
    options = [options_of(group) for group in local.optim.param_groups]
    return RRef(local), table.add(local), options, _copied(local.optim.defaults)


def call_local_optimizer(number: int, method: str, *args: Any) -> Any:
    """Calls a method of a local optimizer, or raises the error of its step."""
    if method == "raise_error":
        return own_table().raise_error(*args)
    return getattr(own_table().find(number), method)(*args)


# ---------------------------------------------------------------- steps as messages of distributed autograd

_WORK: Final = struct.Struct("<Q?")
_OUTCOME: Final = struct.Struct("<BQ")
_TOOK_NO_PART, _STEPPED, _FAILED = range(3)
_STEP_NAME: Final = f"{call_local_optimizer.__module__}:{call_local_optimizer.__name__}"


def encode_step(number: int, options: Sequence[Group] | None, hogwild: bool) -> bytes | None:
    """The request to an owner; None if the options are not plain values, which a call could carry."""
    work = _WORK.pack(number, hogwild)
    if options is None:
        return work
    writer = PlainWriter((), MAX_OPTIONS_BYTES)
    writer.write(options)
    is_plain = not (writer.rrefs or writer.buffers or writer.tensors)
    if not is_plain or len(writer.body) > MAX_OPTIONS_BYTES or writer.cost_bytes > FREE_BYTES:
        return None
    return work + writer.body


def _step(context_id: int, work: bytes) -> bytes:
    table = own_table()
    try:
        current_agent().callables.check(_STEP_NAME)
        number, hogwild = _WORK.unpack_from(work)
        options: Any = read_plain(work[_WORK.size :], [], [], None) if len(work) > _WORK.size else None
        return _OUTCOME.pack(table.find(number).step(context_id, options, hogwild), 0)
    except BaseException as error:  # the requesting worker gets every error, even a `sys.exit` in a hook
        return _OUTCOME.pack(_FAILED, table.keep_error(error))


def decode_outcome(outcome: bytes) -> tuple[bool, int]:
    """Whether the owner took part in the context, and the number of its error; 0 for none.

    Raises:
        RpcdistError: the owner does not support optimizers.
    """
    if len(outcome) != _OUTCOME.size:
        raise RpcdistError("the worker has no optimizer any more; make a new DistributedOptimizer")
    kind, number = _OUTCOME.unpack(outcome)
    return kind == _STEPPED, number if kind == _FAILED else 0


_FUSED: Final = frozenset({torch.optim.Adam, torch.optim.AdamW})
_UNSET: Final = (("fused", None), ("foreach", None), ("capturable", False), ("differentiable", False))


@contextmanager
def fused_if_possible(optim: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Makes torch's Adam use its fused implementation during a step, unless the user has chosen one.

    It is one C++ call for all parameters, and takes a fraction of the time of torch's default on the CPU. But it reads
    a gradient in the order of its parameter's memory, so a gradient with other strides gives wrong numbers, which torch
    2.13 does not check. So only contiguous parameters use it, with contiguous gradients. The choice holds for one step
    and is not an option of the optimizer, so its state can be loaded anywhere.
    """
    groups: list[dict[str, Any]] = optim.param_groups
    if (
        any([group[name] is not unset for group in groups for name, unset in _UNSET])
        or not all(map(_is_fusable, parameters))
        or torch.get_default_dtype() is not torch.float32  # otherwise the dtype of the step count differs
    ):
        yield
        return
    for parameter in parameters:
        if (gradient := parameter.grad) is not None and not gradient.is_contiguous():
            parameter.grad = gradient.contiguous()
    for group in groups:
        group["fused"] = True
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = None


def _is_fusable(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return (
        parameter.is_cpu
        and parameter.layout is torch.strided
        and parameter.is_floating_point()
        and parameter.is_contiguous()
        and (gradient is None or gradient.layout is torch.strided)
    )


workers.append(_step)
