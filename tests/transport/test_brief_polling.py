"""When a wait polls its socket instead of sleeping, and when it stops doing so. The clock is the test's."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

from rpcdist.errors import ConfigError
from rpcdist.transport._channels import polling_and_signals
from rpcdist.transport._channels.polling_and_signals import (
    HISTORY_WAITS,
    LIMIT_NS,
    LONG_TURN_NS,
    MAX_PAUSE,
    MIN_PAUSE,
    POLLING_VARIABLE,
    SHORT_NS,
    SWITCHES,
    BriefPolling,
    has_processor_quota,
    may_poll,
)

READY = [(7, 1)]
POLL_NS, YIELD_NS = 700, 1100


class Machine:
    """A clock, a socket that nothing comes to until a time, and a core that others may want.

    Attributes:
        now_ns: what the clock says.
        comes_ns: when something comes to the socket.
        turn_ns: how long others keep the core from who yields.
        host_ns: how long the host keeps it, once, when somebody yields.
        num_switches: how often others ran when somebody yielded.
        num_polls: how often somebody has polled.
    """

    def __init__(self) -> None:
        self.now_ns = self.num_polls = 0
        self.comes_ns = 1 << 60
        self.turn_ns = YIELD_NS
        self.host_ns = self.num_switches = 0

    def poll(self, limit_ms: float) -> list[tuple[int, int]]:
        assert limit_ms == 0
        self.num_polls += 1
        self.now_ns += POLL_NS
        return READY if self.now_ns >= self.comes_ns else []

    def sched_yield(self) -> None:
        self.now_ns += self.turn_ns + self.host_ns
        self.num_switches += self.turn_ns > YIELD_NS
        self.host_ns = 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(polling_and_signals, "perf_counter_ns", lambda: machine.now_ns)
    monkeypatch.setattr(os, "sched_yield", machine.sched_yield)
    monkeypatch.setattr(polling_and_signals, "_usage", lambda: (*range(14), 0, machine.num_switches))
    return machine


def sleep(machine: Machine, polling: BriefPolling, sleeps_ns: list[int]) -> list[bool]:
    """The effect of each sleep."""
    found = []
    for slept_ns in sleeps_ns:
        began_ns = machine.now_ns
        machine.now_ns += slept_ns
        polling.slept(began_ns)
        found.append(polling.is_worth_it)
    return found


NUM_TO_LEARN = HISTORY_WAITS + 1  # short waits, until their history is that of short waits alone, and known


def polling_now(machine: Machine) -> BriefPolling:
    polling = BriefPolling(machine.poll)
    assert sleep(machine, polling, [SHORT_NS - 1] * NUM_TO_LEARN)[-1]
    return polling


def test_short_sleeps_are_replaced_and_long_ones_are_not(machine: Machine) -> None:
    polling = BriefPolling(machine.poll)
    assert sleep(machine, polling, [SHORT_NS] * 30) == [False] * 30
    polling = BriefPolling(machine.poll)
    assert sleep(machine, polling, [SHORT_NS - 1] * NUM_TO_LEARN) == [False] * (NUM_TO_LEARN - 1) + [True]


def waits(machine: Machine, polling: BriefPolling, times_ns: list[int]) -> list[str]:
    """The actions in each of some waits, of which these are the times."""
    found = []
    for time_ns in times_ns:
        began_ns = machine.now_ns
        machine.comes_ns = began_ns + time_ns
        if polling.is_worth_it and polling.try_polling():
            found.append("polls")
            continue
        found.append("sleeps" if machine.now_ns == began_ns else "in vain")
        slept_from_ns = machine.now_ns
        machine.now_ns = max(machine.now_ns, machine.comes_ns)
        polling.slept(slept_from_ns)
    return found


@pytest.mark.parametrize("num_short", range(HISTORY_WAITS))
def test_a_rhythm_is_learned(machine: Machine, num_short: int) -> None:
    """As of a training loop: some answers that come soon, and then one, or the next step, that does not."""
    polling, step = BriefPolling(machine.poll), [SHORT_NS // 2] * num_short + [30 * SHORT_NS]
    waits(machine, polling, step * 2 * NUM_TO_LEARN)
    assert waits(machine, polling, step * 10) == (["polls"] * num_short + ["sleeps"]) * 10


def test_one_exception_changes_nothing(machine: Machine) -> None:
    polling = polling_now(machine)
    waits(machine, polling, [1] * 2)
    assert waits(machine, polling, [30 * SHORT_NS]) == ["in vain"]
    waits(machine, polling, [1] * HISTORY_WAITS)  # with the exception in their history
    assert waits(machine, polling, [1] * 10) == ["polls"] * 10


def test_a_rhythm_that_is_longer_than_the_history_fails_once_in_it(machine: Machine) -> None:
    polling, step = BriefPolling(machine.poll), [1] * 50 + [30 * SHORT_NS]
    waits(machine, polling, step * 4)
    found = waits(machine, polling, step * 10)
    assert found.count("in vain") <= 10 and found.count("polls") == 500


def test_waits_are_counted(machine: Machine) -> None:
    polling = polling_now(machine)
    waits(machine, polling, [1, 1, 30 * SHORT_NS])
    assert (polling.num_polled, polling.num_slept, polling.num_in_vain) == (2, NUM_TO_LEARN + 1, 1)


def test_polling_goes_on_until_something_comes(machine: Machine) -> None:
    polling = polling_now(machine)
    for _ in range(100):
        machine.comes_ns = machine.now_ns + LIMIT_NS // 2
        assert polling.try_polling() == READY and polling.is_worth_it
    assert machine.num_polls > 100


def test_polling_ends_at_their_limit(machine: Machine) -> None:
    polling, began_ns = polling_now(machine), machine.now_ns
    assert polling.try_polling() == [] and not polling.is_worth_it
    assert LIMIT_NS < machine.now_ns - began_ns < LIMIT_NS + 2 * (POLL_NS + YIELD_NS)


def test_polling_ends_when_others_keep_the_core(machine: Machine) -> None:
    polling, num_polls = polling_now(machine), machine.num_polls
    machine.turn_ns = LONG_TURN_NS + 1
    assert polling.try_polling() == [] and not polling.is_worth_it
    assert machine.num_polls == num_polls + 1


def test_polling_goes_on_when_only_the_host_kept_the_core(machine: Machine) -> None:
    polling = polling_now(machine)
    machine.host_ns, machine.comes_ns = 20 * LIMIT_NS, machine.now_ns + 20 * LIMIT_NS + LIMIT_NS // 2
    assert polling.try_polling() == READY and polling.is_worth_it


def test_polling_ends_when_the_host_keeps_the_core_all_the_time(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    polling, num_polls = polling_now(machine), machine.num_polls

    def late() -> None:
        machine.now_ns += LONG_TURN_NS + 1

    monkeypatch.setattr(os, "sched_yield", late)
    assert polling.try_polling() == [] and not polling.is_worth_it
    assert machine.num_polls == num_polls + 2


def test_switches_of_this_thread_are_counted() -> None:
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    assert tuple(usage)[SWITCHES] == (usage.ru_nvcsw, usage.ru_nivcsw)
    time.sleep(0.001)
    assert polling_and_signals._usage()[SWITCHES] > (usage.ru_nvcsw, usage.ru_nivcsw)


def test_a_peer_on_the_same_core_has_its_turn(machine: Machine) -> None:
    polling = polling_now(machine)
    machine.turn_ns, machine.comes_ns = 100_000, machine.now_ns + 100_000
    assert polling.try_polling() == READY and polling.is_worth_it


def pauses_of(machine: Machine, polling: BriefPolling, num_failures: int) -> list[int]:
    """How many waits slept before each of the polls, all of which are in vain."""
    pauses = []
    for _ in range(num_failures):
        pauses.append(1)
        while not sleep(machine, polling, [1])[0]:
            pauses[-1] += 1
        assert polling.try_polling() == []
    return pauses


def test_where_others_keep_the_core_each_failure_doubles_the_pause_and_each_success_halves_it(machine: Machine) -> None:
    polling = polling_now(machine)
    machine.turn_ns = LONG_TURN_NS + 1
    assert polling.try_polling() == []
    assert pauses_of(machine, polling, 12) == [min(2 * MIN_PAUSE << number, MAX_PAUSE) for number in range(12)]
    sleep(machine, polling, [1] * MAX_PAUSE)
    machine.comes_ns = 0
    for _ in range((MAX_PAUSE // MIN_PAUSE).bit_length()):
        assert polling.try_polling() == READY
    machine.comes_ns = 1 << 60
    assert polling.try_polling() == []
    assert pauses_of(machine, polling, 1) == [2 * MIN_PAUSE]


def test_two_ends_that_sleep_come_back_to_polling_soon(machine: Machine) -> None:
    """Each waits for the other's wake-up while both sleep, which is longer than most waits that poll."""
    polling = polling_now(machine)
    for _ in range(20):  # the peer's vCPU was not there
        waits(machine, polling, [2 * LIMIT_NS])
        found = waits(machine, polling, [600_000] * 2 * NUM_TO_LEARN)
        assert found[-1] == "polls"
    assert polling.is_worth_it


# ---------------------------------------------------------------- who may poll at all


@pytest.mark.parametrize(
    ("text", "has_quota", "expected"), [("auto", False, True), ("auto", True, False), ("off", False, False)]
)
def test_who_may_poll(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, text: str, has_quota: bool, expected: bool
) -> None:
    monkeypatch.setenv(POLLING_VARIABLE, text)
    monkeypatch.setattr(polling_and_signals, "_has_quota", lambda: has_quota)
    assert may_poll() is expected
    assert sleep(machine, BriefPolling(machine.poll, may_poll()), [1] * NUM_TO_LEARN)[-1] is expected


def test_a_value_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POLLING_VARIABLE, "on")
    with pytest.raises(ConfigError, match="RPCDIST_POLLING must be 'auto' or 'off', but it is 'on'"):
        may_poll()


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/", {"cpu.max": "max 100000"}, False),
        ("0::/", {"cpu.max": "150000 100000"}, True),
        ("0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, True),
        ("0::/a", {"b/cpu.max": "50000 100000"}, False),
        ("3:cpuset:/\n1:cpu,cpuacct:/pod", {"cpu/pod/cpu.cfs_quota_us": "-1"}, False),
        ("1:cpu,cpuacct:/pod/x", {"cpu/pod/cpu.cfs_quota_us": "20000", "cpu/pod/x/cpu.cfs_quota_us": "-1"}, True),
        ("2:cpuset:/pod", {"cpu/pod/cpu.cfs_quota_us": "20000"}, False),
        ("0::/", {"cpu.max": ""}, False),
        ("nonsense", {}, False),
    ],
)
def test_a_limit_of_processor_time(tmp_path: Path, groups: str, limits: dict[str, str], expected: bool) -> None:
    (tmp_path / "groups").write_text(groups)
    for name, text in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert has_processor_quota(tmp_path / "groups", tmp_path) is expected


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert not has_processor_quota(tmp_path / "missing", tmp_path)
