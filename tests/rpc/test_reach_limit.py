"""How long a worker is tried before it counts as dead."""

from __future__ import annotations

import time

import pytest
from own_shortages import no_free_descriptor

from rpcdist.errors import ConnectFailed
from rpcdist.rpc._peers.peer import ReachLimit, was_refused

REFUSED, SILENT = ConnectFailed("b:1", "Connection refused"), ConnectFailed("b:1", "no process answered", 1.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time; write it to move on."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_silence_lasts_for_the_peer_timeout_and_a_closed_port_for_half_a_second(clock: list[float]) -> None:
    assert was_refused(REFUSED) and not was_refused(SILENT)
    limit = ReachLimit(3.0)
    assert [limit.is_over(REFUSED), limit.is_over(SILENT)] == [False, False]
    clock[0] += 0.6
    assert [limit.is_over(REFUSED), limit.is_over(SILENT)] == [True, False]
    clock[0] += 2.5
    assert limit.is_over(SILENT)


def test_who_is_heard_is_tried_for_longer_but_not_for_ever(clock: list[float]) -> None:
    limit = ReachLimit(3.0)
    for _ in range(17):
        clock[0] += 1.0
        assert not limit.is_over(REFUSED, is_heard=True)
    assert limit.is_over(REFUSED)
    clock[0] += 1.0
    assert limit.is_over(REFUSED, is_heard=True) and limit.is_over(SILENT, is_heard=True)


def test_a_process_that_was_held_up_judges_nobody_who_is_heard(clock: list[float]) -> None:
    limit = ReachLimit(3.0)
    clock[0] += 60.0
    assert not limit.is_over(REFUSED, is_heard=True)
    clock[0] += 0.6
    assert limit.is_over(REFUSED, is_heard=True)


def test_who_was_silent_before_is_tried_once_more(clock: list[float]) -> None:
    limit = ReachLimit(3.0, last_seen=clock[0] - 10.0)
    assert not limit.is_over(SILENT)
    assert limit.attempt_s == pytest.approx(0.6)
    clock[0] += 0.6
    assert limit.is_over(SILENT)


def test_a_process_that_was_held_up_judges_nobody(clock: list[float]) -> None:
    limit = ReachLimit(3.0)
    clock[0] += 60.0
    assert not limit.is_over(SILENT)
    clock[0] += 0.6
    assert limit.is_over(SILENT)


@pytest.mark.parametrize("is_heard", [False, True])
@pytest.mark.parametrize("failed", [REFUSED, SILENT])
def test_a_process_without_a_free_descriptor_judges_nobody(
    clock: list[float], failed: ConnectFailed, is_heard: bool
) -> None:
    """Its attempts fail whatever the other one does, however long that lasts."""
    limit = ReachLimit(3.0)
    with no_free_descriptor():
        for _ in range(100):
            clock[0] += 0.5
            assert not limit.is_over(failed, is_heard)
            assert limit.shortage is not None
    assert not limit.is_over(SILENT, is_heard)  # there is time for one attempt more
    assert limit.shortage is None
    clock[0] += 0.6
    assert limit.is_over(SILENT, is_heard)
