"""Communication hooks that send gradients as bytes: a quarter of float32, each rank's rounding on its own scale.

The numbers are those of torch's hooks of the same names. Codes and scales travel in one `all_gather` (torch's hooks
take two, and work with NCCL only), so a rank receives world_size bytes for each element.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup
from rpcdist.parallel._ddp._comm_hook import GradBucket

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]

LARGEST: Final = 255
LEAST_SCALE: Final = torch.finfo(torch.float32).eps
SCALE_BYTES: Final = 8  # a scale and a zero point, both float32

TensorFuture = torch.futures.Future[torch.Tensor]


def quantization_pertensor_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> TensorFuture:
    """Averages gradients that were rounded to 256 values, evenly between the smallest and the largest of the bucket."""
    return _average(process_group, bucket.buffer(), max(1, bucket.buffer().numel()))


def quantization_perchannel_hook(
    process_group: ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> TensorFuture:
    """The same with a scale of its own for each `bucket_size` elements: closer, and 8 bytes more for each."""
    return _average(process_group, bucket.buffer(), bucket_size)


def _average(group: ProcessGroup | None, buffer: torch.Tensor, row: int) -> TensorFuture:
    size = collectives.get_world_size(group)
    message, num_rows = _encode(buffer, row)
    gathered = torch.empty(size * message.numel(), dtype=torch.uint8, device=buffer.device)
    work = collectives.all_gather_into_tensor(gathered, message, group=group, async_op=True)
    assert work is not None

    def decode(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        done.value()  # raises what went wrong
        total = torch.zeros(num_rows, row, dtype=torch.float32, device=buffer.device)
        for part in gathered.view(size, -1):
            total += _decode(part, num_rows, row)
        return buffer.copy_(total.view(-1)[: buffer.numel()].div_(size))

    return work.get_future().then(decode)


def _encode(buffer: torch.Tensor, row: int) -> tuple[torch.Tensor, int]:
    """Scales and zero points of all rows, then the codes, as bytes; and the number of rows."""
    rows = F.pad(buffer.float(), (0, -buffer.numel() % row)).view(-1, row)
    low, high = rows.amin(1).clamp_(max=0), rows.amax(1).clamp_(min=0)
    scale = ((high - low) / LARGEST).clamp_(min=LEAST_SCALE)
    zero = low.div(scale).round_().neg_().clamp_(0, LARGEST)
    codes = rows.div(scale[:, None]).round_().add_(zero[:, None]).clamp_(0, LARGEST).to(torch.uint8)
    return torch.cat([torch.cat([scale, zero]).view(torch.uint8), codes.view(-1)]), len(rows)


def _decode(message: torch.Tensor, num_rows: int, row: int) -> torch.Tensor:
    head = SCALE_BYTES * num_rows
    # A copy: the part of another rank may begin at an address that floats must not have.
    scale, zero = message[:head].clone().view(torch.float32).view(2, num_rows, 1)
    codes = message[head:].view(num_rows, row).float()
    return codes.sub_(zero).mul_(scale)
