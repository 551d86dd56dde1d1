"""Sends the state of a training to ranks that joined later: tensors as they are, other values pickled.

The receiver takes over the whole state or nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup
from rpcdist.errors import CollectiveError, CollectiveMismatch, described_error
from rpcdist.parallel._ddp._tensor_tree import map_tensors


class HasState(Protocol):
    """An object whose state new ranks need: an optimizer, a learning rate schedule, a sampler."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, whose values can be pickled."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Loads such a state."""


def send_state(state: object, group: ProcessGroup, receivers: Sequence[int]) -> None:
    """Sends a state to ranks of the group, which call `receive_state`.

    Raises:
        CollectiveError: a receiver was lost.
    """
    tensors: list[torch.Tensor] = []

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor.detach().cpu().contiguous())
        return torch.empty_like(tensors[-1], device="meta")

    pickled = pickle.dumps(map_tensors(state, without_values), pickle.HIGHEST_PROTOCOL)
    for receiver in receivers:
        collectives.send_object_list([pickled], group=group, group_dst=receiver)
        for tensor in tensors:
            collectives.send(tensor, group=group, group_dst=receiver)


def receive_state(group: ProcessGroup, sender: int) -> Any:
    """Returns the complete state from `sender`, with its tensors on the CPU.

    Raises:
        CollectiveError: the sender was lost; nothing has changed on this rank.
        CollectiveMismatch: the sender sent an invalid state.
    """
    box: list[Any] = [None]
    tensors: list[torch.Tensor] = []

    def with_memory(described: torch.Tensor) -> torch.Tensor:
        tensors.append(torch.empty_like(described, device="cpu"))
        return tensors[-1]

    try:
        collectives.recv_object_list(box, group=group, group_src=sender)
        state = map_tensors(pickle.loads(box[0]), with_memory)
    except CollectiveError:
        raise
    except Exception as exc:  # an invalid pickle, or too little memory for its tensors
        raise _wrong(sender, f"it cannot be read: {described_error(exc)}"[:500]) from exc
    for tensor in tensors:
        collectives.recv(tensor, group=group, group_src=sender)
    return state


def take_over(state: Any, module: nn.Module, others: Sequence[HasState], sender: int, step: int) -> None:
    """Loads the result of `receive_state`, either all of it or nothing.

    Args:
        state: `{"step": ..., "module": ..., "others": [...]}`, the last two as returned by `state_dict`.
        module, others: the objects that load it.
        step: the step that the state must have.

    Raises:
        CollectiveMismatch: the state does not belong to this module and `others`, or to this step. Nothing has changed,
            provided that `others` load either all or nothing, as torch's optimizers do, and can load their old state.
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
        module.load_state_dict(state["module"])  # last, as `_problem` has checked that it succeeds
    except Exception as exc:
        for each, before in loaded:
            each.load_state_dict(before)
        raise _wrong(sender, described_error(exc)[:500]) from exc


def _problem(state: Any, module: nn.Module, num_others: int, step: int) -> str:
    """Describes the fault in a state; empty if it has none."""
    if not isinstance(state, dict) or state.keys() != {"step", "module", "others"}:
        return "it does not consist of step, module and others"
    if type(state["step"]) is not int or state["step"] != step:
        return f"it has step {state['step']!r}, but its sender had announced step {step}"
    if not isinstance(state["others"], list) or len(state["others"]) != num_others:
        return f"it does not have the states of {num_others} optimizers and stateful objects"
    ours, theirs = module.state_dict(), state["module"]
    if not isinstance(theirs, dict) or theirs.keys() != ours.keys():
        return "the names of its parameters and buffers differ from those of this module"
    for name, our in ours.items():
        if isinstance(our, torch.Tensor):
            their = theirs[name]
            if not isinstance(their, torch.Tensor) or (their.shape, their.dtype) != (our.shape, our.dtype):
                described = [f"{each.dtype} of {tuple(each.shape)}" for each in (our, their) if hasattr(each, "dtype")]
                return f"{name} differs: {' here, '.join(described)}"
    return ""


def _wrong(sender: int, problem: str) -> CollectiveMismatch:
    return CollectiveMismatch(
        "taking over the state",
        f"the state that rank {sender} sent does not fit this training: {problem}. Nothing was changed on this rank; "
        "start all processes with the same program and versions",
    )
