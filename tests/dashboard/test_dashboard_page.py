"""The page of a job: its admission, its data, and its appearance in a browser."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import headless_browser
import pytest
import uvicorn
from dashboard_facts import channel, facts, served
from headless_browser import Browser

from rpcdist._dashboard import page_server
from rpcdist._dashboard.job_watch import JobWatch, ask
from rpcdist._dashboard.page_server import MAX_CONNECTIONS, cookie_of, few_connections, make_page_server
from rpcdist._inspect.asking import Asker
from rpcdist.errors import ConnectFailed
from rpcdist.inspection import ActorFacts, CurveFacts, LiveNotes, LogLine, SilentWorker, SpanFacts, WorkerFacts
from rpcdist.inspection.facts import JobFacts

TOKEN = "the-token-of-this-page"
LIMIT_S = 30.0
PAGE = "/?token=" + TOKEN


class MadeUpJob(Asker):
    """Answers as an `Asker` does, and counts how often it is asked."""

    def __init__(self, *workers: WorkerFacts, silent: tuple[SilentWorker, ...] = ()) -> None:
        self.workers = workers
        self.silent = silent
        self.asked: list[str] = []
        self.gone: set[str] = set()

    def job_at(self, address: str) -> JobFacts:
        self.asked.append(address)
        if address in self.gone:
            raise ConnectFailed(address, "nobody listens", 1.0)
        return JobFacts("default/1", self.workers, self.silent)

    def facts_at(self, address: str) -> WorkerFacts:
        return next(facts for facts in self.workers if facts.address == address)


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


async def get(app: Any, target: str, cookie: str = "") -> Answer:
    """The answer to one request of a browser."""
    path, _, query = target.partition("?")
    headers = [(b"cookie", f"{cookie_of(TOKEN)}={cookie}".encode())] if cookie else []
    scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": headers}
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async with asyncio.timeout(LIMIT_S):
        await app(scope, receive, send)
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    text = b"".join([message.get("body", b"") for message in sent[1:]]).decode()
    return Answer(sent[0]["status"], found, text)


def page_of(job: MadeUpJob) -> Any:
    return make_page_server(JobWatch(job, "127.0.0.1:2000", 0.01), TOKEN)


PATHS = ["/", "/page.js", "/page.css", "/plotly.js", "/events", "/worker?name=worker0", "/nothing"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("given", ["", "token=", "token=wrong", "token=%ff"])
async def test_nobody_gets_in_without_the_token(path: str, given: str) -> None:
    job = MadeUpJob(facts())
    answer = await get(page_of(job), path + ("&" if "?" in path else "?") + given, "wrong")
    assert answer.status == 403
    assert "needs its token" in answer.text and TOKEN not in answer.text and not job.asked


async def test_the_token_leaves_the_address() -> None:
    app = page_of(MadeUpJob(facts()))
    came = await get(app, PAGE)
    assert came.status == 303 and came.headers["location"] == "/"
    assert "httponly" in came.headers["set-cookie"].lower() and "samesite=strict" in came.headers["set-cookie"].lower()
    page = await get(app, "/", TOKEN)
    assert page.status == 200 and TOKEN not in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    assert len((await get(app, "/plotly.js", TOKEN)).text) > 1_000_000


async def read_events(app: Any, count: int, between: Any = None) -> list[Any]:
    """The first events that a browser gets."""
    found: list[Any] = []
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        body = message.get("body", b"")
        if body.startswith(b"data: "):
            found.append(json.loads(body[6:]))
            if between is not None:
                between()
            if len(found) == count:
                gone.set()

    cookie = [(b"cookie", f"{cookie_of(TOKEN)}={TOKEN}".encode())]
    scope = {"type": "http", "method": "GET", "path": "/events", "query_string": b"", "headers": cookie}
    async with asyncio.timeout(LIMIT_S):
        await app(scope, receive, send)
    return found


async def test_a_browser_gets_each_answer_and_the_job_is_queried_while_somebody_watches() -> None:
    job = MadeUpJob(facts(num_served=5), facts("worker1"))
    watch = JobWatch(job, "127.0.0.1:2000", 0.01)
    app = make_page_server(watch, TOKEN)
    async with app.router.lifespan_context(app):
        assert not job.asked

        def serve_more() -> None:
            job.workers = (replace(job.workers[0], num_served=job.workers[0].num_served + 7), job.workers[1])

        found = await read_events(app, 3, serve_more)
        assert [row["name"] for row in found[-1]["workers"]] == ["worker0", "worker1"]
        assert found[-1]["workers"][0]["num_served"] > found[0]["workers"][0]["num_served"]
        assert watch.num_viewers == 0
        asked = len(job.asked)
        await asyncio.sleep(0.2)  # twenty periods
        assert len(job.asked) <= asked + 1  # a query that had begun


async def test_an_answer_has_an_end_when_the_server_ends() -> None:
    """Otherwise the server logs an error about each browser that shows the page."""
    is_ending = False
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal is_ending
        sent.append(message)
        is_ending = len(sent) >= 3

    app = make_page_server(JobWatch(MadeUpJob(facts()), "127.0.0.1:2000", 0.01), TOKEN, lambda: is_ending)
    cookie = [(b"cookie", f"{cookie_of(TOKEN)}={TOKEN}".encode())]
    scope = {"type": "http", "method": "GET", "path": "/events", "query_string": b"", "headers": cookie}
    async with app.router.lifespan_context(app), asyncio.timeout(LIMIT_S):
        await app(scope, receive, send)
    assert len(sent) >= 4 and not sent[-1].get("more_body") and all(one.get("more_body") for one in sent[1:-1])


async def test_so_many_browsers_and_no_more() -> None:
    watch = JobWatch(MadeUpJob(facts()), "127.0.0.1:2000", 0.01)
    for _ in range(page_server.MAX_VIEWERS):
        watch.enter()
    answer = await get(make_page_server(watch, TOKEN), "/events", TOKEN)
    assert answer.status == 503 and "20 browsers already show this job" in answer.text


async def test_two_pages_of_one_host_have_cookies_of_their_own() -> None:
    """Browsers send the cookies of all ports of a host: the second page took the place of the first one's."""
    app = page_of(MadeUpJob(facts()))
    other = f"{cookie_of('another-token')}=another-token"
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b""}
    headers = [(b"cookie", f"{other}; {cookie_of(TOKEN)}={TOKEN}".encode())]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app({**scope, "headers": headers}, receive, send)
    assert sent[0]["status"] == 200
    assert cookie_of(TOKEN) != cookie_of("another-token")


async def test_a_query_that_fails_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MadeUpJob):
        def job_at(self, address: str) -> JobFacts:
            raise ZeroDivisionError("of the asker")

    app = make_page_server(JobWatch(Broken(), "127.0.0.1:2000", 0.01), TOKEN)
    async with app.router.lifespan_context(app):
        found = await read_events(app, 2)
    assert found[-1]["error"] == "the query of the job failed: of the asker"
    assert "the query of the job failed" in caplog.text


def test_another_worker_is_asked_when_the_first_is_gone() -> None:
    job = MadeUpJob(facts(), facts("worker1"))
    job.gone = {"127.0.0.1:2000"}
    assert ask(job, ["127.0.0.1:2000", "127.0.0.1:2001"]).workers == job.workers
    assert job.asked == ["127.0.0.1:2000", "127.0.0.1:2001"]
    job.gone.add("127.0.0.1:2001")
    assert "nobody listens" in ask(job, ["127.0.0.1:2000", "127.0.0.1:2001"]).error


@contextmanager
def served_page(job: MadeUpJob) -> Iterator[str]:
    """The address of a page that a server of this process serves on loopback."""
    app = make_page_server(JobWatch(job, "127.0.0.1:2000", 0.2), TOKEN)
    options: dict[str, Any] = {"port": 0, "log_level": "error", "timeout_graceful_shutdown": 1}
    server = uvicorn.Server(uvicorn.Config(app, http=few_connections(), **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = threading.Event()
        for _ in range(int(LIMIT_S * 20)):
            if server.started:
                break
            deadline.wait(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}{PAGE}"
    finally:
        server.should_exit = True
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_silent_connections_are_few_and_the_page_is_served() -> None:
    """Each took a descriptor for as long as it liked, until the page had none for a browser."""
    with served_page(MadeUpJob(facts())) as address, ExitStack() as held:
        port = int(address.split(":")[2].split("/")[0])
        silent = [
            held.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT_S))
            for _ in range(MAX_CONNECTIONS + 30)
        ]
        for connection in silent[:30]:
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)) as browser:
            browser.request("GET", PAGE)
            assert browser.getresponse().status == 303
        silent[-1].settimeout(0)
        with pytest.raises(BlockingIOError):  # the newest ones stay
            silent[-1].recv(1)


NASTY = "<img src=x onerror=\"document.title='broken in'\">"
NOTES = LiveNotes(
    (LogLine(1, 1e9, "ERROR", NASTY, NASTY), LogLine(2, 1e9, "INFO", "program", "epoch 1")),
    (
        SpanFacts(3, "pipeline", "0F0 of step 1", 1e9, 1e9 + 1),
        SpanFacts(4, "pipeline", f"{NASTY} of step 1", 1e9 + 1, 1e9 + 3),
        SpanFacts(5, "backward", f"{NASTY} of pass 1", 1e9, 1e9 + 1),
        SpanFacts(6, "DDP buckets", "bucket 0, 8 B", 1e9, 1e9 + 2),
        SpanFacts(7, "group 0", NASTY, 1e9, 1e9 + 2),
        SpanFacts(8, "DDP", "gradients 1", 1e9, 1e9 + 1),
        SpanFacts(9, "DDP", "iteration 1", 1e9, 1e9 + 2),
    ),
)
browser_test = pytest.mark.skipif(headless_browser.CHROMIUM is None, reason="Chromium is not installed")


@browser_test
def test_the_workers_of_a_busy_job_fit_on_a_desk() -> None:
    """With a value in each column, none has to be scrolled to."""
    numbers = (
        "served_rate: 12345, made_rate: 12345, latency_s: 0.1234, serving: 1234, calls: 1234, oldest_s: 7000, "
        "sent_rate: 999e6, received_rate: 999e6, memory_bytes: 99.9e9, queued: 1234, references: 12345, passes: 12, "
        "operations: 123, lent_bytes: 999e6, refused: 12, role: 'trainer', name: 'trainer12', host: 'node-0017', "
        "pid: 1234567, pool: {running: 100, threads: 128}"
    )
    with served_page(MadeUpJob(facts())) as url, Browser(1200, 900) as browser:
        browser.open(url)
        browser.wait_until("document.querySelectorAll('#workers tbody tr').length === 1")
        fits = browser.evaluate(
            f"""(() => {{
                view.workers = [{{...view.workers[0], {numbers}}}];
                drawWorkers();
                const row = document.querySelector('#workers tbody tr');
                const around = document.querySelector('#workers').parentElement;
                return [row.cells.length, around.scrollWidth - around.clientWidth, row.textContent];
            }})()"""
        )
        assert fits[0] > 15 and fits[1] == 0, fits


@browser_test
@pytest.mark.parametrize(("width", "is_dark"), [(1300, False), (390, True)], ids=["desk", "phone"])
def test_a_browser_shows_the_job(tmp_path: Path, width: int, is_dark: bool) -> None:
    """Also on a phone and in the dark, and what workers call themselves does nothing."""
    silent = SilentWorker("worker2", "127.0.0.1:2002", "stopped", "it was stopped by a signal", "stack of it")
    job = MadeUpJob(
        facts(
            channels=(channel("s", 5000),),
            calls_served=(served(NASTY, 3.0),),
            actors=(ActorFacts("0.1", "add", 2.0, 4, NASTY, 1),),
            memory_bytes=300 << 20,
            curves=(CurveFacts("loss", ((1e9, 2.0),)), CurveFacts(NASTY, ((1e9, 3.0),))),
            notes=NOTES,
        ),
        facts("worker1", role=NASTY),
        silent=(silent,),
    )
    with served_page(job) as url, Browser(width, 900, is_dark) as browser:
        browser.open(url)
        browser.wait_until("document.querySelectorAll('#workers tbody tr').length === 3")
        browser.wait_until(
            "view.totals.time_s.length > 2 && document.querySelectorAll('#calls .scatterlayer path').length > 0"
        )
        assert browser.evaluate("document.title") == "rpcdist" and browser.evaluate("location.search") == ""
        assert browser.evaluate("document.querySelector('#status').textContent") == "a worker is silent"
        assert NASTY in browser.evaluate("document.querySelector('#functions').textContent")
        assert NASTY in browser.evaluate("document.querySelector('#actors').textContent")
        assert "300 MiB" in browser.evaluate("document.querySelector('#workers').textContent")
        assert browser.evaluate("!document.querySelector('#curves-section').hidden")
        assert NASTY in browser.evaluate("document.querySelector('#curves .legend').textContent")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(18, 22, 29)") == is_dark
        for timeline, bars in (("pipeline", 2), ("backward", 1), ("ddp", 3)):
            browser.wait_until(f"document.querySelectorAll('#{timeline} .bars .point').length === {bars}")
        assert "50 % of the time" in browser.evaluate("document.querySelector('#ddp-section h2').textContent")
        assert NASTY in browser.evaluate("document.querySelector('#backward .legend').textContent")
        assert NASTY in browser.evaluate("document.querySelector('#log').textContent")
        browser.evaluate("document.querySelector('#log-filter').value = 'epoch'; drawLog()")
        assert browser.evaluate("[...document.querySelectorAll('#log tr')].map(row => row.cells[3].textContent)") == [
            "program: epoch 1"
        ]
        browser.evaluate("showWorker('worker0')")
        browser.wait_until("document.querySelector('#worker-facts').textContent.includes('running, 3.0 s')")
        browser.evaluate("showWorker('worker2')")
        browser.wait_until("document.querySelector('#worker-facts').textContent.includes('stack of it')")
        browser.save_picture(tmp_path / "page.png")
        job.gone = {"127.0.0.1:2000", "127.0.0.1:2001", "127.0.0.1:2002"}
        browser.wait_until("document.querySelector('#status').textContent === 'no answer'")
