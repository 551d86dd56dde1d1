"""Views of a context, gathered from all workers that took part: the times of its passes, and a picture.

The picture shows the workers, the messages between them, and which messages were computed from which.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from rpcdist.autograd._autograd_worker import AutogradWorker
from rpcdist.autograd._context import Span
from rpcdist.autograd._graph_analysis import analyse
from rpcdist.rpc import api
from rpcdist.rpc._autograd_hooks import outside_contexts
from rpcdist.rpc._current import current_agent
from rpcdist.time_limits import SLOW_WORK_LIMIT_S


def profile(context_id: int) -> list[Span]:
    """The times that the parts of a context's backward passes took, on all participating workers; blocks.

    Args:
        context_id: a context that is alive on this worker.

    Returns:
        The spans of the passes that have ended, in the order in which they began; at most the latest 1,000 of each
        worker. Times are by the workers' clocks, which differ between hosts.

    Raises:
        ContextNotFound: the context has ended, or is unknown here.
    """
    parts = ask_workers(context_id, False)
    return sorted((span for part in parts.values() for span in part.spans), key=lambda span: span.start_s)


def ask_workers(context_id: int, with_graph: bool) -> dict[int, WorkerPart]:
    """The parts of all workers that took part in a context, by worker id; blocks."""
    here = current_agent().worker_id
    parts = {here: _describe(context_id, with_graph)}
    todo = [here]
    with outside_contexts():
        while todo:
            for worker in parts[todo.pop()].neighbours:
                if worker not in parts:
                    parts[worker] = api.rpc_sync(worker, _describe, (context_id, with_graph))
                    todo.append(worker)
    return parts


class WorkerPart(NamedTuple):
    """One worker's part of a context, as plain data.

    Attributes:
        neighbours: ids of the workers with which it exchanged calls.
        sends: (message, id of the receiver, Lamport stamp, number of tensors, number of leaves in their graph).
        recvs: (message, Lamport stamp).
        flows: (received message, sent message that was computed from it).
    """

    worker: str
    neighbours: tuple[int, ...]
    spans: tuple[Span, ...]
    sends: tuple[tuple[int, int, int, int, int], ...] = ()
    recvs: tuple[tuple[int, int], ...] = ()
    flows: tuple[tuple[int, int], ...] = ()


def draw(context_id: int, path: str | PathLike[str], timings: bool = False) -> str:
    """Draws a context: workers as boxes, with their sends and receives, and the edges between them; blocks.

    Args:
        context_id: a context that is alive on this worker.
        path: file of the picture, e.g. "graph.svg". Its description in Graphviz's language is written to a file of
            the same name with the suffix ".dot"; the picture is made only if Graphviz's program `dot` is installed.
        timings: show how long each worker was busy with the passes that have ended, and how long it waited for each
            other worker; see `profile`.

    Returns:
        The description in Graphviz's language.

    Raises:
        ContextNotFound: the context has ended, or is unknown here.
    """
    parts = ask_workers(context_id, True)
    text = graphviz_text(parts, timings)
    target = Path(path)
    source = target.with_suffix(".dot")
    source.write_text(text)
    program = shutil.which("dot")
    if program is not None and target.suffix != ".dot":
        kind = target.suffix.removeprefix(".") or "svg"
        command = [program, f"-T{kind}", str(source), "-o", str(target)]
        subprocess.run(command, check=True, timeout=SLOW_WORK_LIMIT_S)
    return text


def _describe(context_id: int, with_graph: bool) -> WorkerPart:
    agent = current_agent()
    hooks = agent.autograd
    assert isinstance(hooks, AutogradWorker)
    context = hooks.contexts.find(context_id)
    name_of = hooks.agent.directory.name_of
    spans = tuple(
        Span(agent.worker_name, kind, name_of(peer) if peer >= 0 else "", start_s, end_s - start_s, backward)
        for backward, kind, peer, start_s, end_s in list(context.spans)
    )
    part = WorkerPart(agent.worker_name, tuple(sorted(context.neighbours())), spans)
    if not with_graph:
        return part
    analysis = analyse(context_id, (), *context.snapshot())
    leaves, local = [analysis.masks[leaf] for leaf in analysis.leaves], analysis.local
    return part._replace(
        sends=tuple(
            (send.id, send.to, send.stamp, send.count, sum(bool(leaf & send.mask) for leaf in leaves))
            for send in local.sends
        ),
        recvs=tuple((recv.id, recv.stamp) for recv in local.recvs),
        flows=tuple((recv.id, send.id) for recv in local.recvs for send in local.sends if recv.reached_by & send.mask),
    )


def graphviz_text(parts: dict[int, WorkerPart], timings: bool = False) -> str:
    """The picture in Graphviz's language; time goes from left to right."""
    lines = ["digraph context {", "  rankdir=LR;", '  node [shape=box, style=rounded, fontname="sans-serif"];']
    for worker, part in sorted(parts.items()):
        lines += [f"  subgraph cluster_{worker} {{", f'    label="{part.worker}";']
        for message, to, stamp, count, leaves in part.sends:
            tensors = f"{count} tensor{'s' * (count != 1)}"
            behind = f"\\n{leaves} {'leaf' if leaves == 1 else 'leaves'}" if leaves else ""
            name = parts[to].worker if to in parts else str(to)
            lines.append(f'    "send {message}" [label="send to {name}\\n{tensors}, t={stamp}{behind}"];')
        for message, stamp in part.recvs:
            lines.append(f'    "recv {worker} {message}" [label="recv\\nt={stamp}", style=filled];')
        lines += [f'    "recv {worker} {arrived}" -> "send {sent}";' for arrived, sent in part.flows]
        if timings:
            lines.append(f'    "{part.worker}" [label="{_summary(part.spans)}", shape=note, style=solid];')
        lines.append("  }")
    for worker, part in sorted(parts.items()):
        lines += [f'  "send {message}" -> "recv {worker} {message}" [style=bold];' for message, _ in part.recvs]
    if timings:
        for _, part in sorted(parts.items()):
            lines += _waits(part)
    return "\n".join([*lines, "}", ""])


def _summary(spans: Sequence[Span]) -> str:
    """The work of a worker in the passes, as the text of a node."""
    texts = []
    for kind, text in (("analysis", "looked at its graph"), ("run", "ran it")):
        times_s = [span.duration_s for span in spans if span.kind == kind]
        if times_s:
            often = f" ({len(times_s)} run{'s' * (len(times_s) != 1)})" if kind == "run" else ""
            texts.append(f"{text}: {1e3 * sum(times_s):.2f} ms{often}")
    return "\\n".join(texts) or "no pass"


def _waits(part: WorkerPart) -> list[str]:
    """Edges from a worker to those that it waited for."""
    waited_s: defaultdict[str, float] = defaultdict(float)
    for span in part.spans:
        if span.peer:
            waited_s[span.peer] += span.duration_s
    return [
        f'  "{part.worker}" -> "{peer}" [label="waited {1e3 * seconds:.2f} ms", style=dashed, constraint=false];'
        for peer, seconds in sorted(waited_s.items())
    ]
