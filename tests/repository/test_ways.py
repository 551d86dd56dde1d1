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


CASES: dict[str, tuple[Callable[[str], list[ways.Span]], int, int]] = {
    "A call": (ways.spans_of_calls, 18, 17),
    "A backward pass": (ways.spans_of_direct_passes, 22, 21),
    "A reference": (ways.spans_of_references, 29, 25),
}


@pytest.mark.parametrize("heading", CASES)
def test_the_page_names_the_files_of_a_way_in_their_order(world: RpcWorld, heading: str) -> None:
    measure, *most = CASES[heading]
    spans = world["a"].run(measure, "b")
    passed = world["a"].run(ways.passed, spans), world["b"].run(ways.passed, spans)
    for found, named, limit in zip(passed, described(heading), most, strict=True):
        assert sorted(found) == sorted(named)
        assert len(found) <= limit
    assert passed[0] == described(heading)[0]  # the other process may poll, or sleep, when the message comes
    if heading == "A call":
        total = len(set(passed[0] + passed[1]))
        assert total <= 24
        text = f"passes through {total} files, {most[0]} at the caller and {most[1]} at the callee"
        assert text in page("docs/architecture.md")


def test_a_general_pass_has_few_files(world: RpcWorld) -> None:
    spans = world["a"].run(ways.spans_of_general_passes, "b")
    first, other = world["a"].run(ways.passed, spans), world["b"].run(ways.passed, spans)
    assert "autograd/_verdicts.py" in first and "autograd/_verdicts.py" in other
    assert len(first) <= 25 and len(other) <= 24, (first, other)
