"""Which function a communication hook is on our groups, with which state: torch's own hooks take groups of torch's."""

from __future__ import annotations

from typing import Any

from rpcdist.collectives import ProcessGroup
from rpcdist.parallel._ddp import _quantization
from rpcdist.parallel._ddp._comm_hook import CommHook


def adapt_hook(hook: CommHook, state: Any, group: ProcessGroup) -> tuple[CommHook, Any]:
    """The hook and the state to use for what the user registers.

    Args:
        hook: ours, torch's, or the user's own, which is returned as it is, with its state.
        state: what the hook gets. Where a hook of ours or of torch's wants a group, None and groups of ours are
            replaced by what it can use; an object such as `PowerSGDState` keeps its identity, and gets the group.
        group: the model's group, which None stands for.
    """
    module = _module(hook)
    if module.startswith("rpcdist.parallel."):
        return hook, group if state is None else state
    if not module.startswith("torch.distributed."):
        return hook, state
    if module.endswith(".quantization_hooks"):  # torch's rely on what NCCL's futures bring
        return getattr(_quantization, getattr(hook, "__name__", "")), group if state is None else state
    return hook, _torch_state(state, group)


def _module(hook: object) -> str:
    function = getattr(hook, "func", hook)  # of a functools.partial
    return str(getattr(function, "__module__", ""))


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
