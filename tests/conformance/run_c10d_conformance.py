"""Run torch's own tests of collectives and DDP against rpcdist, and count.

    python tests/conformance/run_c10d_conformance.py                        in both ways, one after the other
    python tests/conformance/run_c10d_conformance.py --peer compat          under rpcdist.compat
    python tests/conformance/run_c10d_conformance.py --peer backend         torch's groups on the backend rpcdist
    python tests/conformance/run_c10d_conformance.py --peer torch --write   Gloo; writes the list of what it passes
    python tests/conformance/run_c10d_conformance.py barrier                the tests whose names contain a word

The exit code is 0 if every test of this run passed that is not listed with a reason.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

os.environ["OMP_NUM_THREADS"] = "1"  # OpenMP reads it when torch is imported; the ranks share few cores
sys.path.append(str(Path(__file__).parents[1] / "support"))

import c10dtest_catalogue as catalogue
import c10dtest_fleet as fleet
import c10dtest_report as report
from c10dtest_catalogue import Entry
from parent_death import end_with_parent
from rpctest_fleet import Outcome

__all__ = ["main"]

SLOWER = 5
"""A test counts as hung that takes so many times as long as on Gloo when the list was written, and `--limit`."""


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("words", nargs="*", help="run the tests whose names contain one of these")
    parser.add_argument("--peer", choices=(*catalogue.WAYS, "torch"), help="what takes Gloo's place")
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="a test that takes longer failed")
    parser.add_argument("--repeat", type=int, default=1, metavar="TIMES", help="run each test so many times")
    parser.add_argument("--details", type=Path, metavar="FILE", help="write what failed tests wrote to this file")
    parser.add_argument("--write", action="store_true", help="write the result to docs/conformance.md, or the list")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    fleet.preload()
    statuses = [in_own_process(peer, options) for peer in ([options.peer] if options.peer else catalogue.WAYS)]
    return int(any(statuses))


def in_own_process(peer: str, options: argparse.Namespace) -> int:
    """A replacement of Gloo takes its place for a whole process."""
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        status = 1
        end_with_parent()
        try:
            status = run(peer, options)
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def run(peer: str, options: argparse.Namespace) -> int:
    tests = fleet.prepare(peer)
    if peer == "torch":
        return measure_baseline(tests, options)
    entries = selected(catalogue.load(), options.words)
    outcomes = list(reported(run_entries(tests, entries, options), peer, options))
    print(report.table(peer, outcomes))
    if options.write:
        report.write_section(peer, outcomes)
    return 1 if report.unexplained(peer, outcomes) else 0


def selected(entries: Iterable[Entry], words: list[str]) -> list[Entry]:
    return [entry for entry in entries if not words or any(word in entry.name for word in words)]


def run_entries(
    tests: ModuleType, entries: list[Entry], options: argparse.Namespace
) -> Iterator[tuple[Entry, Outcome]]:
    for entry in entries:
        for _ in range(options.repeat):
            outcome = fleet.run_test(tests, entry.name, entry.ranks, max(options.limit, SLOWER * entry.seconds))
            if outcome.failed:
                break
        yield entry, outcome


def reported(
    pairs: Iterable[tuple[Entry, Outcome]], peer: str, options: argparse.Namespace
) -> Iterator[tuple[Entry, Outcome]]:
    """The same pairs, with a line printed for each, and what failed tests wrote added to a file."""
    with options.details.open("a") if options.details else contextlib.nullcontext() as details:
        for number, (entry, outcome) in enumerate(pairs, 1):
            print(
                f"{number:4}  {outcome.status:8} {outcome.seconds:6.1f} s  {peer} {entry.ranks}  {entry.name}",
                flush=True,
            )
            if details and outcome.failed:
                print(f"##### {peer} {outcome.name}: {outcome.status}\n{outcome.details}\n", file=details, flush=True)
            yield entry, outcome


def measure_baseline(tests: ModuleType, options: argparse.Namespace) -> int:
    """Runs every test on torch itself; one that fails with the ranks that it asks for, with others, too."""
    import c10dtest_source

    base = tests.DistributedTest._DistTestBase
    names = sorted(name for name in dir(base) if name.startswith("test_"))
    entries = selected((Entry(name, c10dtest_source.ranks_asked_for(tests, name)) for name in names), options.words)
    passed, skipped = [], {}
    for entry, outcome in reported(_with_ranks_that_fit(tests, entries, options), "torch", options):
        if outcome.status == "passed":
            passed.append(Entry(entry.name, entry.ranks, round(outcome.seconds, 1)))
        else:
            skipped[entry.name] = outcome.details if outcome.status == "skipped" else f"{outcome.status} on torch"
    print(f"{len(passed)} passed, {len(skipped)} not")
    if options.write:
        catalogue.save(passed, skipped, keep=bool(options.words))
    return 0


def _with_ranks_that_fit(
    tests: ModuleType, entries: list[Entry], options: argparse.Namespace
) -> Iterator[tuple[Entry, Outcome]]:
    for entry in entries:
        tried = [Entry(entry.name, ranks) for ranks in dict.fromkeys((entry.ranks, 2, 4))]
        pairs = []
        for pair in run_entries(tests, tried, options):
            pairs.append(pair)
            if not pair[1].failed:
                break
        yield pairs[-1] if pairs[-1][1].status == "passed" else pairs[0]


if __name__ == "__main__":
    sys.exit(main())
