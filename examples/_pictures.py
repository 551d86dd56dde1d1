"""The pictures of the examples, from plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from _shared import picture


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of the last `width` values, up to each of them."""
    return [fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def draw_trainers(
    path: Path,
    title: str,
    losses: Sequence[Sequence[float]],
    accuracies: Sequence[Sequence[tuple[float, float]]],
    steps_per_epoch: int,
    absence: Sequence[tuple[int, float]] = (),
    absent: int | None = None,
) -> None:
    """The loss of every trainer over its steps, and its test accuracy over time.

    Args:
        losses: of each trainer, the loss of each step.
        accuracies: of each trainer, (seconds, percent) after each epoch.
        absence: (step, seconds) of the death and of the return of trainer `absent`, if it died.
    """
    with picture(path, title) as (left, right):
        for trainer, of_steps in enumerate(losses):
            color, label = f"C{trainer}", f"trainer {trainer}"
            left.plot(of_steps, color=color, alpha=0.15, linewidth=0.7, zorder=1)
            left.plot(moving_mean(of_steps, steps_per_epoch), color=color, label=label)
            seconds, percents = zip(*accuracies[trainer], strict=True)
            right.plot(seconds, percents, marker=".", linewidth=1, color=color, label=label)
        if len(absence) == 2:
            (step, died_s), (_, back_s) = absence
            text = f" trainer {absent} is killed,\n and back {back_s - died_s:.1f} s later"
            left.axvline(step, color="black", linestyle=":", linewidth=1)
            left.text(step, left.get_ylim()[1], text, verticalalignment="top", fontsize="small")
            right.axvspan(died_s, back_s, color=f"C{absent}", alpha=0.15, label=f"without trainer {absent}")
        left.set(title="Training loss (faint: of each batch)", xlabel="step of the trainer", yscale="log")
        right.set(title="Test accuracy in % after each epoch", xlabel="seconds", ylim=(None, 100.5))
