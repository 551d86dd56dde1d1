"""What `_get_ddp_logging_data` tells, with torch's names where torch has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from rpcdist.parallel._ddp._reducer import Bucket
    from rpcdist.parallel.distributed import DistributedDataParallel

__all__ = ["logging_data"]


def logging_data(model: DistributedDataParallel) -> dict[str, str | int]:
    """The options, the buckets, and the times of the last iteration."""
    reducer, group, module = model.reducer, model.process_group, model.module
    tensors = [named.tensor for named in reducer.parameters]
    sizes = _sizes(reducer.buckets)
    return {
        "module_name": type(module).__name__,
        "backend_name": group.name(),
        "world_size": group.size(),
        "rank": group.rank(),
        "iteration": reducer.iteration,
        "dtypes": ", ".join(sorted({str(tensor.dtype)[6:] for tensor in tensors})),
        "num_parameter_tensors": len(tensors),
        "total_parameter_size_bytes": sum(tensor.nbytes for tensor in tensors),
        "bucket_cap_bytes": reducer.options.caps.num_bytes,
        "initial_bucket_sizes": _sizes_of(reducer.initial_bucket_bytes),
        "bucket_sizes": sizes,
        "rebuilt_bucket_sizes": sizes if reducer.has_rebuilt else "",
        "has_rebuilt_buckets": int(reducer.has_rebuilt),
        "broadcast_buffers": int(model.forward_sync_buffers),
        "find_unused_parameters": int(model.find_unused_parameters),
        "gradient_as_bucket_view": int(model.gradient_as_bucket_view),
        "static_graph": int(model.static_graph),
        "has_sync_bn": int(any(isinstance(child, nn.SyncBatchNorm) for child in module.modules())),
        "comm_hook": "" if reducer.hook is None else getattr(reducer.hook[0], "__name__", repr(reducer.hook[0])),
        "backward_comm_time": max(0, reducer.done_ns - reducer.first_launch_ns),
        "first_gradient_ns": reducer.first_gradient_ns,
        "first_launch_ns": reducer.first_launch_ns,
        "done_ns": reducer.done_ns,
    }


def _sizes(buckets: Sequence[Bucket]) -> str:
    return _sizes_of([bucket.num_bytes for bucket in buckets])


def _sizes_of(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
