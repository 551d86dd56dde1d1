"""What the examples share: options of the command line, the start of the processes, and pictures.

Nothing here imports torch, and every example defines its options before it imports torch: `--help` and the mistakes of
a command line are answered at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import Field, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Never, NoReturn, TypeVar

from rpcdist import launch, placement_from_environment
from rpcdist.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from tqdm import tqdm

PROCESSES_PER_CORE = 4  # that are started without a question
MEMORY_PER_PROCESS_GB = 0.25  # of one that has imported torch
NUM_TRAIN = 1437  # of the 1,797 images of digits; the other 360 measure the accuracy


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """A parser of numbers above zero, for argparse."""

    def parse_number(text: str) -> float:
        with suppress(ValueError):
            if 0 < (number := kind(text)) < math.inf:
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive {'whole ' if kind is int else ''}number")

    return parse_number


def option(
    default: object,
    description: str,
    kind: Callable[[str], object] | None = None,
    *,
    metavar: str | None = "N",
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A field of `Options` that the command line sets. Without a `kind`, numbers are above zero."""
    if kind is None and isinstance(default, (int, float)):
        kind = positive(type(default))
    return field(default=default, metadata={"help": description, "type": kind, "metavar": metavar, "choices": choices})


def flag(description: str) -> Any:
    """A field of `Options` that is False unless the command line names it."""
    return field(default=False, metadata={"help": description, "action": "store_true"})


def counted(default: int, description: str) -> Any:
    """The field of `Options` that counts the processes besides `num_others`; torchrun's ranks decide it otherwise."""
    return field(default=default, metadata={"help": description, "type": positive(int), "metavar": "N", "counts": True})


@dataclass(frozen=True)
class ExampleOptions:
    """Base of the options of an example. Every process gets a copy of them."""

    port: int = option(0, "port of the rendezvous on this machine; 0 is any free one", int)
    yes: bool = flag("start even a great many processes without a question")

    roles: ClassVar[str] = "the workers"  # for the message that torchrun started too few
    needs: ClassVar[tuple[str, ...]] = ("matplotlib",)  # modules that rpcdist itself does not need

    @property
    def num_others(self) -> int:
        """Number of processes besides those that the `counted` option counts."""
        return 0

    def check(self) -> None:
        """Raises `ValueError` for options that would fail late, or with a message that is hard to understand."""


Options = TypeVar("Options", bound=ExampleOptions)


def parse(kind: type[Options], description: str, epilog: str = "") -> Options:
    """The options of the command line; a wrong one ends the program, with an explanation and status 2."""
    parser = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    shared = {each.name for each in fields(ExampleOptions)}
    for each in sorted(fields(kind), key=lambda each: each.name in shared):
        settings = {name: value for name, value in each.metadata.items() if name != "counts" and value is not None}
        if settings.get("choices") or settings.get("type") in (str, Path):
            settings["metavar"] = "FILE" if settings.get("type") is Path else None
        unset = each.default is None or each.metadata.get("counts")
        settings["help"] += f" (default: {each.default})" if each.metadata.get("counts") else ""
        parser.add_argument(f"--{each.name.replace('_', '-')}", default=argparse.SUPPRESS if unset else each.default,
                            **settings)  # fmt: skip
    given = vars(parser.parse_args())
    try:
        options = fit_to_torchrun(kind(**given), given)
        for module in options.needs:
            if importlib.util.find_spec(module) is None:
                raise ValueError(f"the package {module} is missing: pip install 'rpcdist[examples]'")
        options.check()
        for name in ("picture", "checkpoint"):
            if hasattr(options, name):
                check_output(f"--{name}", getattr(options, name), is_picture=name == "picture")
    except ValueError as error:
        parser.error(str(error))
    return options


def counted_field(options: ExampleOptions) -> Field[Any] | None:
    return next((each for each in fields(options) if each.metadata.get("counts")), None)


def num_processes(options: ExampleOptions) -> int:
    counts = counted_field(options)
    return options.num_others + (getattr(options, counts.name) if counts else 0)


def fit_to_torchrun(options: Options, given: dict[str, object]) -> Options:
    """The options, with all ranks of torchrun, if it has started this process, counted."""
    place, counts = placement_from_environment(), counted_field(options)
    if place is None or (counts is None and place.world_size == options.num_others):
        return options
    if counts is None or place.world_size <= options.num_others:
        at_least = "at least " if counts else ""
        needed = options.num_others + (1 if counts else 0)
        raise ValueError(
            f"torchrun must start {at_least}{needed} processes, {options.roles}: --nproc-per-node {needed}"
        )
    number = place.world_size - options.num_others
    if given.get(counts.name, number) != number:
        raise ValueError(
            f"--{counts.name} {given[counts.name]} does not fit torchrun's {place.world_size} processes: leave it out"
        )
    changed: dict[str, Any] = {counts.name: number}
    return replace(options, **changed)


def check_output(name: str, path: Path, *, is_picture: bool) -> None:
    """Makes the folder of a file that the example will write."""
    if is_picture and path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"{name} {path}: the name must end in .png, .pdf or .svg")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{name} {path}: its folder cannot be made ({error.strerror})") from error


def refuse(reason: str) -> NoReturn:
    """Ends the program as argparse does."""
    print(f"{Path(sys.argv[0]).name}: error: {reason}", file=sys.stderr)
    sys.exit(2)


def start(function: Callable[[int, Options], None], options: Options) -> None:
    """Calls `function(rank, options)` in every process: in new ones, or in those of torchrun."""
    device = getattr(options, "device", "cpu")
    if device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            refuse(f"--device {device}: torch finds no GPU here")
    if placement_from_environment() is None:
        confirm_many(num_processes(options), sure=options.yes)
        # Importing torch takes each process seconds, in which nothing else would be seen.
        print(f"starting {num_processes(options)} process{'es' * (num_processes(options) > 1)} ...", flush=True)
    try:
        launch(function, (options,), workers=num_processes(options), master_port=options.port)
    except ConfigError as error:
        refuse(f"--port: {error}")


def confirm_many(processes: int, *, sure: bool) -> None:
    """Asks before more processes are started than the machine can serve; without a terminal, refuses."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if sure or processes <= max(8, PROCESSES_PER_CORE * cores):
        return
    what = f"{processes} processes on {cores} cores, with at least {processes * MEMORY_PER_PROCESS_GB:.0f} GB of memory"
    if not sys.stdin.isatty():
        refuse(f"this would start {what}: choose fewer, or add --yes")
    if input(f"This starts {what}. Go on? [y/N] ").strip().lower() not in ("y", "yes"):
        sys.exit("nothing was started")


class Bars:
    """The progress of several workers: a bar for each on a terminal, lines elsewhere.

    One process shows them all, so lines never mix. Each worker's calls come one after the other, those of different
    workers may come on different threads (tqdm locks the terminal).
    """

    def __init__(self, names: Sequence[str], total: int, unit: str) -> None:
        self.names = names
        self.bars: list[tqdm[Never]] = []
        if sys.stderr.isatty():  # in a pipe, a file or a log, bars would be noise
            from tqdm import tqdm

            bar = partial(tqdm, total=total, unit=unit, dynamic_ncols=True)
            self.bars = [bar(desc=name, position=position) for position, name in enumerate(names)]

    def advance(self, number: int, amount: int, when: str, status: str) -> None:
        """A worker has done `amount` more; `when` (an epoch, say) is shown in lines only."""
        if self.bars:
            self.bars[number].set_postfix_str(status, refresh=False)
            self.bars[number].update(amount)
        else:
            print(f"{self.names[number]}: {when}, {status}", flush=True)

    def close(self) -> None:
        for bar in self.bars:
            bar.close()


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


def count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
