"""Runs tests that a client brings: `own_tests.py torch|backend|compat RECORD PYTEST_ARGUMENTS...`.

With `backend`, each group of Gloo's is one of ours; with `compat`, the caller has put rpcdist in torch's place already.
Processes that the tests spawn import this file as their main module, and get the same. RECORD is a file with a line for
the begin and for the end of each test. Tests that are in it already are left out: they hung, or ended the process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

__all__ = ["BEGUN", "Record"]

BEGUN = "begun"


class Record:
    """A plugin of pytest that writes what becomes of each test, as soon as it is known."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcome = ""

    def _write(self, test: str, outcome: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{test}\t{outcome}\n")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = {line.partition("\t")[0] for line in self._path.read_text().splitlines()}
        items[:] = [item for item in items if item.nodeid not in known]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome = ""
        self._write(nodeid, BEGUN)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._outcome = "failed" if "failed" in (self._outcome, report.outcome) else report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(nodeid, self._outcome)


def use_our_backend() -> None:
    """Gives torch our groups where a program asks for Gloo's or names none; an attempt to make one of Gloo's fails."""
    import torch.distributed

    from rpcdist.collectives.torch_backend import torch_group

    c10d: Any = torch.distributed.distributed_c10d
    make_default = c10d.init_process_group

    def init_process_group(backend: str | None = None, *arguments: Any, **named: Any) -> None:
        make_default("rpcdist" if backend in (None, "gloo") else backend, *arguments, **named)

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a group of Gloo's was made in a test of ours")

    torch.distributed.init_process_group = c10d.init_process_group = init_process_group
    c10d.ProcessGroupGloo = refuse
    if any("torchft" in argument for argument in sys.argv):
        import torchft.process_group

        torchft.process_group.ProcessGroupGloo._create_pg = lambda group, store, rank, size: torch_group(
            store, rank, size, timeout=group._timeout
        )
        torchft.process_group.ProcessGroupBabyGloo._create_pg = torch_group


if sys.argv[1:2] == ["backend"]:
    use_our_backend()

if __name__ == "__main__":
    record = Path(sys.argv[2])
    # Without the configuration of this repository, in which a source package may lie.
    alone = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(record.parent)]
    sys.exit(pytest.main([*alone, *sys.argv[3:]], plugins=[Record(record)]))
