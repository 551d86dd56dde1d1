"""A live view of a job's workers in the terminal: a sortable table, and a page for each worker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from rpcdist._dashboard.job_watch import JobWatch
from rpcdist._inspect.asking import Asker
from rpcdist.inspection import WorkerFacts, printable_lines
from rpcdist.time_limits import LIVE_VIEW_PERIOD_S

COLUMNS: Final = (
    ("name", "worker"), ("role", "role"), ("state", "state"), ("served_rate", "served/s"), ("made_rate", "made/s"),
    ("latency_s", "latency"), ("serving", "serving"), ("calls", "waits for"), ("oldest_s", "oldest s"),
    ("sent_rate", "sent/s"), ("received_rate", "received/s"), ("memory_bytes", "memory"), ("queued", "queue"),
    ("references", "refs"), ("passes", "passes"), ("host", "host"),
)  # fmt: skip
_MAX_FRAMES: Final = 12


class _WorkerPage(Screen[None]):
    """The facts of one worker; each query updates them."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "app.pop_screen", "back"), ("q", "app.quit", "quit")]

    def __init__(self, worker: str) -> None:
        super().__init__()
        self.worker = worker

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static("", id="facts", markup=False)
        yield Footer()

    def show(self, row: Mapping[str, Any] | None, facts: WorkerFacts | None) -> None:
        for text in self.query("#facts").results(Static):  # none while the page is made, or closed
            text.update(text_of_worker(self.worker, row, facts))


class Top(App[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "quit"),
        ("s", "sort", "sort by the next column"),
        ("r", "reverse", "reverse"),
    ]
    CSS = "#head { height: auto; padding: 0 1; } #waits { height: auto; max-height: 8; padding: 0 1; color: $warning; }"

    def __init__(self, asker: Asker, address: str, period_s: float) -> None:
        super().__init__()
        self.watch_job = JobWatch(asker, address, period_s)
        self._sort_by = 0
        self._down = False

    def compose(self) -> ComposeResult:
        yield Static("no answer yet", id="head", markup=False)
        yield Static("", id="waits", markup=False)
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        table = self.query_one(DataTable)
        for key, label in COLUMNS:
            table.add_column(label, key=key)
        self.follow()

    @work(exclusive=True)
    async def follow(self) -> None:
        self.watch_job.enter()
        querying = asyncio.create_task(self.watch_job.run())
        seen = 0
        try:
            while True:
                seen = await self.watch_job.next_query(seen, LIVE_VIEW_PERIOD_S)
                if querying.done():
                    querying.result()  # raises its error
                self.show()
        finally:
            querying.cancel()

    def show(self) -> None:
        view = self.watch_job.history.view()
        rows = {row["name"]: row for row in view["workers"]}
        if isinstance(self.screen, _WorkerPage):
            name = self.screen.worker
            self.screen.show(rows.get(name), self.watch_job.history.facts_of(name))
            return
        if not self.query("#head"):  # the parts of the screen are not there yet, or are gone since the view is closed
            return
        answering = [row for row in rows.values() if row["state"] == "answers"]
        calls = sum(row["served_rate"] for row in answering)
        state = f"NO ANSWER: {view['error']}" if view["error"] else f"{len(answering)} of {len(rows)} workers answer"
        self.query_one("#head", Static).update(printable_lines(f"job {view['job']}   {state}   {calls:.0f} calls/s"))
        waits = view.get("waits", {"deadlocks": [], "culprits": []})
        lines = [f"DEADLOCK: {text}" for text in waits["deadlocks"]] + [one["text"] for one in waits["culprits"]]
        self.query_one("#waits", Static).update(printable_lines("\n".join(lines[:8])))
        table = self.query_one(DataTable)
        cursor = table.cursor_row
        key = COLUMNS[self._sort_by][0]
        table.clear()
        for row in sorted(rows.values(), key=lambda row: _order(row.get(key)), reverse=self._down):
            table.add_row(*[Text(_cell(name, row)) for name, _ in COLUMNS], key=row["name"])
        table.move_cursor(row=min(cursor, max(0, len(rows) - 1)))

    def action_sort(self) -> None:
        self._sort_by = (self._sort_by + 1) % len(COLUMNS)
        self._down = self._sort_by > 2
        self.show()

    def action_reverse(self) -> None:
        self._down = not self._down
        self.show()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        self._down = not self._down if self._sort_by == event.column_index else event.column_index > 2
        self._sort_by = event.column_index
        self.show()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        if event.row_key.value is not None:
            self.push_screen(_WorkerPage(event.row_key.value))
            self.call_after_refresh(self.show)


def text_of_worker(name: str, row: Mapping[str, Any] | None, facts: WorkerFacts | None) -> str:
    if row is None:
        return f"{name} is no longer in the job"
    if row["state"] != "answers" or facts is None:
        return f"{name} does not answer: {row.get('detail', '')}\n\n{row.get('stacks', '')}"
    lines = [f"{name} (rank {facts.id}) at {facts.address}, process {facts.pid} of {facts.host}, {facts.phase}"]
    threads = {thread.id: thread for thread in facts.threads}
    lines += ["", f"serves {len(facts.calls_served)}:"]
    for call in facts.calls_served:
        lines.append(f"  {call.function} for {call.caller}: {call.phase}, {call.age_s:.1f} s")
        thread = threads.get(call.thread) if call.thread is not None else None
        stack = call.stack or (thread.stack if thread is not None else ())
        lines += [f"      {frame.file}:{frame.line} {frame.function}" for frame in stack[-_MAX_FRAMES:]]
    lines += ["", f"waits for {len(facts.calls_made)}:"]
    lines += [f"  {call.function} at {call.to}: {call.phase}, {call.age_s:.1f} s" for call in facts.calls_made]
    lines += ["", "actors:"]
    lines += [
        f"  {one.kind} {one.reference}: {one.running or 'idle'}, {one.num_waiting} wait, {one.num_restarts} restarts"
        for one in facts.actors
    ]
    lines += ["", "connections:"]
    lines += [f"  {one.peer}: {one.kind}{', TLS' if one.tls else ''}, queue {one.num_queued}" for one in facts.channels]
    lines += ["", "limits:"]
    lines += [f"  {one.name}: {one.used} of {one.limit}" for one in facts.limits]
    return printable_lines("\n".join(lines))


def _order(value: Any) -> tuple[bool, Any]:
    return isinstance(value, str), -1 if value is None else value


def _cell(key: str, row: Mapping[str, Any]) -> str:
    value = row.get(key)
    if key == "state" and value == "answers":
        return "in shutdown" if row["phase"] == "leaving" else str(row["phase"])
    if key in ("sent_rate", "received_rate"):
        return "" if value is None else f"{value / 1024:,.0f} KiB"
    if key == "memory_bytes":
        return "" if value is None else f"{value / (1 << 20):,.0f} MiB"
    if key == "latency_s":
        return "" if value is None else f"{value * 1e3:,.3g} ms"
    if isinstance(value, float):
        return f"{value:,.1f}" if value else "0"
    return "" if value is None else printable_lines(str(value)).replace("\n", " ")
