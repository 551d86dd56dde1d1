"""`DistributedDataParallel`: the same model on every rank, each with its own part of the data."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup, ReduceOp
from rpcdist.collectives._torch_side import hide_frame_from_compiler, hide_from_compiler
from rpcdist.errors import ConfigError, text_of
from rpcdist.parallel._ddp._buckets import BucketCaps
from rpcdist.parallel._ddp._comm_hook import CommHook, RegisteredHook, check_comm_hook, refuse_complex
from rpcdist.parallel._ddp._ddp_arguments import (
    MixedPrecision,
    ReducerOptions,
    choose_sync,
    group_of_mesh,
    member_group,
)
from rpcdist.parallel._ddp._ddp_errors import DataParallelError, list_names
from rpcdist.parallel._ddp._finite_check import CheckFinite
from rpcdist.parallel._ddp._gradient_sources import in_distributed_context
from rpcdist.parallel._ddp._model_hooks import DelayedReduction, GradientHooks
from rpcdist.parallel._ddp._parameters import (
    Trained,
    broadcast_tensors,
    frozen,
    has_buffers,
    named_buffers,
    trainable,
    verify,
)
from rpcdist.parallel._ddp._quantization import adapt_hook
from rpcdist.parallel._ddp._reducer import Reducer
from rpcdist.parallel._ddp._tensor_tree import choose_device, move_to
from rpcdist.parallel._ddp._torch_methods import SampledIteration, TorchMethods
from rpcdist.parallel.algorithms import CallingJoinHook, Join, Joinable, JoinHook
from rpcdist.parallel.comm_hooks import BuiltinCommHookType, average_in, builtin_hook, leaves_equal_bits
from rpcdist.parallel.sync_batch_norm import adopt_sync_batch_norms

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(TorchMethods, nn.Module, Joinable):
    """Trains the same module on all ranks of a group: gradients are averaged over the ranks during the backward pass.

    Wrap the module on every rank, train as in a single process, and give each rank its own part of the data. The
    constructor copies rank 0's parameters and buffers to all ranks. `module` is the wrapped module. Gradients are
    averages over the ranks, so the mean loss of equal parts gives the gradients of the whole batch.

    Args:
        module: the model; names, order, shapes, dtypes and strides of its parameters must be the same on all ranks.
        device_ids: None, or one device, to which inputs are moved.
        output_device: None; kept for scripts.
        dim: kept for scripts.
        broadcast_buffers: the old name of `forward_sync_buffers`; False also leaves them out of the initial sync.
        init_sync: whether the constructor compares the ranks' models, and copies rank 0's values to the other ranks.
        process_group: the ranks; the default group by default.
        bucket_cap_mb: size in MiB from which a bucket is reduced; 25 by default, and 1 for the first one. With 0 each
            gradient is a bucket.
        find_unused_parameters: whether parameters may stay without gradients; every backward pass determines which, and
            averages the gradients that were added since the last average.
        check_reduction: kept for scripts.
        gradient_as_bucket_view: whether small gradients are views of communication buffers, which saves copies while
            they are kept between iterations (`zero_grad(set_to_none=False)`). Large gradients are always reduced in
            place.
        static_graph: whether every iteration uses the same parameters equally often; allows reentrant checkpointing.
        delay_all_reduce_named_params: names and parameters that are reduced together when the gradient of
            `param_to_hook_all_reduce` is ready, outside the buckets. A gradient that comes later is a `ConfigError`.
        param_to_hook_all_reduce: see `delay_all_reduce_named_params`.
        mixed_precision: `MixedPrecision`, or torch's `_MixedPrecision`: dtypes of the forward pass, the reductions and
            the buffers. It replaces a communication hook.
        device_mesh: a mesh of one dimension, whose ranks are the group; instead of `process_group`.
        skip_all_reduce_unused_params: with `find_unused_parameters`, whether to skip buckets without used parameters;
            the same parameters must be unused on all ranks.
        bucket_cap_mb_list: one cap per bucket; the last cap applies to all later buckets.
        batched_grad_copy: kept for scripts: the gradients of a bucket are always copied in one call.
        forward_sync_buffers: whether to give all ranks the buffers of rank 0 before each training forward; True by
            default.
        lazy_bucket_allocation: kept for scripts (torch 2.15); has no effect.
        check_finite: the search for NaN and infinity in gradients, with a warning (`NonFiniteGradients`) that names
            rank and parameter: "probes" checks the first elements of each bucket, "all" all elements, "never" none.

    Raises:
        ModelsDiffer: the ranks have different models or options; names the differences.
        ConfigError: an argument is wrong, or no parameter requires a gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: object | None = None,
        device_mesh: object | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        check_finite: CheckFinite = "probes",
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        if check_reduction:
            warnings.warn("The `check_reduction` argument is deprecated: it does nothing", FutureWarning, stacklevel=2)
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ConfigError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
            )
        self.device_mesh = device_mesh
        self.mixed_precision = mixed_precision
        self._precision = MixedPrecision.of(mixed_precision)
        self.process_group = member_group(group_of_mesh(device_mesh, process_group))
        adopt_sync_batch_norms(module, self.process_group)
        self.module = module
        self.dim = dim
        self.parameters_to_ignore = {
            *self._ignored_by_module(),
            *(name for name, _ in delay_all_reduce_named_params or ()),
        }
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.check_finite = check_finite
        self.forward_sync_buffers = choose_sync(broadcast_buffers, forward_sync_buffers)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._caps = BucketCaps.of(bucket_cap_mb, bucket_cap_mb_list)
        self._divide_by_initial_world_size = True
        self._buffer_hook: Callable[[dict[str, torch.Tensor]], Iterable[torch.futures.Future[object]] | None] | None
        self._buffer_hook, self._buffer_hook_location = None, _BufferCommHookLocation.PRE_FORWARD
        self._delayed: DelayedReduction | None = None
        self._logged = SampledIteration()
        if delay_all_reduce_named_params is not None and param_to_hook_all_reduce is not None:
            self._delayed = DelayedReduction(
                delay_all_reduce_named_params, param_to_hook_all_reduce, self.process_group
            )
        self._precision.cast_buffers(module, self._ignored_by_module())
        self._precision.mark_parameters(module, self._ignored_by_module())
        parameters = self._trainable()
        tensors = [parameter.tensor for parameter in parameters]
        self._input_device = choose_device(tensors, device_ids, output_device)
        self._frozen = frozen(module, self.parameters_to_ignore)
        self.device_ids = None if self._input_device is None else [self._input_device]
        self.output_device = output_device
        self.device = tensors[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({tensor.device for tensor in tensors}) > 1
        if init_sync:
            verify(parameters, self._shared_options(), self.process_group)
            self._broadcast_states(0, buffers=broadcast_buffers is not False)
        self._make_reducer(parameters)

    # ------------------------------------------------------------ construction

    def _trainable(self) -> list[Trained]:
        for name, parameter in self.module.named_parameters():
            if isinstance(parameter, nn.UninitializedParameter) and name not in self.parameters_to_ignore:
                raise ConfigError(
                    f"parameter {name!r} is not initialized: run a forward pass of the module before wrapping it"
                )
        found = trainable(self.module, self.parameters_to_ignore)
        if not found:
            raise ConfigError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
                "gradient."
            )
        return found

    def _ignored_by_module(self) -> frozenset[str]:
        return frozenset(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ()))

    def _shared_options(self) -> dict[str, object]:
        """The options that must be the same on all ranks."""
        named = {name: getattr(self, name) for name in _SHARED}
        return {"the bucket cap": self._caps, **named, "mixed_precision": self._precision}

    def _make_reducer(self, parameters: list[Trained]) -> None:
        options = ReducerOptions(
            self._caps,
            find_unused=self.find_unused_parameters,
            static=self.static_graph,
            view=self.gradient_as_bucket_view,
            skip_unused=self.skip_all_reduce_unused_params,
            check_finite=self.check_finite,
        )
        self.reducer = Reducer(parameters, self.process_group, options, partial(_syncs, weakref.ref(self)))
        wire_dtype = self._precision.wire_dtype
        if wire_dtype is not None and any(parameter.tensor.dtype is not wire_dtype for parameter in parameters):
            hook = average_in(wire_dtype, self.process_group)
            self.reducer.use_hook(RegisteredHook(hook, None, leaves_equal_bits=True))
        self._hooks = GradientHooks(parameters, self.reducer)
        weakref.finalize(self, self._hooks.remove)  # the module may be wrapped again

    def _broadcast_states(self, group_src: int, buffers: bool) -> None:
        named: dict[str, torch.Tensor] = dict(self.module.named_parameters())
        if buffers:
            named.update(self.module.named_buffers())
        tensors = [tensor for name, tensor in named.items() if name not in self.parameters_to_ignore]
        broadcast_tensors(tensors, self.process_group, group_src)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not collectives.group.WORLD:
            raise ConfigError("only a DistributedDataParallel of the default group can be pickled or copied")
        left_out = ("process_group", "reducer", "_hooks")
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        return {**state, "_by_hand": self.reducer.by_hand}

    def __setstate__(self, state: dict[str, Any]) -> None:
        by_hand = state.pop("_by_hand", False)
        nn.Module.__setstate__(self, state)
        self.process_group = member_group(None)
        self._precision.mark_parameters(self.module, self._ignored_by_module())
        self._make_reducer(self._trainable())
        self.reducer.end_by_hand(by_hand)

    @property
    def bucket_bytes_cap(self) -> int:
        """`bucket_cap_mb`, or the largest one of `bucket_cap_mb_list`, in bytes."""
        return self._caps.num_bytes

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """`bucket_cap_mb_list` in bytes."""
        return list(self._caps.listed)

    # ------------------------------------------------------------ forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass. Its backward pass averages the gradients over the ranks.

        Raises:
            UnusedParameters: the last backward pass left parameters without gradients.
            DataParallelError: a parameter that was frozen when the module was wrapped requires a gradient now.
            UnevenInputs: see `join`.
        """
        trains = torch.is_grad_enabled()
        began_ns = time.time_ns()
        if trains and self.require_backward_grad_sync:
            self.reducer.check_finished()
            self._logged.sample(self.reducer)
        Join.notify_join_context(self)
        if trains:
            self.reducer.rebuild()
        if self._syncs_buffers(_BufferCommHookLocation.PRE_FORWARD):
            self._sync_buffers()
        self._count_syncing()
        if self._input_device is not None:
            inputs, kwargs = move_to(inputs, self._input_device), move_to(kwargs, self._input_device)
        with self._inside_ddp_forward():
            output = self._precision.run(self.module, self._ignored_by_module(), inputs, kwargs)
        if self._syncs_buffers(_BufferCommHookLocation.POST_FORWARD):
            self._sync_buffers()
        self._expect_backward(output, trains)
        self.reducer.forward_began_ns, self.reducer.forward_ended_ns = began_ns, time.time_ns()
        return output

    def _expect_backward(self, output: Any, trains: bool) -> None:
        """Arms the reducer for the backward pass of the output."""
        self.require_forward_param_sync = trains and self.require_backward_grad_sync
        if self._delayed is not None:
            self._delayed.enabled = self.require_forward_param_sync
        if any(map(_requires_grad, self._frozen.values())):
            raise DataParallelError(
                "parameters that were frozen when the module was wrapped require gradients now, which would not be "
                f"averaged: {list_names([name for name, each in self._frozen.items() if each.requires_grad])}. Wrap "
                "the module again after unfreezing"
            )
        if not self.require_forward_param_sync:
            if trains:
                self.reducer.pause()
            return
        if in_distributed_context():
            self._hooks.watch_distributed_passes()
        self._hooks.keep_last()
        self.reducer.prepare_for_backward(output)

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        token = _active_module.set(self)
        try:
            yield
        finally:
            _active_module.reset(token)

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """Within this context, gradients are only summed on each rank; the next backward pass outside averages the sum.

        The forward pass must be within the context, too.

        Args:
            enabled: False makes it do nothing, e.g. `no_sync(enabled=step % 4 != 3)`.
        """
        old = self.require_backward_grad_sync
        self.require_backward_grad_sync = old and not enabled
        try:
            yield
        finally:
            self.require_backward_grad_sync = old

    # ------------------------------------------------------------ buffers

    @property
    def broadcast_buffers(self) -> bool:
        """The old name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The synchronised buffers, by name; looked up each time, since modules may replace them."""
        return named_buffers(self.module, self.parameters_to_ignore)

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The synchronised buffers."""
        return list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward pass gives all ranks the same buffers."""
        if not (self.require_forward_param_sync and self.forward_sync_buffers and has_buffers(self.module)):
            return False
        return bool(self.modules_buffers)

    def _syncs_buffers(self, location: _BufferCommHookLocation) -> bool:
        return self._buffer_hook_location is location and self.will_sync_module_buffers()

    def _sync_buffers(self) -> None:
        source = self._highest_rank(True) if self._join_config.enable else 0
        self._send_buffers(source)

    def _send_buffers(self, source: int) -> None:
        buffers = self.named_module_buffers
        if self._buffer_hook is not None:
            for future in self._buffer_hook(buffers) or ():
                future.wait()
            return
        # An earlier forward pass may have saved them for its backward pass.
        with torch.autograd._unsafe_preserve_version_counter(tuple(buffers.values())):
            broadcast_tensors(list(buffers.values()), self.process_group, source)

    def _default_broadcast_coalesced(
        self, bufs: Sequence[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Gives all ranks the tensors of one of them, the buffers by default; for hooks of buffers.

        Args:
            bucket_size: kept for scripts.
            authoritative_rank: the rank in the group whose values all ranks get.
        """
        broadcast_tensors(self.modules_buffers if bufs is None else bufs, self.process_group, authoritative_rank)

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: Callable[[object, dict[str, torch.Tensor]], list[torch.futures.Future[object]] | None],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Synchronises the buffers with a function, which gets them by name, instead of a broadcast.

        The forward pass waits for futures that it returns.
        """
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        self._buffer_hook_location = _BufferCommHookLocation(comm_hook_location)
        self._buffer_hook = partial(hook, state)

    # ------------------------------------------------------------ uneven inputs

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """A context for training loops of different lengths on the ranks.

        A rank whose loop has ended takes part in the reductions of the others with gradients of zero. At the end, all
        ranks get the model of the rank that trained longest.

        Args:
            divide_by_initial_world_size: whether gradients are divided by the size of the group, so that all inputs
                have the same weight, instead of the number of ranks that still train.
            enable: False switches it off.
            throw_on_early_termination: whether to raise `UnevenInputs` on every rank when the first rank has no more
                inputs.
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: object) -> JoinHook:
        self._divide_by_initial_world_size = bool(kwargs.get("divide_by_initial_world_size", True))
        return CallingJoinHook(self._shadow_iteration, self._sync_final_model)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> ProcessGroup:
        return self.process_group

    def _count_syncing(self) -> None:
        """Sets the divisor of this iteration's gradients."""
        self.reducer.divide_by = None
        self.reducer.joins = self._join_config.enable
        if self._join_config.enable:
            num_syncing = self._count_ranks(self.require_backward_grad_sync)
            if not self._divide_by_initial_world_size:
                self.reducer.divide_by = max(1, num_syncing)

    def _shadow_iteration(self) -> None:
        """Takes part in the communication of the other ranks' forward and backward pass."""
        if self._syncs_buffers(_BufferCommHookLocation.PRE_FORWARD):
            self._send_buffers(self._highest_rank(False))
        syncs = self._count_ranks(False) > 0
        self.require_forward_param_sync = syncs
        self.reducer.joins = True
        if syncs:
            self.reducer.divide_by = None if self._divide_by_initial_world_size else 1.0
            self.reducer.shadow()

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        self.reducer.end_shadows()
        self._authoritative_rank = self._highest_rank(is_last_joiner)  # under torch's name
        self._broadcast_states(self._authoritative_rank, self.forward_sync_buffers)

    def _count_ranks(self, mine: bool) -> int:
        """Returns the number of ranks that pass True. All ranks of the group call it together."""
        flag = torch.tensor([float(mine)], device=self.device)
        collectives.all_reduce(flag, group=self.process_group)
        return int(flag.item())

    def _highest_rank(self, candidate: bool) -> int:
        """Returns the highest rank that is a candidate. All ranks of the group call it together."""
        rank = torch.tensor([self.process_group.rank() if candidate else -1], device=self.device)
        collectives.all_reduce(rank, ReduceOp.MAX, group=self.process_group)
        return int(rank.item())

    # ------------------------------------------------------------ communication hooks

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Reduces the gradients with a function instead of an average. Call it once, before training, on all ranks.

        Args:
            state: first argument of the hook.
            hook: `hook(state, bucket)` gets a `GradBucket`, and returns a future of a tensor of the same number of
                elements and dtype: the gradients for all ranks, averaged by the hook. Buckets of sparse gradients do
                not go through hooks. torch's own hooks work as well; their state may be None, or hold a group of ours.

        Raises:
            ConfigError: the hook takes other arguments, or would drop the imaginary parts of complex gradients.
        """
        self._use_hook(state, hook, getattr(hook, "__qualname__", repr(hook)))

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Registers a hook by its type."""
        hook: Any = builtin_hook(comm_hook_type)
        self._use_hook(self.process_group, hook, str(comm_hook_type))

    def _use_hook(self, state: object, hook: CommHook, name: str) -> None:
        with self._logging_errors():
            check_comm_hook(hook)
            if self.reducer.hook is not None:
                raise DataParallelError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        refuse_complex(hook, {named.tensor.dtype for named in self.reducer.parameters})
        hook, state = adapt_hook(hook, state, self.process_group)
        self.reducer.use_hook(RegisteredHook(hook, state, leaves_equal_bits(hook), name))

    # ------------------------------------------------------------ other methods of torch's class; see `TorchMethods`

    @classmethod
    def _get_active_ddp_module(cls) -> DistributedDataParallel | None:
        return _active_module.get()

    @contextmanager
    def _logging_errors(self) -> Iterator[None]:
        """Records an error of the `with` block in the logging data."""
        try:
            yield
        except Exception as exc:
            self.reducer.error = text_of(exc)
            raise

    def _set_static_graph(self) -> None:
        """The same as `static_graph=True`; call it before training.

        Raises:
            DataParallelError: a backward pass has been averaged already.
        """
        with self._logging_errors():
            if self.reducer.iteration > 0:
                raise DataParallelError(
                    "_set_static_graph() should be called before training loop starts and after DDP is constructed; "
                    f"this is iteration {self.reducer.iteration}. Or pass static_graph=True to DistributedDataParallel."
                )
        self.static_graph = True
        self._make_reducer_again()

    def _make_reducer_again(self) -> None:
        hook, by_hand = self.reducer.hook, self.reducer.by_hand
        self._remove_autograd_hooks()
        self._make_reducer(self.reducer.parameters)
        self.reducer.end_by_hand(by_hand)
        if hook is not None:
            self.reducer.use_hook(hook)

    def _remove_autograd_hooks(self) -> None:
        """Stops averaging gradients."""
        self._hooks.remove()

    def _check_reducer_finalized(self) -> None:
        """Raises UnusedParameters if the last backward pass did not get all gradients."""
        self.reducer.check_finished()

    def _update_process_group(self, new_process_group: ProcessGroup) -> None:
        """Changes the group, after ranks have left or joined; starts with the initial buckets."""
        self.process_group = new_process_group
        self.reducer.use_group(new_process_group)


_requires_grad = attrgetter("requires_grad")
_SHARED = (
    "find_unused_parameters", "static_graph", "gradient_as_bucket_view", "skip_all_reduce_unused_params",
    "check_finite",
)  # fmt: skip

# `torch.compile` of this class compiles the module inside.
hide_from_compiler(DistributedDataParallel, Reducer, Join)
for _calls_the_module in (DistributedDataParallel.forward, MixedPrecision.run):
    hide_frame_from_compiler(_calls_the_module)

_active_module: ContextVar[DistributedDataParallel | None] = ContextVar("rpcdist_active_ddp_module", default=None)
"""The module whose forward pass runs on this thread or task."""


def _syncs(reference: weakref.ref[DistributedDataParallel]) -> bool:
    """Whether backward passes of a model average now."""
    model = reference()
    return model is not None and model.require_backward_grad_sync
