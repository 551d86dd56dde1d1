"""A sample of torch's tests of collectives and DDP, in both ways; `make conformance` runs all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from c10dtest_catalogue import DIFFERENT, WAYS, Entry, load
from c10dtest_report import table, unexplained
from rpctest_fleet import Outcome

from rpcdist.testing.limits import LIMIT_S

RUNNER = Path(__file__).with_name("run_c10d_conformance.py")
# With torch's groups, C++ code keeps works of ours in the second.
SAMPLE = ("test_all_gather_coalesced_with_empty", "test_ddp_grad_div_uneven_inputs", "test_scatter_object_list")

pytestmark = [pytest.mark.conformance, pytest.mark.multiproc]


@pytest.mark.timeout(4 * LIMIT_S)
def test_a_sample_passes_in_both_ways() -> None:
    command = [sys.executable, str(RUNNER), "--limit", str(LIMIT_S), "--details", "/dev/stdout", *SAMPLE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    for way in WAYS:
        assert done.stdout.count(f" {way} 3  test_") == len(SAMPLE)
    assert done.stdout.count(f"{len(SAMPLE)} of the {len(SAMPLE)} tests pass") == len(WAYS)


@pytest.mark.parametrize(("status", "is_excused"), [("failed", True), ("timeout", False), ("crashed", False)])
def test_a_reason_excuses_failures_only(status: str, is_excused: bool) -> None:
    for way, reasons in DIFFERENT.items():
        for name, reason in reasons.items():
            outcomes = [(Entry(name, 3), Outcome(name, status, 1.0))]
            assert (unexplained(way, outcomes) == []) is is_excused
            assert table(way, outcomes).endswith(f"`{name}`: {reason if is_excused else status}")


def test_what_is_listed_as_different_is_a_test_that_gloo_passes() -> None:
    names = {entry.name for entry in load()}
    assert set(SAMPLE) <= names and DIFFERENT.keys() == WAYS.keys()
    for reasons in DIFFERENT.values():
        assert reasons.keys() <= names and all(reasons.values())
