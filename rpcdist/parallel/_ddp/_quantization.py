"""Communication hooks that send gradients as bytes, a quarter of float32, with a scale for each rank.

The results are those of torch's hooks with the same names. Codes and scales are sent in one `all_gather` (torch's
hooks use two, and work only with NCCL), so a rank receives world_size bytes for each element.

`adapt_hook` replaces torch's hooks, which take groups of torch, by these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup
from rpcdist.errors import ConfigError
from rpcdist.parallel._ddp import _quantization
from rpcdist.parallel._ddp._comm_hook import CommHook, GradBucket, module_of_hook

LARGEST: Final = 255
LEAST_SCALE: Final = torch.finfo(torch.float32).eps
SCALE_BYTES: Final = 8  # a scale and a zero point, both float32
BLOCK: Final = 128 << 10  # numbers, 512 KiB of float32

TensorFuture = torch.futures.Future[torch.Tensor]


def quantization_pertensor_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> TensorFuture:
    """Averages gradients rounded to 256 values, evenly spaced between the smallest and the largest of the bucket."""
    return _average(process_group, bucket.buffer(), max(1, bucket.buffer().numel()))


def quantization_perchannel_hook(
    process_group: ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> TensorFuture:
    """Like `quantization_pertensor_hook`, with a scale for each `bucket_size` elements: more precise, 8 bytes more."""
    return _average(process_group, bucket.buffer(), bucket_size)


def _average(group: ProcessGroup | None, buffer: torch.Tensor, row: int) -> TensorFuture:
    size = collectives.get_world_size(group)
    rows = _rows_of(buffer, row)
    message = _encode(rows)
    gathered = torch.empty(size * message.numel(), dtype=torch.uint8, device=buffer.device)
    work = collectives.all_gather_into_tensor(gathered, message, group=group, async_op=True)
    assert work is not None

    def decode(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        done.value()  # raises the error, if any
        _average_into(rows, list(gathered.view(size, -1)))
        if rows.data_ptr() != buffer.data_ptr():
            buffer.copy_(rows.view(-1)[: buffer.numel()])
        return buffer

    return work.get_future().then(decode)


def _rows_of(buffer: torch.Tensor, row: int) -> torch.Tensor:
    """Returns the numbers as float32 in rows of this length, the last one padded with zeros; a view if possible."""
    missing = -buffer.numel() % row
    return (F.pad(buffer.float(), (0, missing)) if missing else buffer.float()).view(-1, row)


def _encode(rows: torch.Tensor) -> torch.Tensor:
    """Returns the scales and zero points of all rows, then the codes, as bytes."""
    low, high = rows.amin(1, keepdim=True).clamp_(max=0), rows.amax(1, keepdim=True).clamp_(min=0)
    scale = ((high - low) / LARGEST).clamp_(min=LEAST_SCALE)
    zero = low.div(scale).round_().neg_().clamp_(0, LARGEST)
    head = torch.cat([scale, zero]).view(-1).view(torch.uint8)
    message = torch.empty(len(head) + rows.numel(), dtype=torch.uint8, device=rows.device)
    message[: len(head)] = head
    codes = message[len(head) :].view(rows.shape)
    for numbers, out, divisor, offset in _blocks(rows, codes, scale, zero):
        out.copy_(numbers.div(divisor).round_().add_(offset).clamp_(0, LARGEST))
    return message


def _average_into(rows: torch.Tensor, messages: Sequence[torch.Tensor]) -> None:
    parts = [_blocks(rows, *_decoded(message, rows)) for message in messages]
    for ranks in zip(*parts, strict=True):
        total = ranks[0][0].zero_()
        for _, codes, scale, zero in ranks:
            total.add_(codes.float().sub_(zero).mul_(scale))
        total.div_(len(messages))


def _decoded(message: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the codes in a message, one for each number in `rows`, and the scales and zero points of the rows."""
    head = SCALE_BYTES * len(rows)
    # A copy, since the part of another rank may start at an address that is not aligned for floats.
    scale, zero = message[:head].clone().view(torch.float32).view(2, len(rows), 1)
    return message[head:].view(rows.shape), scale, zero


def _blocks(rows: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields parts of rows with the corresponding parts of `others`, which have a number for each number or row.

    On the CPU a part stays in the processor's cache for all computations: with whole buckets, each of six operators
    would write tens of megabytes and read them again.
    """
    num_rows, row = rows.shape
    wide = [other.expand(num_rows, row) for other in (rows, *others)]
    if rows.device.type != "cpu":
        return iter([tuple(wide)])
    parts = (one.split(BLOCK, 1) if num_rows == 1 else one.split(max(1, BLOCK // row)) for one in wide)
    return zip(*parts, strict=True)


def adapt_hook(hook: CommHook, state: Any, group: ProcessGroup) -> tuple[CommHook, Any]:
    """Returns the hook and the state to use for those that the user registers.

    Args:
        hook: ours, torch's, or the user's own, which is returned unchanged, with its state.
        state: the argument of the hook. If a hook of ours or torch's needs a group, None and groups of ours are
            replaced by a group that it can use; an object such as `PowerSGDState` stays the same, and gets the group.
        group: the model's group, which replaces None.

    Raises:
        ConfigError: torch's hook steps an optimizer.
    """
    module = module_of_hook(hook)
    if module.startswith("rpcdist.parallel."):
        inside = getattr(hook, "__wrapped__", None)  # the hook inside a wrapper, to which the state belongs
        if inside is not None:
            return hook, adapt_hook(inside, state, group)[1]
        return hook, group if state is None else state
    if not module.startswith("torch.distributed."):
        return hook, state
    if module.endswith(".optimizer_overlap_hooks"):
        raise ConfigError(
            "communication hooks that step optimizers are not supported: step after backward, or give the parameters "
            "optimizers with torch.distributed.optim._apply_optimizer_in_backward"
        )
    if module.endswith(".quantization_hooks"):  # torch's rely on the results of NCCL's futures
        return getattr(_quantization, getattr(hook, "__name__", "")), group if state is None else state
    return hook, _torch_state(state, group)


def _torch_state(state: Any, group: ProcessGroup) -> Any:
    from rpcdist.collectives.torch_backend import as_torch_group

    if state is None or isinstance(state, ProcessGroup):
        return as_torch_group(group if state is None else state)
    for name in ("process_group", "subgroup"):
        given = getattr(state, name, state)
        if isinstance(given, ProcessGroup):
            setattr(state, name, as_torch_group(given))
        elif given is None and name == "process_group":
            setattr(state, name, as_torch_group(group))
    return state
