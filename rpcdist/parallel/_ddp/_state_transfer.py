"""Sends the state of a training to ranks that came later: tensors as they are, everything else pickled."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup

__all__ = ["receive_state", "send_state"]


class _Pickler(pickle.Pickler):
    """Leaves the tensors out, and collects them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: object) -> tuple[int, torch.dtype, tuple[int, ...]] | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value.detach().cpu().contiguous())
        return len(self.tensors) - 1, value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    """Puts new tensors in the places of those that were left out."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_load(self, described: Any) -> torch.Tensor:
        _, dtype, shape = described
        self.tensors.append(torch.empty(shape, dtype=dtype))
        return self.tensors[-1]


def send_state(state: object, group: ProcessGroup, receivers: Sequence[int]) -> None:
    """Sends a state to ranks of the group, which call `receive_state`.

    Raises:
        CollectiveError: a receiver was lost.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(state)
    for receiver in receivers:
        collectives.send_object_list([file.getvalue()], group=group, group_dst=receiver)
        for tensor in pickler.tensors:
            collectives.send(tensor, group=group, group_dst=receiver)


def receive_state(group: ProcessGroup, sender: int) -> Any:
    """The state that `sender` sends, whole, with its tensors on the CPU.

    Raises:
        CollectiveError: the sender was lost; nothing has changed here.
    """
    box: list[Any] = [None]
    collectives.recv_object_list(box, group=group, group_src=sender)
    unpickler = _Unpickler(io.BytesIO(box[0]))
    state = unpickler.load()
    for tensor in unpickler.tensors:
        collectives.recv(tensor, group=group, group_src=sender)
    return state
