"""The times of the backward passes of a context, gathered from all workers that took part."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from rpcdist.autograd._autograd_worker import AutogradWorker
from rpcdist.autograd._spans import Span
from rpcdist.rpc import api
from rpcdist.rpc._autograd_hooks import current_autograd
from rpcdist.rpc._current import current_agent

Part = TypeVar("Part")


def profile(context_id: int) -> list[Span]:
    """How long the parts of the backward passes of a context took, on all workers that took part; blocks.

    Args:
        context_id: a context that is alive on this worker.

    Returns:
        The spans of the passes that have ended, in the order in which they began; of each worker, the latest 1,000 at
        most. Their times are those of the workers' clocks, which differ between hosts.

    Raises:
        ContextNotFound: the context is over, or unknown here.
    """
    parts = ask_workers(context_id, _times_here, lambda part: part.neighbours)
    return sorted((span for part in parts.values() for span in part.spans), key=lambda span: span.start_s)


def ask_workers(
    context_id: int, describe: Callable[[int], Part], neighbours_of: Callable[[Part], tuple[int, ...]]
) -> dict[int, Part]:
    """What all workers that took part in a context say about it, by worker id; blocks.

    Args:
        context_id: of the context.
        describe: called on each of the workers with the context's id.
        neighbours_of: the ids of a worker's neighbours, in what it said.
    """
    here = current_agent().worker_id
    parts: dict[int, Part] = {here: describe(context_id)}
    todo = [here]
    token = current_autograd.set(None)  # these calls must not become part of the context
    try:
        while todo:
            for worker in neighbours_of(parts[todo.pop()]):
                if worker not in parts:
                    parts[worker] = api.rpc_sync(worker, describe, (context_id,))
                    todo.append(worker)
    finally:
        current_autograd.reset(token)
    return parts


class _Times(NamedTuple):
    neighbours: tuple[int, ...]
    spans: list[Span]


def _times_here(context_id: int) -> _Times:
    agent = current_agent()
    assert isinstance(agent.autograd, AutogradWorker)
    return _Times(tuple(sorted(agent.autograd.contexts.find(context_id).neighbours())), spans_here(context_id))


def spans_here(context_id: int) -> list[Span]:
    """The spans of a context on this worker."""
    agent = current_agent()
    hooks = agent.autograd
    assert isinstance(hooks, AutogradWorker)
    name_of = hooks.host.worker_name_of
    return [
        Span(agent.worker_name, kind, name_of(peer) if peer >= 0 else "", start_s, end_s - start_s, backward)
        for backward, kind, peer, start_s, end_s in list(hooks.contexts.find(context_id).spans)
    ]
