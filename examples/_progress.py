"""The progress of trainers as one process sees it, by bars or lines, and other events."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Never

if TYPE_CHECKING:
    from tqdm import tqdm

    from rpcdist.rpc import MembershipChange


class Happenings:
    """How often what has happened in this process; coroutines of one event loop note it, and wait for it."""

    def __init__(self) -> None:
        self.noted: Counter[str] = Counter()
        self.noted_again = asyncio.Event()  # the next time

    def note(self, event: str) -> None:
        self.noted[event] += 1
        self.noted_again.set()
        self.noted_again = asyncio.Event()

    async def happened(self, event: str, times: int = 1) -> int:
        """Waits until `event` has happened so many times; returns how many threads this process has."""
        while self.noted[event] < times:
            await self.noted_again.wait()
        return threading.active_count()


def most_ahead(yielded_at: Sequence[float], read_at: Sequence[float]) -> int:
    """How many items more than were read had been yielded, at most, when one was read; from the times of all."""
    return max(sum(when <= now for when in yielded_at) - number for number, now in enumerate(read_at, start=1))


class TrainingProgress:
    """The reports of trainers: a bar for each on a terminal, lines elsewhere.

    One process shows them all, so lines never mix. Calls of one trainer come one after the other, and touch its own
    lists only; those of different trainers may come on different threads (tqdm locks the terminal).

    Attributes:
        losses: of each trainer, the loss of each step.
        accuracies: of each trainer, (seconds, percent) after each epoch.
        absence: (steps that it had done, seconds) when a trainer was lost, and when its replacement came.
    """

    def __init__(self, names: Sequence[str], num_epochs: int, steps_per_epoch: int) -> None:
        self.names, self.num_epochs, self.steps_per_epoch = names, num_epochs, steps_per_epoch
        self.losses: list[list[float]] = [[] for _ in names]
        self.accuracies: list[list[tuple[float, float]]] = [[] for _ in names]
        self.absence: list[tuple[int, float]] = []
        self.started = time.monotonic()
        self.bars: list[tqdm[Never]] = []
        if sys.stderr.isatty():  # in a pipe, a file or a log, bars would be noise
            from tqdm import tqdm

            total = num_epochs * steps_per_epoch
            self.bars = [
                tqdm(total=total, unit="step", dynamic_ncols=True, desc=name, position=position)
                for position, name in enumerate(names)
            ]

    def num_epochs_done(self, trainer: int) -> int:
        return len(self.accuracies[trainer])

    def epoch_done(self, trainer: int, losses: list[float], accuracy: float) -> None:
        """The losses of its steps, and the test accuracy in percent after them."""
        self.losses[trainer] += losses
        self.accuracies[trainer].append((self.elapsed_s(), accuracy))
        status = f"loss {fmean(losses):.3f}, test accuracy {accuracy:.1f} %"
        if self.bars:
            self.bars[trainer].set_postfix_str(status, refresh=False)
            self.bars[trainer].update(len(losses))
        else:
            epoch = f"epoch {self.num_epochs_done(trainer)}/{self.num_epochs}"
            print(f"{self.names[trainer]}: {epoch}, {status}", flush=True)

    def on_change(self, change: MembershipChange) -> None:
        """For `rpc.on_membership_change`: a trainer was lost, or another process has taken its place."""
        if change.kind == "left" or change.worker.name not in self.names:
            return
        done = len(self.losses[self.names.index(change.worker.name)])
        self.absence.append((done, self.elapsed_s()))
        what = "killed" if change.kind == "lost" else "back"
        print(f"{change.worker.name}: {what} after {self.elapsed_s():.1f} s", flush=True)

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def close(self) -> None:
        for bar in self.bars:
            bar.close()
