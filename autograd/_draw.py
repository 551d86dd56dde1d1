"""Draws a context: its workers, the messages between them, and which messages were computed from which."""

from __future__ import annotations

import shutil
import subprocess
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from rpcdist.autograd._autograd_worker import AutogradWorker
from rpcdist.autograd._context import Context
from rpcdist.autograd._graph_analysis import analyse
from rpcdist.rpc import api
from rpcdist.rpc._autograd_hooks import current_autograd
from rpcdist.rpc._current import current_agent
from rpcdist.time_limits import GRAPHVIZ_LIMIT_S

__all__ = ["WorkerPart", "draw", "graphviz_text"]


class WorkerPart(NamedTuple):
    """One worker's part of a context, as plain data.

    Attributes:
        worker: name of the worker.
        neighbours: ids of the workers with which it exchanged calls.
        sends: (message, id of the receiver, Lamport stamp, number of tensors, number of leaves in their graph).
        recvs: (message, Lamport stamp).
        flows: (received message, sent message that was computed from it).
    """

    worker: str
    neighbours: tuple[int, ...]
    sends: tuple[tuple[int, int, int, int, int], ...]
    recvs: tuple[tuple[int, int], ...]
    flows: tuple[tuple[int, int], ...]


def draw(context_id: int, path: str | PathLike[str]) -> str:
    """Draws a context: workers as boxes, with their sends and receives, and the edges between them; blocks.

    Args:
        context_id: a context that is alive on this worker.
        path: file of the picture, e.g. "graph.svg". Its description in Graphviz's language is written to a file of
            the same name with the suffix ".dot"; the picture is only made if Graphviz's program `dot` is installed.

    Returns:
        The description.

    Raises:
        ContextNotFound: the context is over, or unknown here.
    """
    text = graphviz_text(_gather(context_id))
    target = Path(path)
    source = target.with_suffix(".dot")
    source.write_text(text)
    program = shutil.which("dot")
    if program is not None and target.suffix != ".dot":
        kind = target.suffix.removeprefix(".") or "svg"
        command = [program, f"-T{kind}", str(source), "-o", str(target)]
        subprocess.run(command, check=True, timeout=GRAPHVIZ_LIMIT_S)
    return text


def _gather(context_id: int) -> dict[int, WorkerPart]:
    """The parts of all workers that took part, by worker id."""
    here = current_agent().worker_id
    parts: dict[int, WorkerPart] = {here: _describe(context_id)}
    todo = [here]
    token = current_autograd.set(None)  # these calls must not become part of the context
    try:
        while todo:
            for worker in parts[todo.pop()].neighbours:
                if worker not in parts:
                    parts[worker] = api.rpc_sync(worker, _describe, (context_id,))
                    todo.append(worker)
    finally:
        current_autograd.reset(token)
    return parts


def _describe(context_id: int) -> WorkerPart:
    agent = current_agent()
    assert isinstance(agent.autograd, AutogradWorker)
    context: Context = agent.autograd.contexts.find(context_id)
    sends, recvs = context.snapshot()
    analysis = analyse(context_id, (), sends, recvs)
    leaves = {send.id: sum(bool(leaf.sources & send.mask) for leaf in analysis.leaves) for send in analysis.local.sends}
    return WorkerPart(
        agent.worker_name,
        tuple(sorted(context.neighbours())),
        tuple((send.id, send.to, send.stamp, send.count, leaves[send.id]) for send in analysis.local.sends),
        tuple((recv.id, recv.stamp) for recv in analysis.local.recvs),
        tuple(
            (recv.id, send.id)
            for recv in analysis.local.recvs
            for send in analysis.local.sends
            if recv.reached_by & send.mask
        ),
    )


def graphviz_text(parts: dict[int, WorkerPart]) -> str:
    """The picture in Graphviz's language; time goes from left to right."""
    lines = ["digraph context {", "  rankdir=LR;", '  node [shape=box, style=rounded, fontname="sans-serif"];']
    for worker, part in sorted(parts.items()):
        lines += [f"  subgraph cluster_{worker} {{", f'    label="{part.worker}";']
        for message, to, stamp, count, leaves in part.sends:
            tensors = f"{count} tensor{'s' * (count != 1)}"
            behind = f"\\n{leaves} leaves" if leaves else ""
            name = parts[to].worker if to in parts else str(to)
            lines.append(f'    "send {message}" [label="send to {name}\\n{tensors}, t={stamp}{behind}"];')
        for message, stamp in part.recvs:
            lines.append(f'    "recv {worker} {message}" [label="recv\\nt={stamp}", style=filled];')
        lines += [f'    "recv {worker} {arrived}" -> "send {sent}";' for arrived, sent in part.flows]
        lines.append("  }")
    for worker, part in sorted(parts.items()):
        lines += [f'  "send {message}" -> "recv {worker} {message}" [style=bold];' for message, _ in part.recvs]
    return "\n".join([*lines, "}", ""])
