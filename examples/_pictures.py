"""The pictures of the examples, from plain numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _progress import TrainingProgress
    from matplotlib.axes import Axes

GAP_S = 1.0  # nobody trained for so long: no line is drawn


@contextmanager
def picture(path: Path, title: str, columns: int = 2, height: float = 4.4, **options: Any) -> Iterator[list[Axes]]:
    """Yields the axes of a figure, side by side; then gives them grids and legends, and writes the file."""
    import matplotlib

    matplotlib.use("Agg")  # a file needs no display
    from matplotlib import layout_engine, pyplot

    layout = layout_engine.ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1)
    width = 11 if columns > 1 else 8
    figure, axes = pyplot.subplots(1, columns, figsize=(width, height), layout=layout, squeeze=False, **options)
    yield list(axes[0])
    for each in axes[0]:
        if not each.images:
            each.grid(alpha=0.25)
            each.spines[["top", "right"]].set_visible(False)
        if each.get_legend_handles_labels()[0] and each.get_legend() is None:
            each.legend(frameon=False)
    figure.suptitle(title, fontweight="bold")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of the last `width` values, up to each of them."""
    return [fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def draw_trainers(path: Path, title: str, progress: TrainingProgress, absent: int | None) -> None:
    """The loss of every trainer over its steps, and its accuracy over time; trainer `absent` died and came back."""
    with picture(path, title) as (left, right):
        for trainer, of_steps in enumerate(progress.losses):
            color, label = f"C{trainer}", f"trainer {trainer}"
            left.plot(of_steps, color=color, alpha=0.15, linewidth=0.7, zorder=1)
            left.plot(moving_mean(of_steps, progress.steps_per_epoch), color=color, label=label)
            seconds, percents = zip(*progress.accuracies[trainer], strict=True)
            right.plot(seconds, percents, marker=".", linewidth=1, color=color, label=label)
        if len(progress.absence) == 2:
            (step, died_s), (_, back_s) = progress.absence
            text = f" trainer {absent} is killed,\n and back {back_s - died_s:.1f} s later"
            left.axvline(step, color="black", linestyle=":", linewidth=1)
            left.text(step, left.get_ylim()[1], text, verticalalignment="top", fontsize="small")
            right.axvspan(died_s, back_s, color=f"C{absent}", alpha=0.15, label=f"without trainer {absent}")
        left.set(title="Training loss (faint: of each batch)", xlabel="step of the trainer", yscale="log")
        right.set(title="Test accuracy in % after each epoch", xlabel="seconds", ylim=(None, 100.5))


def draw_failures(path: Path, losses: Sequence[tuple[float, float]], events: Sequence[tuple[float, str]]) -> None:
    """The (time, loss) of each step, and the (time, who was lost or came back) of each event; times in seconds."""
    started = losses[0][0]
    times = [when - started for when, _ in losses]
    gaps = [after - before > GAP_S for before, after in pairwise([0.0, *times])]
    means = moving_mean([loss for _, loss in losses], 20)
    with picture(path, "Training loss while processes are killed", columns=1) as (axes,):
        axes.plot(times, [loss for _, loss in losses], ".", markersize=2, alpha=0.4, label="of each batch")
        line = [math.nan if is_gap else mean for mean, is_gap in zip(means, gaps, strict=True)]
        axes.plot(times, line, color="C0", label="mean of 20 batches")
        axes.set(xlabel="seconds", yscale="log")
        axes.legend(loc="lower left", frameon=False)
        for number, (when, what) in enumerate(event for event in events if event[0] > started):
            color = "C3" if "lost" in what else "C2"
            axes.axvline(when - started, color=color, linestyle=":", linewidth=1)
            height = 0.98 - 0.06 * (number % 4)  # neighbours shall not overlap
            axes.text(when - started, height, f" {what}", fontsize="x-small", color=color,
                      transform=axes.get_xaxis_transform(), verticalalignment="top")  # fmt: skip


def draw_confusion(
    path: Path,
    losses: Sequence[float],
    accuracies: Sequence[float],
    classes: Sequence[str],
    labels: Sequence[int],
    guesses: Sequence[int],
) -> None:
    """The loss of every step, and which share of each class was taken for which; the diagonal is right."""
    table = [[0] * len(classes) for _ in classes]
    for label, guess in zip(labels, guesses, strict=True):
        table[label][guess] += 1
    shares = [[number / max(1, sum(row)) for number in row] for row in table]
    with picture(path, "Which package does a function come from?", height=5) as (left, right):
        left.plot(losses, linewidth=0.8)
        left.set(title="Training loss", xlabel="step", ylim=(0, None))
        right.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        right.set_xticks(range(len(classes)), classes, rotation=60, ha="right")
        right.set_yticks(range(len(classes)), classes)
        right.set(title=f"{accuracies[-1]:.1f} % are right", xlabel="predicted package", ylabel="actual package")


def draw_backpressure(
    path: Path, losses: Sequence[float], yielded_at: Sequence[float], read_at: Sequence[float], slow_items: int
) -> None:
    """The loss as it was streamed, and the progress of both sides while the client was slow; times in seconds."""
    with picture(path, "A training service in async/await") as (left, right):
        left.plot(losses, linewidth=0.8)
        left.set(title="Loss of each step, as it was streamed", xlabel="step", yscale="log")
        for times, name in ((yielded_at, "the service yields"), (read_at, "the client reads")):
            shown = [moment - yielded_at[0] for moment in times[: 3 * slow_items]]
            right.step(shown, range(1, len(shown) + 1), where="post", label=name)
        right.set(title=f"Backpressure: the first {slow_items} are read slowly", xlabel="seconds", ylabel="items")


def draw_rewards(
    path: Path,
    episodes: Sequence[tuple[int, int]],
    width: int,
    speeds: Mapping[str, float],
    num_poles: int,
) -> None:
    """The (end, reward) of every episode and the mean of the last `width`, and both ways to choose actions."""
    ended_at, rewards = zip(*episodes, strict=True)
    with picture(path, "CartPole: an agent and its observers", width_ratios=(2, 1)) as (left, right):
        left.scatter(ended_at, rewards, s=8, alpha=0.25, linewidths=0, label="an episode")
        left.plot(ended_at, moving_mean(rewards, width), color="C1", linewidth=2, label=f"mean of the last {width}")
        left.set(title="Reward: how long the pole stood (at most 500)", xlabel="steps played", ylim=(0, 510))
        single, batched = speeds["select_single"], speeds["select_batched"]
        bars = right.bar(["one question\nat a time", f"batches of\n{num_poles} questions"], [single, batched],
                         color=["C0", "C1"], width=0.6)  # fmt: skip
        right.bar_label(bars, fmt="{:,.0f}")
        right.set(title=f"Steps per second: {batched / single:.1f} times as many")
        right.margins(y=0.12)


def draw_asynchronous_rewards(
    path: Path,
    title: str,
    rewards: Sequence[tuple[float, float]],
    ages: Sequence[tuple[float, int]],
    absences: Sequence[tuple[str, float, float]],
) -> None:
    """The (time, share of right lists) of each step and the (time, age) of each batch of samples; times in seconds."""
    with picture(path, title) as (left, right):
        seconds, shares = zip(*rewards, strict=True)
        left.plot(seconds, [100 * share for share in shares], linewidth=0.7, alpha=0.35, label="of each step")
        left.plot(seconds, [100 * share for share in moving_mean(shares, 20)], color="C0", label="mean of 20 steps")
        left.set(title="Lists that are sorted right, in %", xlabel="seconds", ylim=(0, 101))
        times, versions = zip(*ages, strict=True)
        right.scatter(times, versions, s=6, alpha=0.5, linewidths=0, color="C1", label="a batch of samples")
        right.set(title="Versions since the weights of a sample", xlabel="seconds", ylim=(-0.5, max(versions) + 1.5))
        for axes in (left, right):
            for name, begin, end in absences:
                axes.axvspan(begin, end, color="C3", alpha=0.15, label=f"without {name}")
