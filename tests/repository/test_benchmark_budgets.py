"""How the benchmarks judge what they measured."""

from __future__ import annotations

import pytest
from _budget_table import BEGIN, END, PAGE, updated
from _budget_table import cells as cells_of
from _cases import Metrics, Row
from _comparison import channel_in_use, head, in_turns, make_line
from _rpc_cases import CASES


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_CHANNELS", "local")


def cells(row: Row, rounds: list[tuple[float, float]]) -> dict[str, str]:
    return dict(zip(head("torch"), make_line(row, rounds), strict=True))


TIME = Row("a call", "", "p50", "us", 1e6, {"local": 0.5, "grpc": 1.5}, stretch=0.25)
RATE = Row("calls", "", "rate", "calls/s", 1, {"local": 2.0}, stretch=3.0, more_is_better=True)
LIMIT = Row("beside load", "", "p99", "ms", 1e3, limits={"local": 10.0, "tcp": 15.0}, stretch=5.0)


@pytest.mark.parametrize(
    ("row", "ours", "torch", "verdict"),
    [
        (TIME, 0.2e-3, 1e-3, "stretch"),
        (TIME, 0.4e-3, 1e-3, "yes"),
        (TIME, 0.6e-3, 1e-3, "NO"),
        (RATE, 3500, 1000, "stretch"),
        (RATE, 2500, 1000, "yes"),
        (RATE, 1500, 1000, "NO"),
        (LIMIT, 4e-3, 1.0, "stretch"),
        (LIMIT, 9e-3, 1e-3, "yes"),  # nothing but our own time counts
        (LIMIT, 11e-3, 1.0, "NO"),
    ],
)
def test_verdicts(row: Row, ours: float, torch: float, verdict: str) -> None:
    assert cells(row, [(ours, torch)] * 3)["ok"] == verdict


@pytest.mark.parametrize(("channel", "budget"), [("auto", "at most 0.5x"), ("grpc", "at most 1.5x"), ("tcp", "")])
def test_each_channel_has_its_own_budget(channel: str, budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_CHANNELS", channel)
    line = cells(TIME, [(1e-3, 1e-3)])
    assert line["budget"] == budget
    assert line["stretch"] == ("0.25x" if channel_in_use() == "local" else "")
    assert bool(line["ok"]) == bool(budget)


def test_two_ways_for_a_call_to_go_are_not_steady() -> None:
    assert cells(TIME, [(1e-3, 1e-3)] * 9 + [(9e-3, 1e-3)])["steady"] == "90%"
    assert cells(TIME, [(1e-3, 1e-3)] * 5 + [(2e-3, 1e-3)] * 6)["steady"] == "55%"


def test_the_median_of_each_side_is_compared() -> None:
    line = cells(TIME, [(1e-6, 10e-6), (2e-6, 4e-6), (9e-6, 3e-6)])
    assert (line["ours"], line["torch"], line["ours/torch"]) == ("2.00", "4.00", "0.50x")
    assert line["in single rounds"] == "0.10 to 3.00"


def test_turns_change_and_pair_up() -> None:
    order: list[str] = []

    def measure(who: str) -> Metrics:
        order.append(who)
        return {who: float(len(order))}

    samples = in_turns(lambda: measure("ours"), lambda: measure("torch"), 3)
    assert order == ["ours", "torch", "torch", "ours", "ours", "torch"]
    assert samples == [({"ours": 1}, {"torch": 2}), ({"ours": 4}, {"torch": 3}), ({"ours": 5}, {"torch": 6})]


# ---- the page


def test_a_column_of_the_page_is_written() -> None:
    table = "| what | size | local | tcp |\n|---|---|---|---|\n| a call |  | 1x | 2x |\n| other |  |  |  |"
    page = f"before\n{BEGIN}\n{table}\n{END}\nafter\n"
    new = updated(page, "local", head("torch"), [make_line(TIME, [(0.6e-3, 1e-3)]), make_line(LIMIT, [(4e-3, 1.0)])])
    assert new.startswith("before\n") and new.endswith(f"{END}\nafter\n")
    rows = [cells_of(line) for line in new.splitlines() if line.startswith("|")]
    assert rows[2:] == [("a call", "", "0.60x, missed", "2x"), ("other", "", "", "")]
    assert updated(new, "local", head("torch"), []) == new


def test_limits_are_shown_in_their_unit() -> None:
    page = f"{BEGIN}\n| what | size | local |\n|---|---|---|\n| beside load |  |  |\n{END}"
    assert "| 4.00 ms" in updated(page, "local", head("torch"), [make_line(LIMIT, [(4e-3, 1.0)])])


@pytest.mark.parametrize("page", ["", f"{BEGIN}\n{END}", f"{BEGIN}\n| what | size |\n|---|---|\n{END}"])
def test_a_page_without_the_column_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="no table of budgets with a column 'local'"):
        updated(page, "local", head("torch"), [])


def test_the_page_has_every_row_and_its_budget() -> None:
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = {row[:2]: row[2:4] for row in (cells_of(line) for line in table.splitlines() if line.startswith("|"))}
    for case in CASES:
        for row in case.rows:
            unit = f" {row.unit}" if row.limits else "x"
            limit = (row.limits or row.ratios).get("local")
            expected = tuple("" if value is None else f"{value:g}{unit}" for value in (limit, row.stretch))
            assert rows[row.what, row.size] == expected
