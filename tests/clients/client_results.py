"""The parts that the programs of the clients share: their processes, their results, the data that they train on, and
the guide's examples.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["GUIDE", "RESULT", "batches", "example", "make_model", "numbers_of", "report", "run_workers"]

GUIDE = Path(__file__).parents[2] / "docs" / "clients.md"
RESULT = "RESULT "
"""How the line of a program's output begins that has its results, as JSON."""
WORKER_LIMIT_S = 400.0
DRAIN_PERIOD_S = 0.2


def example(client: str, backend: str) -> str:
    """The program that docs/clients.md has below a client's heading, on another backend if that is wanted."""
    section = re.search(rf"^## {client}\n(.*?)(?=^## |\Z)", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    block = section and re.search(r"^```python\n(.*?)^```", section[1], re.MULTILINE | re.DOTALL)
    if not block:
        raise LookupError(f"{GUIDE} has no Python below the heading {client!r}")
    return block[1].replace('"rpcdist"', f'"{backend}"')


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def batches(num_batches: int = 8, size: int = 4) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same in each run, another one on each rank."""
    generator = torch.Generator().manual_seed(11 + int(os.environ.get("RANK", "0")))
    for _ in range(num_batches):
        inputs = torch.randn(size, 6, generator=generator)
        yield inputs, inputs[:, :2] * 2 - 1


def numbers_of(module: nn.Module) -> list[str]:
    """The parameters to the last digit."""
    return [float(value).hex() for parameter in module.parameters() for value in parameter.detach().flatten()]


def run_workers(
    work: Callable[..., object], num_workers: int, *arguments: object
) -> tuple[list[Any], list[int | None]]:
    """Runs `work(*arguments, rank, port, results)` in so many processes, each of which may put things into `results`.

    Returns:
        What they have put there, and their exit codes by rank.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    spawned = multiprocessing.get_context("spawn")
    results = spawned.SimpleQueue()  # without a thread, which an atexit callback could not wait for
    workers = [spawned.Process(target=work, args=(*arguments, rank, port, results)) for rank in range(num_workers)]
    for worker in workers:
        worker.start()
    found = []
    limit = time.monotonic() + WORKER_LIMIT_S
    is_over = False
    while not is_over:
        running = [worker.sentinel for worker in workers if worker.is_alive()]
        multiprocessing.connection.wait(running, DRAIN_PERIOD_S)
        is_over = not running or time.monotonic() > limit
        while not results.empty():  # else a worker whose results do not fit into the pipe would not end
            found.append(results.get())
    for worker in workers:
        worker.kill()
        worker.join()
    statuses = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.close()
    results.close()
    return found, statuses


def report(results: dict[str, object]) -> None:
    """Prints the results of rank 0."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(RESULT + json.dumps(results), flush=True)
