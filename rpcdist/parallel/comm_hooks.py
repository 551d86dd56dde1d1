"""Communication hooks of `DistributedDataParallel`, which reduce the gradients of a bucket.

    model.register_comm_hook(None, bf16_compress_hook)

A hook gets its state and a `GradBucket`, and returns a future of a tensor with the averaged gradients.
The names are those of `torch.distributed.algorithms.ddp_comm_hooks`. The state of hooks that communicate is the process
group, or None for the model's. Buckets of sparse gradients do not go through hooks.

PowerSGD and post-local SGD are torch's own functions. Batched PowerSGD is missing, as that of torch 2.13 fails with
torch, too.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, member
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch.distributed import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup, ReduceOp
from rpcdist.parallel._ddp._comm_hook import CommHook, GradBucket
from rpcdist.parallel._ddp._quantization import quantization_perchannel_hook, quantization_pertensor_hook


class PowerSGDState(power_sgd.PowerSGDState):
    """`torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState`, whose group may be ours, or None.

    It can be pickled for a checkpoint, without its group; it gets the model's group when the hook is registered again.

    Args:
        process_group: the ranks that reduce; the model's group by default.
        **options: torch's: `matrix_approximation_rank`, `start_powerSGD_iter`, `use_error_feedback` and so on.
    """

    def __init__(self, process_group: Any = None, *args: Any, **options: Any) -> None:
        super().__init__(process_group, *args, **options)

    def compression_stats(self) -> tuple[float, int, int]:
        """Returns the compression rate, the number of elements before the compression, and the number after it."""
        rate, before, after = super().compression_stats()  # type: ignore[no-untyped-call]  # torch's method
        return rate, before, after

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = None
        for name, value in state.items():
            setattr(self, name, value)


__all__ = [
    "BuiltinCommHookType", "DDPCommHookType", "GradBucket", "PostLocalSGDState", "PowerSGDState", "TakesCommHook",
    "allreduce_hook", "bf16_compress_hook", "bf16_compress_wrapper", "builtin_hook", "fp16_compress_hook",
    "fp16_compress_wrapper", "leaves_equal_bits", "noop_hook", "post_localSGD_hook", "powerSGD_hook",
    "quantization_perchannel_hook", "quantization_pertensor_hook", "register_ddp_comm_hook",
]  # fmt: skip


post_localSGD_hook = cast(CommHook, local_sgd.post_localSGD_hook)
powerSGD_hook = cast(CommHook, power_sgd.powerSGD_hook)

TensorFuture = torch.futures.Future[torch.Tensor]
GroupHook = Callable[[ProcessGroup | None, GradBucket], TensorFuture]


def allreduce_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> TensorFuture:
    """Averages the gradients, as without a hook."""
    return _average(bucket.buffer(), process_group)


def fp16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> TensorFuture:
    """Averages in float16: half the bytes. Gradients beyond 65,504 become infinite."""
    return _average_in(torch.float16, process_group, bucket)


def bf16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> TensorFuture:
    """Averages in bfloat16: half the bytes, the range of float32, 8 bits of precision."""
    return _average_in(torch.bfloat16, process_group, bucket)


def average_in(dtype: torch.dtype, process_group: ProcessGroup) -> CommHook:
    """Makes a hook that sums in a dtype and then divides, like torch's mixed precision."""

    def hook(_: object, bucket: GradBucket) -> TensorFuture:
        numbers = _real(bucket.buffer())
        work = collectives.all_reduce(numbers.to(dtype), group=process_group, async_op=True)
        assert work is not None
        size = process_group.size()

        def divide(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            numbers.copy_(_first(done).div_(size))
            return bucket.buffer()

        return work.get_future().then(divide)

    return hook


def _real(buffer: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as real numbers, since `.to` a real dtype drops imaginary parts."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def noop_hook(_: object, bucket: GradBucket) -> TensorFuture:
    """Reduces nothing: every rank keeps its own gradients. Use it to measure the cost of communication."""
    future: TensorFuture = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def fp16_compress_wrapper(hook: CommHook) -> CommHook:
    """Wraps a hook, which then gets gradients in float16; complex ones as alternating real and imaginary parts."""
    return _in_dtype(torch.float16, hook, "fp16_compress_wrapper_hook")


def bf16_compress_wrapper(hook: CommHook) -> CommHook:
    """Wraps a hook, which then gets gradients in bfloat16; complex ones as alternating real and imaginary parts."""
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
    numbers = _real(buffer)

    def decompress(done: TensorFuture) -> torch.Tensor:
        numbers.copy_(done.value())
        return buffer

    return _average(numbers.to(dtype), group).then(decompress)


def _in_dtype(dtype: torch.dtype, hook: CommHook, name: str) -> CommHook:
    def wrapped(state: object, bucket: GradBucket) -> TensorFuture:
        original = bucket.buffer()
        numbers = _real(original)
        bucket.set_buffer(numbers.to(dtype))

        def decompress(done: TensorFuture) -> torch.Tensor:
            numbers.copy_(done.value())
            bucket.set_buffer(original)
            return original

        return hook(state, bucket).then(decompress)

    wrapped.__name__ = name
    wrapped.__wrapped__ = hook  # type: ignore[attr-defined]
    return wrapped


_BY_NAME: dict[str, GroupHook] = {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": fp16_compress_hook}
_EQUAL_BITS = (allreduce_hook, fp16_compress_hook, bf16_compress_hook)


def builtin_hook(kind: BuiltinCommHookType) -> GroupHook:
    """Returns the hook of a type. Raises TypeError if `kind` is not a hook type of rpcdist or torch."""
    hook = _BY_NAME.get(getattr(kind, "name", ""))
    if hook is None:
        raise TypeError(f"expected a member of BuiltinCommHookType, {' or '.join(_BY_NAME)}, not {kind!r}")
    return hook


def leaves_equal_bits(hook: object) -> bool:
    """Whether a hook is known to leave the same bits on all ranks."""
    return any(hook is known for known in _EQUAL_BITS)


class TakesCommHook(Protocol):
    """A model whose gradients a comm hook can reduce: `DistributedDataParallel`."""

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Uses a hook from now on."""


def _register(hook: CommHook, model: TakesCommHook, state: ProcessGroup | None = None) -> None:
    model.register_comm_hook(state, hook)


def _register_power_sgd(
    model: TakesCommHook,
    state: ProcessGroup | None = None,
    matrix_approximation_rank: int = 1,
    start_powerSGD_iter: int = 1000,
) -> None:
    made = PowerSGDState(
        state, matrix_approximation_rank=matrix_approximation_rank, start_powerSGD_iter=start_powerSGD_iter
    )
    model.register_comm_hook(made, powerSGD_hook)


class DDPCommHookType(Enum):
    """The hooks that `register_ddp_comm_hook` takes; a value is a function that registers one: `(model, state)`."""

    ALLREDUCE = member(partial(_register, allreduce_hook))
    FP16_COMPRESS = member(partial(_register, fp16_compress_hook))
    BF16_COMPRESS = member(partial(_register, bf16_compress_hook))
    QUANTIZE_PER_TENSOR = member(partial(_register, quantization_pertensor_hook))
    QUANTIZE_PER_CHANNEL = member(partial(_register, quantization_perchannel_hook))
    POWER_SGD = member(_register_power_sgd)
    POWER_SGD_RANK2 = member(partial(_register_power_sgd, matrix_approximation_rank=2))
    NOOP = member(partial(_register, noop_hook))


def register_ddp_comm_hook(
    comm_hook_type: DDPCommHookType, model: TakesCommHook, state: ProcessGroup | None = None
) -> None:
    """Registers one of the hooks of this module, given by its type; PowerSGD starts after 1,000 iterations."""
    comm_hook_type.value(model=model, state=state)
