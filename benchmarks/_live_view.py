"""The costs of the page of a job for its many workers, and how soon the page shows a change."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from rpcdist import rpc
from rpcdist._counters import publish
from rpcdist._dashboard.job_watch import JobWatch
from rpcdist._dashboard.page_server import cookie_of, make_page_server
from rpcdist._inspect.asking import Asker
from rpcdist.rpc._current import current_agent
from rpcdist.testing import InProcessCluster, in_process_cluster
from rpcdist.time_limits import LIVE_VIEW_PERIOD_S

__all__ = ["LiveView", "measure_live_view"]

TOKEN = "of-this-benchmark"
NUM_UPDATES = 40


class LiveView(NamedTuple):
    """The measurements.

    Attributes:
        late_s, latest_s: the time from a number that a worker publishes until the browser has it: what nine of ten do
            not exceed, and the longest.
        coordinator: processor time of the coordinator for its answers, as a part of a core.
        all_workers: the same of all workers together.
        page: processor time of the process without the answers: of the page, and of idle workers.
    """

    late_s: float
    latest_s: float
    coordinator: float
    all_workers: float
    page: float


def measure_live_view(num_agents: int) -> LiveView:
    """Starts agents in this process, connected in memory, and looks at their page as a browser does."""
    names = [f"w{number}" for number in range(num_agents)]
    in_process_cluster.MAX_CALLS = num_agents + 8  # each blocks a thread while it joins
    with ExitStack() as stack:
        cluster = stack.enter_context(InProcessCluster(*names, init_timeout=500, peer_timeout=120))
        spent: dict[str, float] = dict.fromkeys(names, 0.0)
        for name in names:
            agent = cluster.run(name, current_agent)
            services = agent.network.services  # type: ignore[attr-defined] # of the network in memory
            services["Inspection", "Look"] = partial(_timed, services["Inspection", "Look"], name, spent)
            if name != names[0]:
                cluster.run(name, rpc.rpc_sync, names[0], int)
        asker = stack.enter_context(Asker(is_live=True))
        asker._node.release()
        asker._node = cluster.network.node("page", 120)  # type: ignore[assignment]
        address = str(cluster.run(names[0], current_agent).network.address)
        return asyncio.run(_watch(asker, address, names[0], spent))


async def _timed(look: Callable[..., Any], name: str, spent: dict[str, float], *arguments: Any) -> Any:
    """An answer, which waits for nothing; its processor time is counted."""
    began = time.thread_time()
    try:
        return await look(*arguments)
    finally:
        spent[name] += time.thread_time() - began


async def _watch(asker: Asker, address: str, coordinator: str, spent: dict[str, float]) -> LiveView:
    watch = JobWatch(asker, address, LIVE_VIEW_PERIOD_S)
    app = make_page_server(watch, TOKEN)
    events: asyncio.Queue[Any] = asyncio.Queue()

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        if (body := message.get("body", b"")).startswith(b"data: "):
            await events.put(body)

    async def next_view() -> Any:
        return json.loads((await events.get())[6:])

    cookie = [(b"cookie", f"{cookie_of(TOKEN)}={TOKEN}".encode())]
    scope = {"type": "http", "method": "GET", "path": "/events", "query_string": b"", "headers": cookie}
    async with app.router.lifespan_context(app):
        browser = asyncio.create_task(app(scope, receive, send))
        for _ in range(3):  # connects, and begins to note
            view = await next_view()
        assert len([row for row in view["workers"] if row["state"] == "answers"]) == len(spent), view["workers"]
        spent.update(dict.fromkeys(spent, 0.0))
        began, began_cpu = time.monotonic(), time.process_time()
        times_s: list[float] = []
        for number in range(NUM_UPDATES):
            await asyncio.sleep(number / NUM_UPDATES * LIVE_VIEW_PERIOD_S)  # at all times between two queries
            publish("update", number)
            published = time.monotonic()
            while view["curves"].get(f"{coordinator}: update", [[0, -1]])[-1][1] != number:
                view = await next_view()
            times_s.append(time.monotonic() - published)
        passed_s, cpu_s = time.monotonic() - began, time.process_time() - began_cpu
        browser.cancel()
        await asyncio.gather(browser, return_exceptions=True)
    answers_s = sum(spent.values())
    late_s = sorted(times_s)[NUM_UPDATES * 9 // 10 - 1]
    parts = (spent[coordinator], answers_s, cpu_s - answers_s)
    return LiveView(late_s, max(times_s), *[part / passed_s for part in parts])
