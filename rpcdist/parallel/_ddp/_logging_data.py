"""Options, buckets and times of a data parallel model for debugging, under torch's names where torch has them."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import nn

from rpcdist.parallel._ddp._reducer import Reducer


def logging_data(module: nn.Module, reducer: Reducer, forward_sync_buffers: bool) -> dict[str, str | int]:
    """The options, the buckets, and the times of the last iteration.

    Args:
        module: the data parallel module.
        reducer: averages its gradients.
        forward_sync_buffers: whether buffers are synchronised before each forward pass.
    """
    group, options, hook = reducer.group, reducer.options, reducer.hook
    tensors = [named.tensor for named in reducer.parameters]
    sizes = _joined(bucket.num_bytes for bucket in reducer.buckets)
    return {
        "module_name": type(module).__name__,
        "backend_name": group.name(),
        "world_size": group.size(),
        "rank": group.rank(),
        "iteration": reducer.iteration,
        "has_error": int(bool(reducer.error)),
        "error": reducer.error,
        "dtypes": ", ".join(sorted({_NAMES.get(tensor.dtype, str(tensor.dtype)[6:]) for tensor in tensors})),
        "num_parameter_tensors": len(tensors),
        "total_parameter_size_bytes": sum(tensor.nbytes for tensor in tensors),
        "bucket_cap_bytes": options.caps.num_bytes,
        "initial_bucket_sizes": _joined(reducer.initial_bucket_bytes),
        "bucket_sizes": sizes,
        "rebuilt_bucket_sizes": sizes if reducer.has_rebuilt else "",
        "has_rebuilt_buckets": int(reducer.has_rebuilt),
        "num_buckets_reduced": reducer.num_buckets_reduced,
        "broadcast_buffers": int(forward_sync_buffers),
        "find_unused_parameters": int(options.find_unused),
        "gradient_as_bucket_view": int(options.view),
        "static_graph": int(options.static),
        "can_set_static_graph": reducer._ddp_graph_static(),
        "join_uneven_inputs": int(reducer.joins),
        "has_sync_bn": int(any(isinstance(child, nn.SyncBatchNorm) for child in module.modules())),
        **({} if hook is None or not hook.name else {"comm_hook": hook.name}),
        **{name: os.environ.get(name.upper(), "N/A") for name in _VARIABLES},
        **_times(reducer),
        "first_gradient_ns": reducer.first_gradient_ns,
        "first_launch_ns": reducer.first_launch_ns,
        "done_ns": reducer.done_ns,
    }


_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}
"""torch's names of dtypes, where they are not those of Python."""
_VARIABLES = ("master_addr", "master_port", "cuda_visible_devices", "torch_distributed_debug")


def _times(reducer: Reducer) -> dict[str, int]:
    """Durations and moments of the last iteration in nanoseconds; 0 for what has not come yet."""
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


def _joined(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes))
