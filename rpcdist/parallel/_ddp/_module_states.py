"""Private functions of `torch.distributed.utils` that programs call for models of their own."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import cast

import torch
from torch import nn

from rpcdist.collectives import ProcessGroup
from rpcdist.parallel._ddp._parameters import Trained, broadcast_tensors, verify


def _sync_module_states(
    module: nn.Module,
    process_group: ProcessGroup,
    broadcast_bucket_size: int,
    src: int,
    params_and_buffers_to_ignore: Container[str],
    broadcast_buffers: bool = True,
) -> None:
    """Gives all ranks the parameters and buffers of one; all of them call it."""
    named = [*module.named_parameters(), *(module.named_buffers() if broadcast_buffers else ())]
    states = [tensor for name, tensor in named if name not in params_and_buffers_to_ignore]
    broadcast_tensors(states, process_group, src)


def _sync_params_and_buffers(
    process_group: ProcessGroup, module_states: Sequence[torch.Tensor], broadcast_bucket_size: int, src: int
) -> None:
    """Gives all ranks the tensors of one; all of them call it."""
    broadcast_tensors(module_states, process_group, src)


def _verify_param_shape_across_processes(
    process_group: ProcessGroup, tensors: Sequence[torch.Tensor], logger: object = None
) -> None:
    """Raises on all ranks if the tensors of one have other shapes than those of another."""
    named = [Trained(number, f"{number}", cast("nn.Parameter", tensor)) for number, tensor in enumerate(tensors)]
    verify(named, {}, process_group)
