"""The pure parts of `rpcdist.launch`: the first failure, reports cut anywhere, and places read from the environment."""

from __future__ import annotations

import pytest

from rpcdist import Placement, placement_from_environment
from rpcdist._launch.progress import Failed, Late, Outcome, Progress, Stuck
from rpcdist._launch.reports import (
    Exited,
    ProcessEnded,
    Raised,
    Ready,
    Report,
    Returned,
    frame,
    report_of_exception,
    take_reports,
)
from rpcdist.errors import ConfigError, RankLost

CAUSE_LIMIT_S, EXIT_LIMIT_S = 1.0, 60.0
Event = tuple[float, int, Report | int | None]  # when, which rank, and its report, or its return code


def outcome_of(events: list[Event], now: float, world_size: int = 2, deadline: float = 100.0) -> Outcome | None:
    progress = Progress(range(world_size), deadline, CAUSE_LIMIT_S, EXIT_LIMIT_S)
    progress.to_start(0.0)
    for moment, rank, what in events:
        alive_at = max((earlier for earlier, *_ in events if earlier < moment), default=0.0)
        if isinstance(what, (int, type(None))):
            progress.take(rank, ProcessEnded(what, alive_at), moment)
        else:
            progress.take(rank, what, moment)
    return progress.outcome(now)


def raised(moment: float, may_be_consequence: bool = False) -> Raised:
    return Raised("ValueError", "traceback", may_be_consequence, moment)


DONE = Returned(b"")
LOST = raised(1.0, may_be_consequence=True)


@pytest.mark.parametrize(
    ("events", "now", "expected"),
    [
        # success
        ([], 0.0, None),
        ([(1.0, 0, Returned(b"a")), (1.0, 1, Returned(b"b")), (2.0, 0, 0)], 2.0, None),
        ([(1.0, 1, Returned(b"b")), (1.0, 0, Returned(b"a")), (2.0, 0, 0), (2.0, 1, 0)], 2.0, (b"a", b"b")),
        # the moment of the failure counts, not that of its arrival
        ([(1.0, 0, raised(1.0))], 1.0, Failed(0, raised(1.0))),
        ([(3.0, 0, raised(2.0)), (3.0, 1, raised(1.0))], 3.0, Failed(1, raised(1.0))),
        ([(3.0, 0, Exited(2, 2.0)), (3.0, 1, raised(1.0))], 3.0, Failed(1, raised(1.0))),
        # a loss waits for its cause, for a while, and only while there can be one
        ([(1.0, 0, LOST)], 1.9, None),
        ([(1.0, 0, LOST)], 2.0, Failed(0, LOST)),
        ([(1.0, 0, LOST), (1.5, 1, raised(1.5))], 1.5, Failed(1, raised(1.5))),
        ([(1.0, 0, LOST), (1.5, 1, DONE)], 1.5, Failed(0, LOST)),
        # a process that vanished comes before what was seen together with it
        ([(1.0, 0, raised(0.9)), (1.0, 1, -9)], 1.0, Failed(1, ProcessEnded(-9, 0.0))),
        ([(0.5, 0, DONE), (1.0, 0, 0), (1.0, 1, raised(0.4))], 1.0, Failed(1, raised(0.4))),
        # ends without a report, and after one
        ([(1.0, 0, 3)], 1.0, Failed(0, ProcessEnded(3, 0.0))),
        ([(1.0, 0, 0)], 1.0, Failed(0, ProcessEnded(0, 0.0))),
        ([(1.0, 0, None)], 1.0, Failed(0, ProcessEnded(None, 0.0))),
        ([(1.0, 0, DONE), (2.0, 0, -6)], 2.0, Failed(0, ProcessEnded(-6, 1.0, has_returned=True))),
        ([(1.0, 0, raised(1.0)), (2.0, 0, 1)], 2.0, Failed(0, raised(1.0))),
        # limits
        ([(1.0, 0, DONE), (2.0, 0, 0)], 100.0, Late((1,))),
        ([(1.0, 0, DONE)], 61.0, Stuck(0)),
        ([(1.0, 0, DONE), (2.0, 0, 0)], 61.0, None),
    ],
)
def test_outcomes(events: list[Event], now: float, expected: Outcome | None) -> None:
    assert outcome_of(events, now) == expected


def test_the_next_deadline_is_the_earliest() -> None:
    progress = Progress(range(3), 100.0, CAUSE_LIMIT_S, EXIT_LIMIT_S)
    assert progress.next_deadline() == float("-inf")
    assert progress.to_start(0.0) == [(0, 0), (1, 0), (2, 0)]
    assert progress.next_deadline() == 100.0
    progress.take(0, DONE, 2.0)
    assert progress.next_deadline() == 62.0
    progress.take(0, ProcessEnded(0, 2.0), 3.0)
    assert progress.next_deadline() == 100.0
    progress.take(1, LOST, 4.0)
    assert progress.next_deadline() == 5.0


@pytest.mark.parametrize("cut", [1, 3, 8, 9, 1000])
def test_a_report_arrives_in_parts_of_any_size(cut: int) -> None:
    reports: list[Ready | Report] = [Ready(), Returned(bytes(100))]
    received, data = bytearray(), b"".join(map(frame, reports))
    parts = [data[start : start + cut] for start in range(0, len(data), cut)]
    arrived = []
    for part in parts:
        received += part
        arrived.append(take_reports(received))
    assert [report for complete in arrived for report in complete] == reports
    assert arrived[-1][-1] == reports[-1]


def test_reports_of_exceptions() -> None:
    assert isinstance(report_of_exception(SystemExit()), Returned)
    assert isinstance(report_of_exception(SystemExit(0)), Returned)
    text = report_of_exception(SystemExit("text"))
    assert isinstance(text, Exited) and text.code == "text"
    for error, may_be_consequence in ((ValueError("v"), False), (RankLost("op", "gone"), True), (TimeoutError(), True)):
        report = report_of_exception(error)
        assert isinstance(report, Raised) and report.may_be_consequence is may_be_consequence


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Placement(1, 2)),
        ({"RANK": "1"}, "RANK='1' and WORLD_SIZE=None in the environment"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' and WORLD_SIZE='2' in the environment"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 in the environment is not from 0 to 1"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "RANK=None"),
    ],
)
def test_the_place_that_a_launcher_gave(
    variables: dict[str, str], expected: Placement | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            placement_from_environment()
    else:
        assert placement_from_environment() == expected
