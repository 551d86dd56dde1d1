"""The parameters and buffers of a module: selects them, compares them between ranks, and broadcasts them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import nn

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup
from rpcdist.parallel._ddp._ddp_errors import ModelsDiffer

PACKED_BELOW_BYTES: Final = 1 << 20
"""Smaller tensors are broadcast together."""
MAX_PACK_BYTES: Final = 64 << 20
MAX_DIFFERENCES: Final = 10


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained parameter."""

    index: int
    name: str
    tensor: nn.Parameter
    sparse: bool = False


def trainable(module: nn.Module, ignored: Iterable[str] = ()) -> list[Trained]:
    """Returns the parameters that require gradients, each once, in the order of the modules."""
    skipped = set(ignored)
    found: dict[nn.Parameter, Trained] = {}
    for prefix, child in module.named_modules():
        sparse = isinstance(child, nn.Embedding | nn.EmbeddingBag) and bool(child.sparse)
        for own_name, parameter in child.named_parameters(recurse=False):
            name = f"{prefix}.{own_name}" if prefix else own_name
            if parameter.requires_grad and name not in skipped:
                found.setdefault(parameter, Trained(len(found), name, parameter, sparse))
    return list(found.values())


def frozen(module: nn.Module, ignored: Iterable[str] = ()) -> dict[str, nn.Parameter]:
    """Returns the other parameters by name, without the ignored ones."""
    skipped = set(ignored)
    named = module.named_parameters()
    return {name: parameter for name, parameter in named if not parameter.requires_grad and name not in skipped}


def named_buffers(module: nn.Module, ignored: Iterable[str] = ()) -> dict[str, torch.Tensor]:
    """Returns the module's buffers by name, without the ignored ones."""
    skipped = set(ignored)
    return {name: buffer for name, buffer in module.named_buffers() if name not in skipped}


def has_buffers(module: nn.Module) -> bool:
    """Whether a module has buffers; faster than `named_buffers`, as every forward pass calls it."""
    pending = [module]
    while pending:
        each = pending.pop()
        if each._buffers:
            return True
        pending += [child for child in each._modules.values() if child is not None]
    return False


# ---------------------------------------------------------------- comparing the ranks


def verify(parameters: Sequence[Trained], options: Mapping[str, object], group: ProcessGroup) -> None:
    """Checks that all ranks have the same parameters and options. All ranks must call it.

    Equal ranks exchange one small digest. If the digests differ, they exchange descriptions of their parameters.

    Raises:
        ModelsDiffer: they differ; all ranks raise it.
    """
    mine = {parameter.name: _describe(parameter) for parameter in parameters}
    choices = {name: str(value) for name, value in options.items()}
    text = json.dumps([list(mine.items()), choices])
    digest = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
    digest = digest.to(group.object_device)
    digests = digest.new_empty(group.size(), digest.numel())
    collectives.all_gather_single(digests, digest, group=group)
    if bool((digests == digest).all()):
        return
    views: list[object] = [None] * group.size()
    collectives.all_gather_object(views, (mine, choices), group=group)
    differences = _differences(cast("list[tuple[dict[str, str], dict[str, str]]]", views))
    if differences:
        raise ModelsDiffer(
            "DistributedDataParallel needs the same model on every rank, but: "
            + "; ".join(differences[:MAX_DIFFERENCES])
        )


def _describe(parameter: Trained) -> str:
    tensor = parameter.tensor
    sparse = ", with sparse gradients" if parameter.sparse else ""
    return f"{str(tensor.dtype)[6:]} of shape {tuple(tensor.shape)} and strides {tensor.stride()}{sparse}"


def _differences(views: Sequence[tuple[Mapping[str, str], Mapping[str, str]]]) -> list[str]:
    """Describes the differences between rank 0 and each other rank."""
    (first, first_choices), found = views[0], []
    for rank, (own, choices) in enumerate(views[1:], start=1):
        found += [f"parameter {name!r} exists on rank 0 but not on rank {rank}" for name in first if name not in own]
        found += [f"parameter {name!r} exists on rank {rank} but not on rank 0" for name in own if name not in first]
        found += [
            f"parameter {name!r} is {first[name]} on rank 0 and {text} on rank {rank}"
            for name, text in own.items()
            if name in first and first[name] != text
        ]
        found += [
            f"{name} is {first_choices.get(name)} on rank 0 and {value} on rank {rank}"
            for name, value in choices.items()
            if first_choices.get(name) != value
        ]
        if list(own) != list(first) and set(own) == set(first):
            found.append(f"rank {rank} has the parameters in a different order from rank 0")
    return found


# ---------------------------------------------------------------- broadcasting


def broadcast_tensors(tensors: Sequence[torch.Tensor], group: ProcessGroup, group_src: int = 0) -> None:
    """Copies the values of one rank into the tensors of all ranks. All ranks call it, with equal shapes."""
    if group.size() == 1:
        return
    packs: dict[torch.device, list[torch.Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
            if plain.nbytes >= PACKED_BELOW_BYTES:
                collectives.broadcast(plain, group=group, group_src=group_src)
                continue
            pack = packs.setdefault(plain.device, [])
            pack.append(plain)
            if sum(each.nbytes for each in pack) >= MAX_PACK_BYTES:
                _broadcast_packed(packs.pop(plain.device), group, group_src)
        for pack in packs.values():
            _broadcast_packed(pack, group, group_src)


def _broadcast_packed(tensors: Sequence[torch.Tensor], group: ProcessGroup, group_src: int) -> None:
    """Broadcasts small tensors as one tensor of bytes."""
    flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    collectives.broadcast(flat, group=group, group_src=group_src)
    if group.rank() == group_src:
        return
    start = 0
    for tensor in tensors:
        part = flat[start : start + tensor.nbytes]
        start += tensor.nbytes
        if part.storage_offset() % tensor.itemsize:
            part = part.clone()  # `view` as a wider dtype needs aligned memory
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def _sync_module_states(
    module: nn.Module,
    process_group: ProcessGroup,
    broadcast_bucket_size: int,
    src: int,
    params_and_buffers_to_ignore: Container[str],
    broadcast_buffers: bool = True,
) -> None:
    """Gives all ranks the parameters and buffers of one rank; all ranks call it."""
    named = [*module.named_parameters(), *(module.named_buffers() if broadcast_buffers else ())]
    states = [tensor for name, tensor in named if name not in params_and_buffers_to_ignore]
    broadcast_tensors(states, process_group, src)


def _sync_params_and_buffers(
    process_group: ProcessGroup, module_states: Sequence[torch.Tensor], broadcast_bucket_size: int, src: int
) -> None:
    """Gives all ranks the tensors of one rank; all ranks call it."""
    broadcast_tensors(module_states, process_group, src)


def _verify_param_shape_across_processes(
    process_group: ProcessGroup, tensors: Sequence[torch.Tensor], logger: object = None
) -> None:
    """Raises on all ranks if the shapes of the tensors differ between ranks."""
    named = [Trained(number, f"{number}", cast("nn.Parameter", tensor)) for number, tensor in enumerate(tensors)]
    verify(named, {}, process_group)
