"""`SyncBatchNorm`: batch normalisation over the batches of all ranks together, on CPU and GPU.

    model = SyncBatchNorm.convert_sync_batchnorm(model)
    model = DistributedDataParallel(model)

In training mode, mean and variance are those of the whole batch, so the results are those of one process with the data
of all ranks. `DistributedDataParallel` converts torch's own `nn.SyncBatchNorm` layers to this class.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup
from rpcdist.parallel._ddp._ddp_arguments import default_group, member_group

__all__ = ["SyncBatchNorm", "adopt_sync_batch_norms"]


class SyncBatchNorm(nn.SyncBatchNorm):
    """`nn.SyncBatchNorm` on our process groups: the same constructor, state and `convert_sync_batchnorm`.

    Inputs are (N, C, ...), and may be empty on some ranks; all ranks of the group call it equally often. In evaluation
    mode, with one rank, and before `init_process_group` it is `nn.BatchNorm`. Statistics are in float32 at least.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats, device, dtype: as in `nn.BatchNorm2d`.
        process_group: the ranks whose batches are normalised together; all by default.
        bias: whether it has a bias, with `affine`.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalised input.

        Raises:
            ValueError: the input has fewer than two dimensions or no channels, or the ranks have one value per channel.
        """
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        group = self._group()
        if group is None or group.size() == 1:
            return nn.modules.batchnorm._BatchNorm.forward(self, input)
        momentum = self._count_batch()
        outputs: tuple[torch.Tensor, ...] = _Normalise.apply(input, self.weight, self.bias, self.eps, group)  # type: ignore[no-untyped-call]  # torch's method
        output, mean, variance = outputs
        self._track(mean, variance, momentum)
        return output

    def _count_batch(self) -> float:
        """Counts a training batch; returns its weight in the running statistics."""
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return 0.0 if self.momentum is None else self.momentum

    def _group(self) -> ProcessGroup | None:
        """Returns the group for the synchronisation; None not to synchronise."""
        if not self.training:
            return None
        return default_group() if self.process_group is None else member_group(self.process_group)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, momentum: float) -> None:
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: ProcessGroup | None = None) -> nn.Module:
        """Replaces all `nn.BatchNorm*` layers of a module, in place; returns it, or the new layer if it is one itself.

        Parameters, buffers and training mode do not change. torch's `nn.SyncBatchNorm` layers are replaced, too.

        Args:
            module: the model; do it before wrapping it and before making an optimizer.
            process_group: see the class.
        """
        if isinstance(module, cls):
            return module
        # torch's method calls this one for the children.
        converted: nn.Module = super().convert_sync_batchnorm(module, process_group)  # type: ignore[no-untyped-call]
        if type(converted) is nn.SyncBatchNorm:
            converted.__class__ = cls
        return converted


def adopt_sync_batch_norms(module: nn.Module, group: ProcessGroup) -> None:
    """Makes the `nn.SyncBatchNorm` layers of a module synchronise in groups of rpcdist instead of torch's.

    Args:
        module: the module; its layers change their class, but stay the same objects.
        group: the group of layers without a group, if no default group exists.
    """
    for layer in module.modules():
        if type(layer) is nn.SyncBatchNorm:
            layer.__class__ = SyncBatchNorm
            if layer.process_group is not None:
                layer.process_group = member_group(layer.process_group)
            elif default_group() is None:
                layer.process_group = group


class _Normalise(torch.autograd.Function):
    """Normalises with the statistics of all ranks; also returns their mean and unbiased variance, of shape (C,)."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, squares, total = _whole_statistics(input.detach(), group)
        if total < 2:
            raise ValueError(f"Expected more than 1 value per channel on all ranks together, got {total:g}")
        variance = squares / total
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(variance + eps))
        ctx.group, ctx.total = group, total
        wide = mean.dtype
        weight, bias = (None if each is None else each.to(wide) for each in (weight, bias))
        output = F.batch_norm(input.to(wide), mean, variance, weight, bias, False, 0.0, eps).to(input.dtype)
        unbiased = squares / (total - 1)
        ctx.mark_non_differentiable(mean, unbiased)
        return output, mean, unbiased

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: object) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, inverse = ctx.saved_tensors
        dims = _dims(input)
        shape = [1, -1, *(1 for _ in input.shape[2:])]  # in which values per channel are broadcast to the input
        wide = grad.to(mean.dtype)
        centred = input.to(mean.dtype) - mean.view(shape)
        # Only of this rank: DistributedDataParallel averages the gradients of weight and bias like all others.
        sums = torch.cat([wide.sum(dims), (wide * centred).sum(dims)])
        grad_bias, grad_weight = sums[: len(mean)].clone(), sums[len(mean) :] * inverse
        grad_input = None
        if ctx.needs_input_grad[0]:
            collectives.all_reduce(sums, group=ctx.group)
            of_grad, of_product = (sums / ctx.total).split(len(mean))
            slope = of_product * inverse * inverse
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            grad_input = (wide - of_grad.view(shape) - centred * slope.view(shape)) * scale.view(shape)
            grad_input = grad_input.to(input.dtype)
        return (
            grad_input,
            grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            grad_bias.to(input.dtype if weight is None else weight.dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def _whole_statistics(input: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Returns mean and sum of squared deviations of each channel over all ranks, and the number of values per channel.

    The ranks gather their own means and sums of squares, and combine them as in Chan, Golub and LeVeque (1979), since
    sums of squares around zero would cancel.
    """
    dims, channels = _dims(input), input.shape[1]
    wide = torch.promote_types(input.dtype, torch.float32)
    own = torch.zeros(2 * channels + 1, dtype=wide, device=input.device)
    if input.numel():
        variance, mean = torch.var_mean(input.to(wide), dims, correction=0)
        count = input.numel() // channels
        own[:channels], own[channels:-1], own[-1] = mean, variance * count, count
    gathered = torch.empty(group.size() * len(own), dtype=wide, device=input.device)
    collectives.all_gather_into_tensor(gathered, own, group=group)
    means, squares, counts = gathered.view(group.size(), -1).split([channels, channels, 1], 1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    return mean, (squares + counts * (means - mean) ** 2).sum(0), float(total)


def _dims(input: torch.Tensor) -> list[int]:
    """Returns all dimensions except that of the channels."""
    return [0, *range(2, input.dim())]
