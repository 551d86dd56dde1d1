"""A call, a backward pass and a reference pass few files, and docs/architecture.md names them in their order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import ways
from docs_programs import page
from peer_timeouts import CALM_S

from rpcdist.testing import RpcWorld, WorkerPool

pytestmark = pytest.mark.multiproc

ROW = re.compile(r"^\| (?P<process>\w*) ?\| `(?P<file>[\w/.]+)` \|", re.MULTILINE)


@pytest.fixture(scope="module")
def world(module_pool: WorkerPool) -> Iterator[RpcWorld]:
    found = module_pool.new_world(2, peer_timeout=CALM_S)
    workers = {name: module_pool.start(name) for name in ("a", "b")}
    for worker in workers.values():
        worker.run(ways.install)
    world = RpcWorld(workers.__getitem__, found.url, 2, found.options)
    for joining in [world.begin_join("a", 0), world.begin_join("b", 1)]:
        joining.result()
    yield world
    world.shutdown()


def described(heading: str) -> tuple[list[str], list[str]]:
    """The files in the table of a section: those of the process where the operation begins, and those of the other."""
    _, _, section = page("docs/architecture.md").partition(f"\n## {heading}\n")
    files: dict[str, list[str]] = {}
    process = ""
    for row in ROW.finditer(section.partition("\n## ")[0]):
        process = row["process"] or process
        files.setdefault(process, []).append(row["file"])
    begins, other = files.values()
    return begins, other


NUM_TRIES = 5  # on a busy machine, the I/O loop may read most messages of one try

CASES: dict[str, tuple[Callable[[str], list[ways.Span]], int, int]] = {
    "A call": (ways.spans_of_calls, 18, 17),
    "A backward pass": (ways.spans_of_direct_passes, 22, 21),
    "A reference": (ways.spans_of_references, 29, 25),
}


def tries(world: RpcWorld, measure: Callable[[str], list[ways.Span]]) -> Iterator[tuple[list[str], list[str]]]:
    """The files of an operation where it begins, and in the other process."""
    for _ in range(NUM_TRIES):
        spans = world["a"].run(measure, "b")
        yield world["a"].run(ways.passed, spans), world["b"].run(ways.passed, spans)


@pytest.mark.parametrize("heading", CASES)
def test_the_page_names_the_files_of_a_way_in_their_order(world: RpcWorld, heading: str) -> None:
    measure, most_first, most_other = CASES[heading]
    named = described(heading)
    assert len(named[0]) <= most_first and len(named[1]) <= most_other
    for first, other in tries(world, measure):
        # The other process may poll, or sleep, when the message comes.
        if first == named[0] and sorted(other) == sorted(named[1]):
            break
    assert first == named[0]
    assert sorted(other) == sorted(named[1])


def test_the_page_has_the_numbers_of_files() -> None:
    text = " ".join(page("docs/architecture.md").split())
    caller, callee = described("A call")
    total = len({*caller, *callee})
    assert total <= 24
    assert f"passes through {total} files, {len(caller)} at the caller and {len(callee)} at the callee" in text
    first, other = described("A backward pass")
    assert f"passes through {len(first)} files where it begins, and {len(other)} at the other worker" in " ".join(
        text.split()
    )
    user, owner = described("A reference")
    assert f"pass through {len(user)} files at the user and {len(owner)} at the owner" in text


def test_a_general_pass_has_few_files(world: RpcWorld) -> None:
    for first, other in tries(world, ways.spans_of_general_passes):
        assert "autograd/_verdicts.py" in first and "autograd/_verdicts.py" in other
        if len(first) <= 25 and len(other) <= 24:
            break
    assert len(first) <= 25 and len(other) <= 24, (first, other)
