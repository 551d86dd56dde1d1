"""Collectives of Python objects: pickled, moved as bytes, and unpickled on the caller's thread.

Unpickling runs code that the sender chooses. All ranks of a group have proven the job token, so they may run any code
here anyway; keep the token secret.

With `weights_only`, which all ranks of a call pass alike, `torch.save` writes the objects and
`torch.load(weights_only=True)` reads them: tensors, numbers, strings, containers of these, Python's errors, and types
registered with `torch.serialization.add_safe_globals`. Other objects raise, and no code that the sender chooses runs.

These functions do not carry objects of RPC (RRefs).
"""

from __future__ import annotations

import builtins
import io
import pickle
import traceback
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from rpcdist.collectives._api import operations
from rpcdist.collectives._api.point_to_point import P2POp, batch_isend_irecv, irecv, isend, recv, send
from rpcdist.collectives._group.world import Group, member_group, resolve_group_rank, resolve_root
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.errors import ConfigError, begins_traceback

__all__ = [
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list",
    "send_object_list",
]  # fmt: skip

Device = torch.device | str


@begins_traceback
def all_gather_object(object_list: list[object], obj: object, group: Group = None, weights_only: bool = False) -> None:
    """Puts the object of rank i into `object_list[i]`; the list has at least as many places as the group has ranks."""
    pg = member_group(group, "all_gather_object")
    if pg is None:
        return
    _check_length(object_list, pg, "object_list")
    object_list[: pg.size()] = _gathered(pg, obj, None, weights_only)


@begins_traceback
def gather_object(
    obj: object,
    object_gather_list: list[object] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> None:
    """Puts the object of rank i into `object_gather_list[i]` on rank `dst` (0 by default); other ranks pass no list."""
    pg = member_group(group, "gather_object")
    if pg is None:
        return
    root = resolve_root(pg, dst, group_dst)
    operations.check_list_at(pg.rank() == root, object_gather_list or (), "gather_list", "destination")
    if object_gather_list:
        _check_length(object_gather_list, pg, "object_gather_list")
    found = _gathered(pg, obj, root, weights_only)
    if object_gather_list:
        object_gather_list[: pg.size()] = found


def _gathered(pg: ProcessGroup, obj: object, root: int | None, weights_only: bool) -> list[object]:
    """Returns the objects of all ranks, by rank, on the root, or on all ranks if it is None; elsewhere nothing."""
    data = _pickled(obj, pg.object_device, weights_only)
    sizes = torch.empty(pg.size(), dtype=torch.int64, device=data.device)
    operations.all_gather_single(sizes, sizes.new_tensor([data.numel()]), group=pg)
    largest = int(sizes.max())
    parts = list(data.new_empty(pg.size() * largest).chunk(pg.size())) if root in (None, pg.rank()) else []
    if root is None:
        operations.all_gather(parts, _padded(data, largest), group=pg)
    else:
        operations.gather(_padded(data, largest), parts or None, group=pg, group_dst=root)
    return [_unpickled(part[:size], weights_only) for part, size in zip(parts, sizes.tolist(), strict=False)]


@begins_traceback
def broadcast_object_list(
    object_list: list[object],
    src: int | None = None,
    group: Group = None,
    device: Device | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Replaces the objects in the list by those of rank `src` (0 by default); all lists have the same length.

    Args:
        object_list: changed in place.
        src: rank in the world.
        group: the default group by default.
        device: the device of the transferred bytes; by default the CPU, if the group has a backend for it.
        group_src: rank in the group, instead of `src`.
        weights_only: see the module's docstring; equal on all ranks.
    """
    pg = member_group(group, "broadcast_object_list")
    if pg is None:
        return
    root = resolve_root(pg, src, group_src)
    if not object_list:
        raise ConfigError("object_list is empty; it needs at least one place, and the same number on all ranks")
    where = pg.object_device if device is None else device
    broadcast = partial(operations.broadcast, group=pg, group_src=root)
    if pg.rank() == root:
        for tensor in _join(object_list, where, weights_only):
            broadcast(tensor)
    else:
        _receive_objects(object_list, where, weights_only, broadcast)


@begins_traceback
def scatter_object_list(
    scatter_object_output_list: list[object],
    scatter_object_input_list: Sequence[object] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Puts `scatter_object_input_list[i]` of rank `src` (0 by default) into the first place of rank i's output list."""
    pg = member_group(group, "scatter_object_list")
    if pg is None:
        return
    root = resolve_root(pg, src, group_src)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ConfigError("Expected argument scatter_object_output_list to be a list of size at least 1.")
    where, scatter = pg.object_device, partial(operations.scatter, group=pg, group_src=root)
    # The size of this rank's object, and that of the largest.
    own_size = torch.empty(2, dtype=torch.int64, device=where)
    if pg.rank() != root:
        scatter(own_size)
        data = torch.empty(int(own_size[1]), dtype=torch.uint8, device=where)
        scatter(data)
    else:
        if scatter_object_input_list is None:
            raise ConfigError("source rank must provide non-None scatter_object_input_list")
        if len(scatter_object_input_list) != pg.size():
            text = f"scatter_object_input_list has {len(scatter_object_input_list)} objects for {pg.size()} ranks"
            raise ConfigError(text)
        parts = [_pickled(each, where, weights_only) for each in scatter_object_input_list]
        largest = max(part.numel() for part in parts)
        scatter(own_size, [own_size.new_tensor([part.numel(), largest]) for part in parts])
        data = torch.empty(largest, dtype=torch.uint8, device=where)
        scatter(data, [_padded(part, largest) for part in parts])
    scatter_object_output_list[0] = _unpickled(data[: int(own_size[0])], weights_only)


@begins_traceback
def send_object_list(
    object_list: list[object],
    dst: int | None = None,
    group: Group = None,
    device: Device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> None:
    """Sends objects to one rank, which calls `recv_object_list` with a list of the same length and `use_batch`.

    Args:
        object_list: at least one object.
        dst: rank in the world.
        group: the default group by default.
        device: the device of the transferred bytes; by default the CPU, if the group has a backend for it.
        group_dst: rank in the group, instead of `dst`.
        use_batch: whether to send through `batch_isend_irecv`, for backends that connect differently then.
        weights_only: see the module's docstring; the receiver passes the same.
    """
    pg = member_group(group, "send_object_list")
    if pg is None:
        return
    peer = resolve_group_rank(pg, dst, group_dst)
    if not object_list:
        raise ConfigError("object_list is empty; it needs at least one object")
    for tensor in _join(object_list, pg.object_device if device is None else device, weights_only):
        if use_batch:
            batch_isend_irecv([P2POp(isend, tensor, group=pg, group_peer=peer)])[0].wait()
        else:
            send(tensor, group=pg, group_dst=peer)


@begins_traceback
def recv_object_list(
    object_list: list[object],
    src: int | None = None,
    group: Group = None,
    device: Device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> int:
    """Replaces the objects in the list by those that another rank sends with `send_object_list`.

    Args:
        object_list: a list of the sender's length; changed in place.
        src: rank in the world; without it and `group_src`, the first rank that sends.
        group: the default group by default.
        device: the device of the transferred bytes; by default the CPU, if the group has a backend for it.
        group_src: rank in the group, instead of `src`.
        use_batch: the sender passes the same.
        weights_only: see the module's docstring; the sender passes the same.

    Returns:
        The sender's rank in the world; -1 on a rank outside the group.
    """
    pg = member_group(group, "recv_object_list")
    if pg is None:
        return -1
    where = pg.object_device if device is None else device
    peer = None if src is None and group_src is None else resolve_group_rank(pg, src, group_src)
    if use_batch and peer is None:
        raise ConfigError("use_batch requires a sender: pass src or group_src")

    def receive(tensor: torch.Tensor) -> None:
        nonlocal peer  # after the first receive, the sender
        if use_batch:
            batch_isend_irecv([P2POp(irecv, tensor, group=pg, group_peer=peer)])[0].wait()
        else:
            peer = pg.group_rank(recv(tensor, group=pg, group_src=peer))

    _receive_objects(object_list, where, weights_only, receive)
    assert peer is not None
    return pg.world_rank(peer)


# ---------------------------------------------------------------- bytes


def _pickled(value: object, device: Device, weights_only: bool) -> torch.Tensor:
    """Returns the bytes of the pickled value, at least one."""
    if weights_only:
        file = io.BytesIO()
        torch.save(value, file)
        data = file.getvalue()
    else:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _unpickled(data: torch.Tensor, weights_only: bool) -> object:
    content = data.cpu().contiguous().numpy().data
    if (content[: len(_SAVED)] == _SAVED) != weights_only:
        said, other = ("False", "True") if weights_only else ("True", "False")
        raise ConfigError(f"an object was sent with weights_only={said} and is received with {other}; pass the same")
    if not weights_only:
        return pickle.loads(content)
    _admit_errors()
    return torch.load(io.BytesIO(content), weights_only=True)


_SAVED = b"PK\x03\x04"
"""The first bytes of `torch.save`'s output; no pickle starts with them."""


@cache
def _admit_errors() -> None:
    """Allows `torch.load` to make Python's own errors, with tracebacks as text, as torch does since 2.14."""
    kinds = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException)]
    python_2_names = [(kind, f"exceptions.{kind.__name__}") for kind in kinds]  # the names that torch.save writes
    texts = [traceback.StackSummary, traceback.FrameSummary]
    torch.serialization.add_safe_globals([*kinds, *python_2_names, *texts])


def _padded(data: torch.Tensor, size: int) -> torch.Tensor:
    if data.numel() == size:
        return data
    padded = data.new_zeros(size)
    padded[: data.numel()] = data
    return padded


def _join(values: Sequence[object], device: Device, weights_only: bool) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [_pickled(each, device, weights_only) for each in values]
    sizes = torch.tensor([part.numel() for part in parts], dtype=torch.int64, device=device)
    return sizes, parts[0] if len(parts) == 1 else torch.cat(parts)


def _receive_objects(
    objects: list[object], device: Device, weights_only: bool, receive: Callable[[torch.Tensor], object]
) -> None:
    """Replaces the objects by those that another rank joins with `_join`, and sends one tensor after the other."""
    sizes = torch.empty(len(objects), dtype=torch.int64, device=device)
    receive(sizes)
    data = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=device)
    receive(data)
    objects[:] = [_unpickled(part, weights_only) for part in data.split(sizes.tolist())]


def _check_length(objects: list[object], pg: ProcessGroup, name: str) -> None:
    if len(objects) < pg.size():
        raise ConfigError(f"{name} has {len(objects)} places for the objects of {pg.size()} ranks")
