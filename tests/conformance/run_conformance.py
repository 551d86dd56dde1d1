"""Run torch's own RPC tests against rpcdist, and count.

    python tests/conformance/run_conformance.py                       all that torch passes, with a table at the end
    python tests/conformance/run_conformance.py test_add sparse       the tests whose names contain one of the words
    python tests/conformance/run_conformance.py --category plain      one category (see docs/conformance.md)
    python tests/conformance/run_conformance.py --peer torch --write  torch on itself; writes the list of its passes

The exit code is 0 if at least 95 % of the counted tests of this run passed, in each category.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import rpctest_catalogue as catalogue
import rpctest_report as report
import torch
import torch.testing._internal.common_distributed
from rpctest_catalogue import Entry
from rpctest_fleet import Fleet, Outcome

from rpcdist import testing

__all__ = ["main"]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("words", nargs="*", help="run the tests whose names contain one of these")
    parser.add_argument("--peer", choices=("rpcdist", "torch"), default="rpcdist", help="whose RPC the tests run on")
    parser.add_argument(
        "--fresh",
        action=argparse.BooleanOptionalAction,
        help="start new processes for each test; the default for torch, which a second init_rpc in a process may hang",
    )
    parser.add_argument("--category", choices=sorted(catalogue.CATEGORIES), help="run this category only")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="a test that takes longer failed")
    parser.add_argument("--repeat", type=int, default=1, metavar="TIMES", help="run each test so many times")
    parser.add_argument(
        "--write", action="store_true", help="write the baseline, or the numbers of docs/conformance.md"
    )
    parser.add_argument("--details", type=Path, metavar="FILE", help="write tracebacks and output of failures here")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    # The workers' files and processes are removed on the way out of `main`.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))
    if options.peer == "torch":
        testing.preload("rpctest_suites")  # rpcdist has to take its place in torch first
    fresh = options.peer == "torch" if options.fresh is None else options.fresh
    fleet = Fleet(options.peer, fresh=fresh)
    try:
        return run(fleet, options)
    finally:
        fleet.close()


def run(fleet: Fleet, options: argparse.Namespace) -> int:
    """Run the selected tests, print a line for each, and then what the run is for."""
    entries = list(selected(options))
    outcomes: list[tuple[Entry, Outcome]] = []
    with options.details.open("w") if options.details else contextlib.nullcontext() as details:
        for number, entry in enumerate(entries, 1):
            outcome = repeated(fleet, entry, options)
            outcomes.append((entry, outcome))
            print(f"{number:4}/{len(entries)}  {outcome.status:8} {outcome.seconds:6.1f} s  {entry.name}", flush=True)
            if details and outcome.failed:
                print(f"##### {outcome.name}: {outcome.status}\n{outcome.details}\n", file=details, flush=True)
    if options.peer == "torch":
        return baseline(outcomes, write=options.write, keep=bool(options.words))
    print(report.table(outcomes, fleet.num_starts))
    if options.write:
        report.write_page(outcomes, fleet.num_starts)
    return 0 if report.reached(outcomes) else 1


def selected(options: argparse.Namespace) -> Iterator[Entry]:
    """The tests to run: those of the baseline, or all that there are when the baseline itself is measured."""
    listed = catalogue.load()
    gpu_tests = catalogue.gpu_tests()
    if torch.cuda.is_available() or options.category == catalogue.GPU:
        listed += gpu_tests
    elif options.peer == "rpcdist":
        print(f"{len(gpu_tests)} tests are skipped: they need a GPU, and this machine has none")
    for entry in every_test() if options.peer == "torch" else listed:
        if options.words and not any(word in entry.name for word in options.words):
            continue
        if options.category in (None, entry.category):
            yield entry


def every_test() -> Iterator[Entry]:
    import rpctest_suites

    for suite in rpctest_suites.__all__:
        for test in sorted(name for name in dir(getattr(rpctest_suites, suite)) if name.startswith("test")):
            yield Entry(f"{suite}.{test}", "plain")


def repeated(fleet: Fleet, entry: Entry, options: argparse.Namespace) -> Outcome:
    """Run a test as often as asked for, and stop at the first failure."""
    for _ in range(options.repeat):
        outcome = fleet.run(entry.suite, entry.test, options.limit)
        if outcome.failed:
            break
    return outcome


def baseline(outcomes: list[tuple[Entry, Outcome]], *, write: bool, keep: bool) -> int:
    """Print, and on request write, what torch passes; with `keep`, other tests stay in the list."""
    passed = [
        Entry(outcome.name, *catalogue.categorize(outcome.used, outcome.name), outcome.seconds)
        for _, outcome in outcomes
        if outcome.status == "passed"
    ]
    skipped = {outcome.name: outcome.details for _, outcome in outcomes if outcome.status == "skipped"}
    for category in catalogue.CATEGORIES:
        print(f"{sum(entry.category == category for entry in passed):4} {category}")
    num_failed = sum(outcome.failed for _, outcome in outcomes)
    print(f"{len(passed):4} passed, {len(skipped)} skipped, {num_failed} failed")
    if write:
        catalogue.save(passed, torch.__version__, skipped, keep=keep)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
