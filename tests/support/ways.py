"""The files that an operation passes in the processes of two workers, in the order in which it first enters them.

A profiler notes each Python function that a thread enters. Threads that exist already are not seen, so a worker calls
`install` before it joins its job. Operations of one kind are repeated, and only the quickest count, which nothing has
held up: on a busy machine, the I/O loop reads some messages. A file is on the way if most of them pass it, so timers
and late messages of earlier operations do not count.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from rpcdist import autograd, rpc

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("rpcdist/", "autograd/", "collectives/")
NUM_WARM_UP = 30  # names are known, and the threads that wait read the connection themselves
NUM_MEASURED = 60
NUM_QUICKEST = 20

Span = tuple[int, int]
"""The beginning of an operation, and that of the next one, in nanoseconds of the clock that all processes share."""

noted: list[tuple[int, str]] = []
kept: list[torch.Tensor] = []


def install() -> None:
    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            noted.append((time.monotonic_ns(), frame.f_code.co_filename))

    threading.setprofile(note)
    sys.setprofile(note)


def spans_of(operation: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> list[Span]:
    """Repeats an operation; a span ends when the operation has returned."""
    spans = []
    for number in range(NUM_WARM_UP + NUM_MEASURED):
        prepare()
        began = time.monotonic_ns()
        operation()
        if number >= NUM_WARM_UP:
            spans.append((began, time.monotonic_ns()))
    return quickest(spans)


def quickest(spans: Sequence[Span]) -> list[Span]:
    return sorted(sorted(spans, key=lambda span: span[1] - span[0])[:NUM_QUICKEST])


def passed(spans: Sequence[Span]) -> list[str]:
    """The files of the product that most of the spans pass in this process, by the median of their places."""
    places: dict[str, list[int]] = {}
    events = iter(sorted(noted))
    at, name = next(events)
    for began, ended in spans:
        found: dict[str, int] = {}
        while at < ended:
            if at >= began and (file := in_product(name)) is not None:
                found.setdefault(file, len(found))
            try:
                at, name = next(events)
            except StopIteration:
                break
        for file, place in found.items():
            places.setdefault(file, []).append(place)
    often = {file: sorted(found) for file, found in places.items() if len(found) > len(spans) / 2}
    return sorted(often, key=lambda file: often[file][len(often[file]) // 2])


def in_product(name: str) -> str | None:
    try:
        path = Path(name).resolve().relative_to(ROOT).as_posix()
    except ValueError:
        return None
    return path if path.startswith(PRODUCT) and "/testing/" not in path else None


def nothing() -> None:
    pass


def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return x * factor


def keep_tanh(x: torch.Tensor) -> torch.Tensor:
    kept[:] = [x.tanh()]
    return kept[0] * 1


def kept_twice(x: torch.Tensor) -> torch.Tensor:
    return kept[0] * x


def spans_of_calls(to: str) -> list[Span]:
    return spans_of(lambda: rpc.rpc_sync(to, nothing))


def spans_of_direct_passes(to: str) -> list[Span]:
    """One call with one tensor: nothing has to be decided."""
    return spans_of_passes(lambda x: rpc.rpc_sync(to, scaled, (x, x)).sum())


def spans_of_general_passes(to: str) -> list[Span]:
    """On both workers, two messages lead to one node of the graph."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return rpc.rpc_sync(to, keep_tanh, (y,)).sum() + rpc.rpc_sync(to, kept_twice, (y + 1,)).sum()

    return spans_of_passes(loss)


def spans_of_passes(loss: Callable[[torch.Tensor], torch.Tensor]) -> list[Span]:
    x = torch.ones(4, requires_grad=True)
    spans = []
    for number in range(NUM_WARM_UP + NUM_MEASURED):
        with autograd.context() as context_id:
            root = loss(x)
            began = time.monotonic_ns()
            autograd.backward(context_id, [root])
            if number >= NUM_WARM_UP:
                spans.append((began, time.monotonic_ns()))
    return quickest(spans)


def spans_of_references(to: str) -> list[Span]:
    """The creation of a value, and its fetch."""
    held: list[Any] = []

    def create_and_fetch() -> None:
        rref = rpc.remote(to, nothing)
        rref.to_here()
        held.append(rref)

    return spans_of(create_and_fetch, held.clear)
