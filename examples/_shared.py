"""The parts that the examples share: options of the command line, and the start of the processes.

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
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from rpcdist import LocalCluster, launch, placement_from_environment

PROCESSES_PER_CORE = 4  # that are started without a question
MEMORY_PER_PROCESS_GB = 0.25  # of one that has imported torch
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # for each process, since they share the cores already
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
    """The field of `Options` that counts processes; under torchrun, its number of ranks decides instead."""
    return field(default=default, metadata={"help": description, "type": positive(int), "metavar": "N", "counts": True})


def at_least(description: str, metavar: str) -> Any:
    """The field `min_...` of `Options`: a result below it is a failure, for checks that run the example."""
    return option(0.0, f"exit with status 1 when {description} is below", float, metavar=metavar)


@dataclass(frozen=True)
class ExampleOptions:
    """Base of the options of an example, whose docstring is what `--help` begins with. Every process gets a copy."""

    seed: int = option(0, "random seed", int)
    yes: bool = flag("start even a great many processes without a question")

    roles: ClassVar[str]  # of all processes, for the message that torchrun started too few
    needs: ClassVar[tuple[str, ...]] = ("matplotlib",)  # modules that rpcdist itself does not need

    @property
    def first_names(self) -> Sequence[str]:
        """Of the processes that the `counted` field does not count; theirs are the first ranks."""
        return ()

    @property
    def names(self) -> list[str]:
        """Of the processes, by rank: `observers: int = counted(2, ...)` has observer0 and observer1."""
        counts = self.counted_name() or ""
        return [*self.first_names, *(f"{counts[:-1]}{number}" for number in range(getattr(self, counts, 0)))]

    def check(self) -> None:
        """Raises `ValueError` for options that would fail late, or with a message that is hard to understand."""

    @classmethod
    def counted_name(cls) -> str | None:
        return next((each.name for each in fields(cls) if each.metadata.get("counts")), None)

    @classmethod
    def parse(cls) -> Self:
        """The options of the command line; a wrong one ends the program, with an explanation and status 2."""
        counts = cls.counted_name()
        epilog = f"Under torchrun the ranks are {cls.roles}" + (f"; leave out --{counts}." if counts else ".")
        parser = argparse.ArgumentParser(
            description=cls.__doc__, epilog=epilog, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        shared = {each.name for each in fields(ExampleOptions)}
        for each in sorted(fields(cls), key=lambda each: each.name in shared):
            add_option(parser, each.name, each.default, each.metadata)
        given = vars(parser.parse_args())
        try:
            options = fit_to_torchrun(cls(**given), given)
            for module in options.needs:
                if importlib.util.find_spec(module) is None:
                    raise ValueError(f"the package {module} is missing: pip install 'rpcdist[examples]'")
            options.check()
            for name in ("picture", "checkpoint"):
                if hasattr(options, name):
                    make_folder(f"--{name}", getattr(options, name), is_picture=name == "picture")
        except ValueError as error:
            parser.error(str(error))
        return options


Options = TypeVar("Options", bound=ExampleOptions)


def add_option(parser: argparse.ArgumentParser, name: str, default: object, metadata: Any) -> None:
    settings = {key: value for key, value in metadata.items() if key != "counts" and value is not None}
    if settings.get("choices") or settings.get("type") is Path:
        settings["metavar"] = "FILE" if settings.get("type") is Path else None
    if metadata.get("counts"):
        settings["help"] += f" (default: {default})"
    unset = default is None or metadata.get("counts")  # what is not given shall not be seen as given
    parser.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS if unset else default, **settings)


def fit_to_torchrun(options: Options, given: dict[str, object]) -> Options:
    """The options, with all ranks of torchrun, if it has started this process, counted."""
    place, counts = placement_from_environment(), options.counted_name()
    if place is None or place.world_size == len(options.names):
        return options
    num_others = len(options.names) - (getattr(options, counts) if counts else 0)
    if counts is None or place.world_size <= num_others:
        needed = num_others + (1 if counts else 0)
        raise ValueError(
            f"torchrun must start {'at least ' if counts else ''}{needed} processes, {options.roles}: "
            f"--nproc-per-node {needed}"
        )
    if counts in given:
        raise ValueError(
            f"--{counts} {given[counts]} does not fit torchrun's {place.world_size} processes: leave it out"
        )
    changed: dict[str, Any] = {counts: place.world_size - num_others}
    return replace(options, **changed)


def make_folder(name: str, path: Path, *, is_picture: bool) -> None:
    """Makes the folder of a file that the example will write."""
    if is_picture and path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"{name} {path}: the name must end in .png, .pdf or .svg")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{name} {path}: its folder cannot be made ({error.strerror})") from error


def start(function: Callable[[int, Options], None], options: Options) -> None:
    """Calls `function(rank, options)` in every process: in new ones, or in those of torchrun."""
    announce(options)
    launch(function, (options,), workers=len(options.names), env=ONE_THREAD)


@contextmanager
def cluster(options: ExampleOptions) -> Iterator[None]:
    """This process is the worker `options.names[0]`, which calls the others; they are new, or those of torchrun."""
    import torch

    announce(options)
    torch.set_num_threads(1)
    with LocalCluster(options.names, env=ONE_THREAD):
        yield


def announce(options: ExampleOptions) -> None:
    """Importing torch takes each process seconds, in which nothing else would be seen."""
    if placement_from_environment() is None:
        confirm_many(len(options.names), sure=options.yes)
        print(f"starting {count(len(options.names), 'process', 'es')} ...", flush=True)


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


def refuse(reason: str) -> NoReturn:
    """Ends the program as argparse does."""
    print(f"{Path(sys.argv[0]).name}: error: {reason}", file=sys.stderr)
    sys.exit(2)


def require_accuracy(accuracy: float, min_accuracy: float) -> None:
    if accuracy < min_accuracy:
        sys.exit(f"test accuracy {accuracy:.1f} % is below --min-accuracy {min_accuracy:g}")


def require_loss(loss: float, max_loss: float) -> None:
    if loss > max_loss:
        sys.exit(f"validation loss {loss:.2f} is above --max-loss {max_loss:g}")


def count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"
