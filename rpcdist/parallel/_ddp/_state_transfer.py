"""Sends the state of a training to ranks that came later: tensors as they are, everything else pickled.

The receiver takes over all of the state, or nothing.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup
from rpcdist.errors import CollectiveError, CollectiveMismatch


class HasState(Protocol):
    """An object with a state that newcomers need: an optimizer, a learning rate schedule, a sampler."""

    def state_dict(self) -> dict[str, Any]:
        """The state, of values that can be pickled."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Takes over such a state."""


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
        CollectiveMismatch: it sent what is no state.
    """
    box: list[Any] = [None]
    try:
        collectives.recv_object_list(box, group=group, group_src=sender)
        unpickler = _Unpickler(io.BytesIO(box[0]))
        state = unpickler.load()
    except CollectiveError:
        raise
    except Exception as exc:  # whatever reading a wrong pickle raises, or room for its tensors
        raise _wrong(sender, f"it cannot be read: {exc!r}"[:500]) from exc
    for tensor in unpickler.tensors:
        collectives.recv(tensor, group=group, group_src=sender)
    return state


def take_over(state: Any, module: nn.Module, others: Sequence[HasState], sender: int, step: int) -> None:
    """Loads what `receive_state` returned: all of it, or nothing.

    Args:
        state: `{"step": ..., "module": ..., "others": [...]}`, the last two as their `state_dict` says.
        module, others: get it.
        step: what it has to have behind it.

    Raises:
        CollectiveMismatch: it is not of this module and `others`, or not of this step. Everything is as before, as far
            as `others` load either all or nothing, as torch's optimizers do, and can load what they had.
    """
    problem = _problem(state, module, len(others), step)
    if problem:
        raise _wrong(sender, problem)
    loaded: list[tuple[HasState, dict[str, Any]]] = []
    try:
        for each, its_state in zip(others, state["others"], strict=True):
            before = each.state_dict()
            each.load_state_dict(its_state)
            loaded.append((each, before))
        module.load_state_dict(state["module"])  # the last: what it would refuse was looked for
    except Exception as exc:
        for each, before in loaded:
            each.load_state_dict(before)
        raise _wrong(sender, repr(exc)[:500]) from exc


def _problem(state: Any, module: nn.Module, num_others: int, step: int) -> str:
    """A description of the fault in a state; empty if there is none."""
    if not isinstance(state, dict) or state.keys() != {"step", "module", "others"}:
        return "it does not consist of step, module and others"
    if type(state["step"]) is not int or state["step"] != step:
        return f"it is of step {state['step']!r}, but its sender had announced step {step}"
    if not isinstance(state["others"], list) or len(state["others"]) != num_others:
        return f"it is not of {num_others} optimizers and stateful objects"
    ours, theirs = module.state_dict(), state["module"]
    if not isinstance(theirs, dict) or theirs.keys() != ours.keys():
        return "its parameters and buffers have other names than those of this module"
    for name, our in ours.items():
        if isinstance(our, torch.Tensor):
            their = theirs[name]
            if not isinstance(their, torch.Tensor) or (their.shape, their.dtype) != (our.shape, our.dtype):
                described = [f"{each.dtype} of {tuple(each.shape)}" for each in (our, their) if hasattr(each, "dtype")]
                return f"{name} is another tensor there: {' here, '.join(described)}"
    return ""


def _wrong(sender: int, problem: str) -> CollectiveMismatch:
    return CollectiveMismatch(
        "taking over the state",
        f"the state that rank {sender} sent does not fit this training: {problem}. Nothing was changed on this rank; "
        "start all processes with the same program and versions",
    )
