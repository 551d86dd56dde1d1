"""`python -m rpcdist top`: the table and the page of a worker, without a terminal."""

from __future__ import annotations

from dashboard_facts import facts, served
from test_dashboard_page import MadeUpJob
from textual.widgets import DataTable, Static

from rpcdist._dashboard.top import COLUMNS, Top, text_of_worker
from rpcdist.inspection import FunctionTimes, SilentWorker

ESCAPE = "\N{ESCAPE}[2J"
MARKUP = "[/b][@click=app.quit]x"
"""Ended `top` with an error of the markup, which had no start."""


async def shown(top: Top, pilot: object, queries: int) -> None:
    while top.watch_job.num_queries < queries:
        await top.watch_job.next_query(top.watch_job.num_queries, 10.0)
    await pilot.pause()  # type: ignore[attr-defined]


def row(table: DataTable[object], index: int) -> list[str]:
    return [str(cell) for cell in table.get_row_at(index)]


async def test_the_table_shows_the_workers_and_sorts() -> None:
    silent = SilentWorker("worker2", "127.0.0.1:2002", "stopped", "it was stopped by a signal", "stack of it")
    times = (FunctionTimes("work", True, 3, 0, 0.0025, 0.5),)
    calm = facts(role=ESCAPE + MARKUP, memory_bytes=300 << 20, functions=times)
    job = MadeUpJob(calm, facts("worker1", calls_served=(served("work", 5.0),)), silent=(silent,))
    top = Top(job, "127.0.0.1:2000", 0.05)
    async with top.run_test(size=(160, 40)) as pilot:
        await shown(top, pilot, 2)
        table = top.query_one(DataTable)
        assert [row(table, index)[0] for index in range(3)] == ["worker0", "worker1", "worker2"]
        assert row(table, 0)[1].endswith(f"[2J{MARKUP}") and "\N{ESCAPE}" not in row(table, 0)[1]
        assert "2 of 3 workers answer" in str(top.query_one("#head", Static).render())
        shown_row = dict(zip([key for key, _ in COLUMNS], row(table, 0), strict=True))
        assert (shown_row["memory_bytes"], shown_row["latency_s"]) == ("300 MiB", "2.5 ms")
        oldest = [name for name, _ in COLUMNS].index("oldest_s")
        while top._sort_by != oldest:
            await pilot.press("s")
        assert row(table, 0)[0] == "worker1"
        await pilot.press("r")
        assert row(table, 2)[0] == "worker1"
        table.move_cursor(row=2)
        await pilot.press("enter")
        await shown(top, pilot, top.watch_job.num_queries + 2)
        assert "work for worker1: running, 5.0 s" in str(top.screen.query_one("#facts", Static).render())
        await pilot.press("escape")
        job.gone = {"127.0.0.1:2000", "127.0.0.1:2001"}
        await shown(top, pilot, top.watch_job.num_queries + 2)
        assert "NO ANSWER" in str(top.query_one("#head", Static).render())


async def test_a_query_that_comes_while_the_view_is_closed_does_no_harm() -> None:
    top = Top(MadeUpJob(facts(), facts("worker1")), "127.0.0.1:2000", 0.05)
    async with top.run_test(size=(160, 40)) as pilot:
        await shown(top, pilot, 1)
        await top.screen.remove_children()
        await shown(top, pilot, top.watch_job.num_queries + 2)


def test_text_of_a_worker_that_does_not_answer() -> None:
    row = {"state": "stopped", "detail": "it was stopped by a signal", "stacks": "stack of it"}
    assert "it was stopped by a signal" in text_of_worker("worker2", row, None)
    assert "no longer in the job" in text_of_worker("worker2", None, None)
