"""Options, buckets and times of a data parallel model for debugging, under torch's names where torch has them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from rpcdist.parallel._ddp._reducer import Reducer

__all__ = ["logging_data"]


def logging_data(module: nn.Module, reducer: Reducer, forward_sync_buffers: bool) -> dict[str, str | int]:
    """The options, the buckets, and the times of the last iteration.

    Args:
        module: the data parallel module.
        reducer: averages its gradients.
        forward_sync_buffers: whether buffers are synchronised before each forward pass.
    """
    group, options = reducer.group, reducer.options
    tensors = [named.tensor for named in reducer.parameters]
    sizes = _joined(bucket.num_bytes for bucket in reducer.buckets)
    return {
        "module_name": type(module).__name__,
        "backend_name": group.name(),
        "world_size": group.size(),
        "rank": group.rank(),
        "iteration": reducer.iteration,
        "dtypes": ", ".join(sorted({str(tensor.dtype)[6:] for tensor in tensors})),
        "num_parameter_tensors": len(tensors),
        "total_parameter_size_bytes": sum(tensor.nbytes for tensor in tensors),
        "bucket_cap_bytes": options.caps.num_bytes,
        "initial_bucket_sizes": _joined(reducer.initial_bucket_bytes),
        "bucket_sizes": sizes,
        "rebuilt_bucket_sizes": sizes if reducer.has_rebuilt else "",
        "has_rebuilt_buckets": int(reducer.has_rebuilt),
        "broadcast_buffers": int(forward_sync_buffers),
        "find_unused_parameters": int(options.find_unused),
        "gradient_as_bucket_view": int(options.view),
        "static_graph": int(options.static),
        "has_sync_bn": int(any(isinstance(child, nn.SyncBatchNorm) for child in module.modules())),
        **({"comm_hook": reducer.hook.name} if reducer.hook is not None and reducer.hook.name else {}),
        "backward_comm_time": max(0, reducer.done_ns - reducer.first_launch_ns),
        "first_gradient_ns": reducer.first_gradient_ns,
        "first_launch_ns": reducer.first_launch_ns,
        "done_ns": reducer.done_ns,
    }


def _joined(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes))
