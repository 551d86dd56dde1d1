"""The command of `make clients`, without the clients, which are installed elsewhere."""

from __future__ import annotations

import re
from multiprocessing import resource_tracker
from pathlib import Path

import client_results
import pytest
import run_clients
from client_results import GUIDE, example, run_workers
from large_results import NUM_BYTES, put_much
from leak_guard import LeakGuard
from run_clients import (
    BEGIN,
    CLIENTS,
    END,
    FOLDER,
    HEAD,
    Client,
    Outcome,
    OwnTests,
    compare,
    compare_tests,
    row,
    run_tests,
    write,
)

PINS = (FOLDER / "requirements.txt").read_text()


@pytest.mark.parametrize("name", CLIENTS)
def test_each_client_has_a_program_a_section_and_a_pinned_version(name: str) -> None:
    client = CLIENTS[name]
    assert Path(client.command(True)[-1 if client.how == "compat" else -2]).is_file()
    assert f"\n## {name}\n" in GUIDE.read_text()
    pinned = re.search(rf"^{client.distribution.replace('_', '[-_]')}==(\S+)$", PINS, re.MULTILINE)
    assert pinned and f"\n| {name} | {pinned[1]} | {client.what} | " in GUIDE.read_text()


@pytest.mark.parametrize("name", [name for name, client in CLIENTS.items() if client.how != "compat"])
def test_the_programs_run_the_examples_of_the_guide(name: str) -> None:
    assert f'example("{name}", backend)' in (FOLDER / f"{CLIENTS[name].program}.py").read_text()
    ours, theirs = (example(name, backend) for backend in ("rpcdist", "gloo"))
    assert theirs == ours.replace('"rpcdist"', '"gloo"')
    compile(ours, name, "exec")


def test_results_are_equal_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    torch = Outcome({"losses": ["0x1p+0"], "exits": [0]}, "", 1.0)
    assert compare("a client", torch, torch) == "2 of 2"
    other = Outcome({"losses": ["0x1.8p+0"], "exits": [0], "more": 1}, "", 1.0)
    assert compare("a client", torch, other) == "1 of 3, not losses, more"
    assert "0x1.8p+0" in capsys.readouterr().err
    failed = Outcome({}, "exit code 1, 0 results", 1.0)
    assert compare("a client", torch, failed) == "torch: ended; rpcdist: exit code 1, 0 results"


@pytest.mark.multiproc
def test_workers_may_put_more_than_a_pipe_holds(monkeypatch: pytest.MonkeyPatch, leak_guard: LeakGuard) -> None:
    monkeypatch.setattr(client_results, "WORKER_LIMIT_S", 60.0)
    found, statuses = run_workers(put_much, 2)
    leak_guard.exempt_child(resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]  # outlives them
    assert statuses == [0, 0] and sorted(found) == [bytes([rank]) * NUM_BYTES for rank in (0, 1)]


def test_rows_take_the_place_of_those_of_the_same_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "clients.md"
    page.write_text(f"before\n\n{BEGIN}\n{END}\n\nafter\n")
    monkeypatch.setattr(run_clients, "GUIDE", page)
    monkeypatch.setattr(run_clients, "version", lambda distribution: "1.0")
    write({"Fabric": row("Fabric", "2 of 3")})
    write({"torchft": row("torchft", "4 of 4")})
    write({"Fabric": row("Fabric", "3 of 3")})
    what = {name: f"| {name} | 1.0 | {CLIENTS[name].what} | " for name in ("torchft", "Fabric")}
    lines = [BEGIN, *HEAD, f"{what['torchft']}4 of 4 | - |", f"{what['Fabric']}3 of 3 | - |", END]
    assert page.read_text() == "\n".join(["before", "", *lines, "", "after", ""])


BAD_TESTS = """
import os, threading, pytest

def test_passes(): pass

def test_fails(): assert False

def test_is_skipped(): pytest.skip("not here")

def test_ends_the_process(): os._exit(3)

def test_hangs(): threading.Event().wait()

@pytest.fixture
def broken():
    yield
    raise OSError("in a teardown")

def test_fails_in_its_teardown(broken): pass

def test_comes_last(): pass
"""


def test_a_client_s_own_tests_are_told_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that hang or end their process do not hide the others."""
    monkeypatch.setattr(run_clients, "TEST_LIMIT_S", 8.0)
    monkeypatch.setattr(run_clients, "SOURCES", tmp_path)
    monkeypatch.setattr(run_clients, "version", lambda distribution: "1.0")
    folder = tmp_path / "clienta-1.0"
    folder.mkdir()
    (folder / "test_bad.py").write_text(BAD_TESTS)
    client = Client("clienta", "client_a", "compat", "nothing", OwnTests(("{sources}/test_bad.py",), ("compat",)))
    outcomes = {name.rpartition("test_")[2]: outcome for name, outcome in run_tests(client, "torch").items()}
    assert outcomes == {
        "passes": "passed",
        "fails": "failed",
        "is_skipped": "skipped",
        "ends_the_process": "did not end",
        "hangs": "did not end",
        "fails_in_its_teardown": "failed",
        "comes_last": "passed",
    }
    assert compare_tests(outcomes, {"compat": outcomes}) == ("compat 2 of 2", True)
    assert compare_tests(outcomes, {"backend": {"passes": "passed"}}) == ("backend 1 of 2", False)
    assert compare_tests({}, {"backend": {}}) == ("backend 0 of 0", False)
    assert "comes_last did not run, and passes on torch" in capsys.readouterr().err
