"""Methods of torch's DistributedDataParallel that scripts call, but the training itself does not need.

`_get_ddp_logging_data` returns options, buckets and times of a model, under torch's names.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as _TorchModel

from rpcdist.errors import ConfigError
from rpcdist.parallel._ddp._parameters import trainable
from rpcdist.parallel._ddp._reducer import Reducer
from rpcdist.parallel._ddp._tensor_tree import move_to

_FIRST = 10
"""The number of iterations that are always sampled at the start, as in torch."""


class SampledIteration:
    """The times of the last sampled iteration, and their averages over all sampled iterations.

    The first ten iterations are sampled, and later one in `sample_rate`, when the next forward pass begins, as in
    torch.

    Attributes:
        sample_rate: one in this many iterations is sampled.
        iteration: the last sampled iteration; 0 before.
        facts: its times and their averages, the order in which its gradients became ready, and the bytes of parameters
            that this rank did not use; empty before.
    """

    def __init__(self) -> None:
        self.sample_rate = 100
        self.iteration = 0
        self.facts: dict[str, str | int] = {}
        self._count = 0
        self._sums = dict.fromkeys(_AVERAGED, 0)

    def sample(self, reducer: Reducer) -> None:
        """Records the times of the last iteration, if it has ended and should be sampled."""
        iteration = reducer.iteration
        if not reducer.done_ns or iteration == self.iteration:
            return
        if iteration > _FIRST and iteration % self.sample_rate:
            return
        self.iteration = iteration
        self._count += 1
        times = _times(reducer)
        for name in _AVERAGED:
            self._sums[name] += times[name]
        averages = {f"avg_{name}": total // self._count for name, total in self._sums.items()}
        order = _joined(reducer.ready_order)
        self.facts = {
            **times,
            **averages,
            "prev_iteration_grad_ready_order_indices": order,
            "unused_parameter_size": reducer.unused_bytes,
        }


_NAMES = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16"}
"""torch's C++ names of dtypes that differ from those in Python."""
_VARIABLES = ("master_addr", "master_port", "cuda_visible_devices", "torch_distributed_debug")
_GLOO_THREADS = 2  # torch's default, which rpcdist cannot change
_AVERAGED = (
    "forward_compute_time", "backward_compute_time", "backward_comm_time", "backward_compute_comm_overlap_time",
)  # fmt: skip


def _gloo_settings() -> dict[str, str | int]:
    """Returns the settings of Gloo, for a group with that name; our backend uses only the interface."""
    variables = ("gloo_socket_ifname", "gloo_device_transport")
    return {**{name: os.environ.get(name.upper(), "N/A") for name in variables}, "gloo_num_threads": _GLOO_THREADS}


def _times(reducer: Reducer) -> dict[str, int]:
    """Returns durations and times of an iteration in nanoseconds."""
    forward, began = reducer.forward_began_ns, reducer.first_gradient_ns
    computed, launched, done = reducer.computed_ns, reducer.first_launch_ns, reducer.done_ns
    return {
        "forward_compute_time": max(0, reducer.forward_ended_ns - forward),
        "backward_compute_time": max(0, computed - began),
        "backward_comm_time": max(0, done - launched) if launched else 0,
        "backward_compute_comm_overlap_time": max(0, computed - launched) if launched else 0,
        "forward_compute_time_start": forward,
        "backward_compute_time_start": began,
        "backward_compute_time_end": computed,
        "backward_comm_time_start": launched,
        "backward_comm_time_end": done,
    }


def _joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


class TorchMethods(nn.Module):
    """A part of `DistributedDataParallel`."""

    dim: int
    device_type: str
    module: nn.Module
    parameters_to_ignore: Collection[str]
    mixed_precision: object | None
    reducer: Reducer
    forward_sync_buffers: bool
    device_ids: Sequence[object] | None
    _delayed: object | None
    _logged: SampledIteration

    broadcast_bucket_size = 250 << 20  # bytes; functions of torch read it

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether the program ends each backward pass that averages with `finalize_backward`; False by default.

        Until that call the reductions run in the background, and `.grad` has this rank's own gradients. Set it before a
        forward pass, to the same value on all ranks.
        """
        return self.reducer.by_hand

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self.reducer.end_by_hand(required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward` must wait for the end of the backward pass; valid after the forward pass.

        If False, a hook may call it as well, when all gradients are ready.
        """
        late = self.mixed_precision is not None or self._delayed is not None or self.reducer.ends_after_pass()
        return self.reducer.by_hand and late

    def finalize_backward(self) -> None:
        """Waits until the gradients of a backward pass are averaged, and puts the averages into `.grad`.

        Call it once for each backward pass outside `no_sync`, after `backward` or in a hook of the pass, before the
        next pass and before other code changes gradients or parameters.

        Raises:
            DataParallelError: `require_manual_backward_finalization` is False; gradients are missing, or none need
                averaging; or gradients or parameters were changed since they were ready.
        """
        self.reducer.finalize()

    scatter = _TorchModel.scatter
    gather = _TorchModel.gather
    _set_params_and_buffers_to_ignore_for_model = staticmethod(_TorchModel._set_params_and_buffers_to_ignore_for_model)

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Returns the averaged parameters, in order, and whether the gradient of each is sparse."""
        found = trainable(self.module, self.parameters_to_ignore)
        return [named.tensor for named in found], [named.sparse for named in found]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
        """Returns the names of parameters by their positions in a list.

        Raises:
            ConfigError: the list is not from `_build_params_for_reducer`.
        """
        places = {parameter: place for place, parameter in enumerate(parameters)}
        names: dict[int, str] = {}
        for named in trainable(self.module, self.parameters_to_ignore):
            if named.tensor not in places:
                raise ConfigError(f"Param with name {named.name} found in module parameters, but not in this list")
            names[places[named.tensor]] = named.name
        if len(names) != len(places):
            raise ConfigError(
                f"Expected param to name mapping to cover all parameters: {len(places)} are in this list, and "
                f"{len(names)} of them are those of the module that require gradients"
            )
        return names

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Options and buckets, and the times of the last iteration that was sampled, for debugging."""
        reducer = self.reducer
        group, options, hook = reducer.group, reducer.options, reducer.hook
        tensors = [named.tensor for named in reducer.parameters]
        sizes = _joined(bucket.num_bytes for bucket in reducer.buckets)
        has_rebuilt = reducer.readiness == "used"
        members = ", ".join(" ".join(str(member.index) for member in bucket.members) for bucket in reducer.buckets)
        return {
            "module_name": type(self.module).__name__,
            "backend_name": group.name(),
            "world_size": group.size(),
            "rank": group.rank(),
            "iteration": reducer.iteration if reducer.error else self._logged.iteration,
            "has_error": int(bool(reducer.error)),
            "error": reducer.error,
            "dtypes": ", ".join(sorted({_NAMES.get(tensor.dtype, str(tensor.dtype)[6:]) for tensor in tensors})),
            "num_parameter_tensors": len(tensors),
            "total_parameter_size_bytes": sum(tensor.nbytes for tensor in tensors),
            "bucket_cap_bytes": options.caps.num_bytes,
            "initial_bucket_sizes": _joined(reducer.initial_bucket_bytes),
            "bucket_sizes": sizes,
            "rebuilt_bucket_sizes": sizes if has_rebuilt else "",
            "rebuilt_per_bucket_param_indices": members if has_rebuilt else "",
            "has_rebuilt_buckets": int(has_rebuilt),
            "num_buckets_reduced": reducer.num_buckets_reduced,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "device_ids": _joined(self.device_ids or ()),
            "output_device": -1,
            "is_multi_device_module": int(len({tensor.device for tensor in tensors}) > 1),
            "find_unused_parameters": int(options.find_unused),
            "gradient_as_bucket_view": int(options.view),
            "static_graph": int(options.static),
            "can_set_static_graph": reducer._ddp_graph_static(),
            "join_uneven_inputs": int(reducer.joins),
            "has_sync_bn": int(any(isinstance(child, nn.SyncBatchNorm) for child in self.module.modules())),
            **({} if hook is None or not hook.name else {"comm_hook": hook.name}),
            **{name: os.environ.get(name.upper(), "N/A") for name in _VARIABLES},
            **(_gloo_settings() if group.name() == "gloo" else {}),
            **self._logged.facts,
        }

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Sets how often the logging data sample an iteration after the first ten; one in 100 by default."""
        if sample_rate < 1:
            raise ConfigError("DDP runtime logging sample rate should be equal or greater than 1")
        self._logged.sample_rate = sample_rate

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Does nothing, as outputs are never copied; kept for scripts."""

    def _register_fused_optim(self, optim: object, *args: object, **kwargs: object) -> NoReturn:
        raise ConfigError(
            "_register_fused_optim is not supported; step the optimizer after backward, or give the parameters "
            "optimizers with torch.distributed.optim._apply_optimizer_in_backward"
        )

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> tuple[tuple[Any], tuple[Any]]:
        """Returns positional and keyword arguments on a device, each in a tuple of one."""
        device = torch.device(self.device_type, device_id)
        return (move_to(inputs, device),), (move_to(kwargs, device),)
