"""The answer of `_get_ddp_logging_data`, for debugging: options, buckets and times of a model, under torch's names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from rpcdist.parallel._ddp._reducer import Reducer

_FIRST = 10
"""So many iterations at the start are sampled, whatever the rate is; as in torch."""


class SampledIteration:
    """The times of the last iteration that was sampled, and their averages over all that were.

    The first ten iterations are sampled, and later one in `sample_rate`; each where the next forward pass begins, as in
    torch.

    Attributes:
        sample_rate: one in so many iterations is sampled.
        iteration: the last one that was; 0 before.
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
        """Takes the times of the last iteration, if it ended and is one of those to sample."""
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


def logging_data(
    module: nn.Module,
    reducer: Reducer,
    sampled: SampledIteration,
    *,
    forward_sync_buffers: bool,
    device_ids: Sequence[object] | None,
) -> dict[str, str | int]:
    """The options and the buckets, and the times of the last iteration that was sampled.

    Args:
        module: the data parallel module.
        reducer: averages its gradients.
        sampled: the last iteration that was sampled.
        forward_sync_buffers: whether buffers are synchronised before each forward pass.
        device_ids: the device to which inputs are moved.
    """
    group, options, hook = reducer.group, reducer.options, reducer.hook
    tensors = [named.tensor for named in reducer.parameters]
    sizes = _joined(bucket.num_bytes for bucket in reducer.buckets)
    members = ", ".join(" ".join(str(member.index) for member in bucket.members) for bucket in reducer.buckets)
    return {
        "module_name": type(module).__name__,
        "backend_name": group.name(),
        "world_size": group.size(),
        "rank": group.rank(),
        "iteration": reducer.iteration if reducer.error else sampled.iteration,
        "has_error": int(bool(reducer.error)),
        "error": reducer.error,
        "dtypes": ", ".join(sorted({_NAMES.get(tensor.dtype, str(tensor.dtype)[6:]) for tensor in tensors})),
        "num_parameter_tensors": len(tensors),
        "total_parameter_size_bytes": sum(tensor.nbytes for tensor in tensors),
        "bucket_cap_bytes": options.caps.num_bytes,
        "initial_bucket_sizes": _joined(reducer.initial_bucket_bytes),
        "bucket_sizes": sizes,
        "rebuilt_bucket_sizes": sizes if reducer.has_rebuilt else "",
        "rebuilt_per_bucket_param_indices": members if reducer.has_rebuilt else "",
        "has_rebuilt_buckets": int(reducer.has_rebuilt),
        "num_buckets_reduced": reducer.num_buckets_reduced,
        "broadcast_buffers": int(forward_sync_buffers),
        "device_ids": _joined(device_ids or ()),
        "output_device": -1,
        "is_multi_device_module": int(len({tensor.device for tensor in tensors}) > 1),
        "find_unused_parameters": int(options.find_unused),
        "gradient_as_bucket_view": int(options.view),
        "static_graph": int(options.static),
        "can_set_static_graph": reducer._ddp_graph_static(),
        "join_uneven_inputs": int(reducer.joins),
        "has_sync_bn": int(any(isinstance(child, nn.SyncBatchNorm) for child in module.modules())),
        **({} if hook is None or not hook.name else {"comm_hook": hook.name}),
        **{name: os.environ.get(name.upper(), "N/A") for name in _VARIABLES},
        **(_gloo_settings() if group.name() == "gloo" else {}),
        **sampled.facts,
    }


_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}
"""torch's names of dtypes, where they are not those of Python."""
_VARIABLES = ("master_addr", "master_port", "cuda_visible_devices", "torch_distributed_debug")
_GLOO_THREADS = 2  # torch's default, which nothing here can change
_AVERAGED = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)


def _gloo_settings() -> dict[str, str | int]:
    """The settings of Gloo, for a group that was asked for by that name; only the interface matters to ours."""
    variables = ("gloo_socket_ifname", "gloo_device_transport")
    return {**{name: os.environ.get(name.upper(), "N/A") for name in variables}, "gloo_num_threads": _GLOO_THREADS}


def _times(reducer: Reducer) -> dict[str, int]:
    """Durations and moments of an iteration in nanoseconds."""
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
