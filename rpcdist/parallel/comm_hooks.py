"""Communication hooks of `DistributedDataParallel`: how the gradients of a bucket are reduced.

    model.register_comm_hook(None, bf16_compress_hook)

A hook gets its state and a `GradBucket`, and returns a future of a tensor with the averaged gradients.
The names are those of `torch.distributed.algorithms.ddp_comm_hooks`. The state of hooks that communicate is the process
group, or None for the default one. Buckets of sparse gradients do not go through hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

import torch

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup, ReduceOp
from rpcdist.parallel._ddp._comm_hook import CommHook, GradBucket

__all__ = [
    "BuiltinCommHookType",
    "DDPCommHookType",
    "GradBucket",
    "TakesCommHook",
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "builtin_hook",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "leaves_equal_bits",
    "noop_hook",
    "register_ddp_comm_hook",
]

TensorFuture = torch.futures.Future[torch.Tensor]
GroupHook = Callable[[ProcessGroup | None, GradBucket], TensorFuture]


def allreduce_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> TensorFuture:
    """Averages the gradients: the same as without a hook."""
    return _average(bucket.buffer(), process_group)


def fp16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> TensorFuture:
    """Averages in float16: half the bytes. Gradients beyond 65,504 become infinite."""
    return _average_in(torch.float16, process_group, bucket)


def bf16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> TensorFuture:
    """Averages in bfloat16: half the bytes, the range of float32, 8 bits of precision."""
    return _average_in(torch.bfloat16, process_group, bucket)


def noop_hook(_: object, bucket: GradBucket) -> TensorFuture:
    """Reduces nothing: every rank keeps its own gradients. Shows what communication costs."""
    future: TensorFuture = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def fp16_compress_wrapper(hook: CommHook) -> CommHook:
    """Wraps a hook: it gets the gradients in float16."""
    return _in_dtype(torch.float16, hook, "fp16_compress_wrapper_hook")


def bf16_compress_wrapper(hook: CommHook) -> CommHook:
    """Wraps a hook: it gets the gradients in bfloat16."""
    return _in_dtype(torch.bfloat16, hook, "bf16_compress_wrapper_hook")


def _average(tensor: torch.Tensor, group: ProcessGroup | None) -> TensorFuture:
    op = ReduceOp.AVG
    if tensor.dtype is torch.float16:  # its sum could overflow
        tensor.div_(collectives.get_world_size(group))
        op = ReduceOp.SUM
    work = collectives.all_reduce(tensor, op, group, async_op=True)
    assert work is not None
    return work.get_future().then(_first)


def _first(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return done.value()[0]


def _average_in(dtype: torch.dtype, group: ProcessGroup | None, bucket: GradBucket) -> TensorFuture:
    buffer = bucket.buffer()

    def decompress(done: TensorFuture) -> torch.Tensor:
        return buffer.copy_(done.value())

    return _average(buffer.to(dtype), group).then(decompress)


def _in_dtype(dtype: torch.dtype, hook: CommHook, name: str) -> CommHook:
    def wrapped(state: object, bucket: GradBucket) -> TensorFuture:
        original = bucket.buffer()
        bucket.set_buffer(original.to(dtype))

        def decompress(done: TensorFuture) -> torch.Tensor:
            result = done.value()
            original.copy_(result)
            bucket.set_buffer(original)
            return original

        return hook(state, bucket).then(decompress)

    wrapped.__name__ = name
    return wrapped


class BuiltinCommHookType(Enum):
    """The hooks that `_register_builtin_comm_hook` takes."""

    ALLREDUCE = "allreduce"
    FP16_COMPRESS = "fp16_compress"


class DDPCommHookType(Enum):
    """The hooks that `register_ddp_comm_hook` takes."""

    ALLREDUCE = "allreduce"
    FP16_COMPRESS = "fp16_compress"
    BF16_COMPRESS = "bf16_compress"
    NOOP = "noop"


_BY_TYPE: dict[str, GroupHook] = {
    "allreduce": allreduce_hook,
    "fp16_compress": fp16_compress_hook,
    "bf16_compress": bf16_compress_hook,
    "noop": noop_hook,
}
_EQUAL_BITS = frozenset({"allreduce", "fp16_compress", "bf16_compress"})


def builtin_hook(kind: BuiltinCommHookType | DDPCommHookType) -> GroupHook:
    """The function of that type."""
    return _BY_TYPE[kind.value]


def leaves_equal_bits(hook: object) -> bool:
    """Whether a hook is known to leave the same bits on all ranks."""
    return any(hook is _BY_TYPE[name] for name in _EQUAL_BITS)


class TakesCommHook(Protocol):
    """A model whose gradients a comm hook can reduce: `DistributedDataParallel`."""

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Uses a hook from now on."""


def register_ddp_comm_hook(
    comm_hook_type: DDPCommHookType, model: TakesCommHook, state: ProcessGroup | None = None
) -> None:
    """Registers one of the hooks of this module, given by its type."""
    model.register_comm_hook(state, builtin_hook(comm_hook_type))  # type: ignore[arg-type]  # its state is narrower
