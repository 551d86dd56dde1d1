"""Simulates a schedule: the times of its actions, the size of the bubble, the number of live micro-batches.

All functions are pure. `Timeline` has the measured times of a step's actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rpcdist.errors import ConfigError, RpcdistError, raised_as
from rpcdist.parallel.pipeline._schedules import Action, Kind, check_complete

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Slot:
    """An action that ran on a worker from `start_s` to `end_s`, in seconds of one clock."""

    worker: int
    action: Action
    start_s: float
    end_s: float


def dependencies(action: Action, num_stages: int) -> list[Action]:
    """Returns the actions that must end before an action can run."""
    stage, part = action.stage, action.microbatch
    if action.kind == "F":
        return [Action(stage - 1, "F", part)] if stage > 0 else []
    needed = [Action(stage, "F", part)]
    return [*needed, Action(stage + 1, "B", part)] if stage + 1 < num_stages else needed


def simulate(
    actions: Sequence[Sequence[Action]],
    forward_s: float | Sequence[float] = 1.0,
    backward_s: float | Sequence[float] = 1.0,
    transfer_s: float = 0.0,
) -> list[Slot]:
    """Returns when each action runs if every worker starts the next action of its list as soon as possible.

    Args:
        actions: one list per worker.
        forward_s: duration of a forward: one number for all stages, or one per stage.
        backward_s: duration of a backward, in the same form.
        transfer_s: time between the end of an action and the arrival of its tensors at another worker.

    Returns:
        The actions in the order in which they start.

    Raises:
        ConfigError: the order cannot be executed; the text has the grid and the missing dependencies of each worker.
    """
    num_stages = 1 + max((action.stage for row in actions for action in row), default=-1)
    duration = {"F": _per_stage(forward_s, num_stages), "B": _per_stage(backward_s, num_stages)}
    done: dict[Action, Slot] = {}
    next_index, free_s = [0] * len(actions), [0.0] * len(actions)
    progress = True
    while progress:
        progress = False
        for worker, row in enumerate(actions):
            while next_index[worker] < len(row):
                action = row[next_index[worker]]
                needed = dependencies(action, num_stages)
                if not all(other in done for other in needed):
                    break
                ready_s = [done[other].end_s + transfer_s * (done[other].worker != worker) for other in needed]
                start_s = max([free_s[worker], *ready_s])
                free_s[worker] = start_s + duration[action.kind][action.stage]
                done[action] = Slot(worker, action, start_s, free_s[worker])
                next_index[worker] += 1
                progress = True
    lines = ["the schedule cannot be executed, because its workers wait for each other:"]
    for worker, (row, at) in enumerate(zip(actions, next_index, strict=True)):
        if at < len(row):
            missing = [str(other) for other in dependencies(row[at], num_stages) if other not in done]
            lines.append(f"  worker {worker} stops before {row[at]}, which needs {' and '.join(missing)}")
    if len(lines) > 1:
        raise ConfigError("\n".join([*lines, format_rows(actions)]))
    return sorted(done.values(), key=lambda slot: (slot.start_s, slot.worker))


def _per_stage(time_s: float | Sequence[float], num_stages: int) -> Sequence[float]:
    return time_s if isinstance(time_s, Sequence) else [time_s] * num_stages


def validate(actions: Sequence[Sequence[Action]], num_stages: int, num_microbatches: int) -> None:
    """Raises `ConfigError`, with the grid, unless a schedule is complete and can be executed."""
    if problems := check_complete(actions, num_stages, num_microbatches):
        shown = [*problems[:8], f"and {len(problems) - 8} more"] if len(problems) > 8 else problems
        raise ConfigError("\n".join(["this is no schedule:", *(f"  {text}" for text in shown), format_rows(actions)]))
    simulate(actions)


def bubble(slots: Sequence[Slot], num_workers: int) -> float:
    """Returns the idle share of the workers' time, from 0 to 1, between the first start and the last end."""
    if not slots:
        return 0.0
    length_s = max(slot.end_s for slot in slots) - min(slot.start_s for slot in slots)
    busy_s = sum(slot.end_s - slot.start_s for slot in slots)
    return 1 - busy_s / (num_workers * length_s) if length_s > 0 else 0.0


def max_live_microbatches(actions: Sequence[Sequence[Action]]) -> list[int]:
    """Returns, for each worker, the largest number of micro-batches that are between forward and backward at a time."""
    peaks = []
    for row in actions:
        live = peak = 0
        for action in row:
            live += 1 if action.kind == "F" else -1
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


def format_grid(actions: Sequence[Sequence[Action]]) -> str:
    """Formats a schedule as a table: a row per worker, a column per unit of time if every action takes one."""
    slots = simulate(actions)
    length = int(max((slot.end_s for slot in slots), default=0))
    cells = [[""] * length for _ in actions]
    for slot in slots:
        cells[slot.worker][int(slot.start_s)] = str(slot.action)
    return _align(cells)


def format_rows(actions: Sequence[Sequence[Action]]) -> str:
    """Formats the lists of a schedule as rows, also if the schedule cannot be executed."""
    length = max((len(row) for row in actions), default=0)
    return _align([[str(action) for action in row] + [""] * (length - len(row)) for row in actions])


def _align(cells: list[list[str]]) -> str:
    width = max((len(cell) for row in cells for cell in row), default=0)
    return "\n".join(
        f"worker {worker}: " + " ".join(cell.ljust(width) for cell in row).rstrip() for worker, row in enumerate(cells)
    )


class Timeline:
    """The measured slots of one step."""

    def __init__(self, workers: Sequence[str], slots: Sequence[Slot], actions: Sequence[Sequence[Action]]) -> None:
        self.workers = tuple(workers)
        start_s = min((slot.start_s for slot in slots), default=0.0)
        self.slots = [Slot(slot.worker, slot.action, slot.start_s - start_s, slot.end_s - start_s) for slot in slots]
        self.actions = [list(row) for row in actions]

    def __repr__(self) -> str:
        return (
            f"<Timeline: {len(self.slots)} actions in {1000 * self.length_s:.1f} ms, bubble {100 * self.bubble:.0f} % "
            f"(schedule: {100 * self.theoretical_bubble:.0f} %)>"
        )

    @property
    def length_s(self) -> float:
        """The time from the first start to the last end."""
        return max((slot.end_s for slot in self.slots), default=0.0)

    @property
    def bubble(self) -> float:
        """The idle share of the workers' time, from 0 to 1."""
        return bubble(self.slots, len(self.workers))

    @property
    def theoretical_bubble(self) -> float:
        """The bubble without transfer times, for the mean times of the stages' actions."""
        return bubble(self.theoretical_slots(), len(self.workers))

    def theoretical_slots(self) -> list[Slot]:
        """Returns the schedule without time for transfers and for the runner's own work."""
        return simulate(self.actions, self.mean_times_s("F"), self.mean_times_s("B"))

    def mean_times_s(self, kind: Kind) -> list[float]:
        """Returns the mean time of a forward or backward of each stage; 0 if none ran."""
        num_stages = 1 + max((slot.action.stage for slot in self.slots), default=-1)
        times: list[list[float]] = [[] for _ in range(num_stages)]
        for slot in self.slots:
            if slot.action.kind == kind:
                times[slot.action.stage].append(slot.end_s - slot.start_s)
        return [fmean(of_stage) if of_stage else 0.0 for of_stage in times]

    def draw(self, path: str | Path, title: str = "") -> None:
        """Writes a Gantt chart (.png, .svg or .pdf) of the measured times, with the ideal times below.

        Raises:
            ConfigError: the name has another ending.
            RpcdistError: matplotlib is missing.
        """
        path = Path(path)
        if path.suffix not in (".png", ".svg", ".pdf"):
            raise ConfigError(f"{path}: the name must end in .png, .svg or .pdf")
        with raised_as(RpcdistError, "drawing needs matplotlib: pip install 'rpcdist[examples]'", ImportError):
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        figure = Figure(figsize=(12, 2.2 + 1.1 * len(self.workers)), layout="constrained")
        FigureCanvasAgg(figure)  # draws without a display
        top, bottom = figure.subplots(2, 1, sharex=True)
        self._draw_rows(top, self.slots, f"measured: {100 * self.bubble:.0f} % idle")
        allowed = f"without any time for communication: {100 * self.theoretical_bubble:.0f} % idle"
        self._draw_rows(bottom, self.theoretical_slots(), allowed)
        bottom.set_xlabel("milliseconds")
        if title:
            figure.suptitle(title, fontweight="bold")
        figure.savefig(path, dpi=130)

    def _draw_rows(self, axes: Axes, slots: Sequence[Slot], title: str) -> None:
        num_stages = 1 + max((slot.action.stage for slot in slots), default=0)
        length_s = max((slot.end_s for slot in slots), default=0.0)
        for slot in slots:
            width_s = slot.end_s - slot.start_s
            axes.barh(
                slot.worker,
                1000 * width_s,
                left=1000 * slot.start_s,
                color=_color(slot.action, num_stages),
                edgecolor="white",
                linewidth=0.7,
                height=0.8,
            )
            if width_s > 0.012 * length_s:  # wide enough for a number
                middle_s = (slot.start_s + slot.end_s) / 2
                text = str(slot.action.microbatch)
                axes.text(1000 * middle_s, slot.worker, text, ha="center", va="center", fontsize=8, color="white")
        axes.set_yticks(range(len(self.workers)), self.workers)
        axes.invert_yaxis()
        axes.set_title(f"{title} (blue: forward, orange: backward, number: micro-batch)", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)


def _color(action: Action, num_stages: int) -> tuple[float, float, float]:
    """Returns blue for forward, orange for backward; the later stages of a worker are lighter."""
    base = (0.12, 0.38, 0.64) if action.kind == "F" else (0.85, 0.42, 0.08)
    lightness = 0.45 * action.stage / num_stages
    red, green, blue = (channel + (1 - channel) * lightness for channel in base)
    return red, green, blue
