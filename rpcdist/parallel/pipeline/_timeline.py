"""The measured times of one step's actions, as numbers and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rpcdist.errors import ConfigError, RpcdistError
from rpcdist.parallel.pipeline._schedules import Action, Kind
from rpcdist.parallel.pipeline._simulation import Slot, bubble, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Timeline:
    """The measured slots of one step.

    Args:
        workers: names of the workers.
        slots: times in seconds of one clock.
        actions: the schedule that was executed.
    """

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
        """Time from the first start to the last end."""
        return max((slot.end_s for slot in self.slots), default=0.0)

    @property
    def bubble(self) -> float:
        """The idle share of the workers' time, from 0 to 1."""
        return bubble(self.slots, len(self.workers))

    @property
    def theoretical_bubble(self) -> float:
        """The bubble if transfers took no time, for the mean times of the stages' actions."""
        return bubble(self.theoretical_slots(), len(self.workers))

    def theoretical_slots(self) -> list[Slot]:
        """The schedule without time for transfers and for the runner's own work."""
        return simulate(self.actions, self.mean_times_s("F"), self.mean_times_s("B"))

    def mean_times_s(self, kind: Kind) -> list[float]:
        """The mean time of a forward or backward of each stage; 0 if there was none."""
        num_stages = 1 + max((slot.action.stage for slot in self.slots), default=-1)
        times: list[list[float]] = [[] for _ in range(num_stages)]
        for slot in self.slots:
            if slot.action.kind == kind:
                times[slot.action.stage].append(slot.end_s - slot.start_s)
        return [fmean(of_stage) if of_stage else 0.0 for of_stage in times]

    def draw(self, path: str | Path, title: str = "") -> None:
        """Writes a Gantt picture (.png, .svg or .pdf): what was measured, and below it what the schedule allows.

        Raises:
            ConfigError: the name has another ending.
            RpcdistError: matplotlib is missing.
        """
        path = Path(path)
        if path.suffix not in (".png", ".svg", ".pdf"):
            raise ConfigError(f"{path}: the name must end in .png, .svg or .pdf")
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as exc:
            raise RpcdistError("drawing needs the package matplotlib: pip install 'rpcdist[examples]'") from exc
        figure = Figure(figsize=(12, 2.2 + 1.1 * len(self.workers)), layout="constrained")
        FigureCanvasAgg(figure)  # a file needs no display
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
            if width_s > 0.012 * length_s:  # there is room for a number
                middle_s = (slot.start_s + slot.end_s) / 2
                text = str(slot.action.microbatch)
                axes.text(1000 * middle_s, slot.worker, text, ha="center", va="center", fontsize=8, color="white")
        axes.set_yticks(range(len(self.workers)), self.workers)
        axes.invert_yaxis()
        axes.set_title(f"{title} (blue: forward, orange: backward, number: micro-batch)", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)


def _color(action: Action, num_stages: int) -> tuple[float, float, float]:
    """Blue for forward, orange for backward; the later stages of a worker are lighter."""
    base = (0.12, 0.38, 0.64) if action.kind == "F" else (0.85, 0.42, 0.08)
    lightness = 0.45 * action.stage / num_stages
    red, green, blue = (channel + (1 - channel) * lightness for channel in base)
    return red, green, blue
