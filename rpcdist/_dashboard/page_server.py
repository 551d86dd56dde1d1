"""The web page of a job: one page, fed by server-sent events, for browsers that have its token."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import importlib.resources
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any, Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rpcdist._dashboard.job_watch import JobWatch
from rpcdist.inspection import facts_to_json
from rpcdist.own_shortage import keep_newest
from rpcdist.time_limits import LIVE_VIEW_PERIOD_S, SLOW_ANSWER_LIMIT_S

MAX_VIEWERS: Final = 20
MAX_CONNECTIONS: Final = 128  # a browser has six; silent ones take a descriptor each, and uvicorn has no limit for them
_TYPES: Final = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_HEADERS: Final = (
    # Plotly draws with `style` attributes, and its images are data URLs.
    (b"content-security-policy", b"default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
)


def make_page_server(watch: JobWatch, token: str, is_ending: Callable[[], bool] = lambda: False) -> Starlette:
    """The application; it queries the job while it runs and a browser has the page open.

    Args:
        watch: queries the job.
        token: admits a browser, as the parameter `token` of the first URL, and in a cookie from then on.
        is_ending: whether the server is shutting down, for which it waits until all responses have ended.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        querying = asyncio.create_task(watch.run())
        try:
            yield
        finally:
            querying.cancel()
            with suppress(asyncio.CancelledError):
                await querying

    async def events(request: Request) -> ASGIApp:
        if watch.num_viewers >= MAX_VIEWERS:
            return PlainTextResponse(f"{MAX_VIEWERS} browsers already show this job: close one\n", 503)
        return _events(watch, is_ending)

    async def worker(request: Request) -> Response:
        name = request.query_params.get("name", "")
        facts = await watch.ask(name)
        if facts is None:
            return PlainTextResponse(f"worker {name[:100]!r} has not answered yet\n", 404)
        return Response(facts_to_json(facts), media_type="application/json")

    routes = [
        Route("/", _file("page.html")),
        Route("/page.js", _file("page.js")),
        Route("/page.css", _file("page.css")),
        Route("/plotly.js", _file("plotly.min.js", "plotly", "package_data", {"Cache-Control": "max-age=86400"})),
        Route("/events", events),
        Route("/worker", worker),
    ]
    return Starlette(routes=routes, lifespan=lifespan, middleware=[Middleware(_check_token, token)])


def few_connections() -> Any:
    """uvicorn's option `http`: its own protocol, but beyond `MAX_CONNECTIONS` the oldest connection is closed."""
    add = keep_newest(MAX_CONNECTIONS)

    def protocol(**options: Any) -> Any:
        made: Any = AutoHTTPProtocol(**options)
        begin = made.connection_made

        def connection_made(transport: asyncio.Transport) -> None:
            add(lambda: not transport.is_closing(), transport.abort)
            begin(transport)

        made.connection_made = connection_made
        return made

    return protocol


def cookie_of(token: str) -> str:
    """The name of the cookie in which a browser keeps a token."""
    return f"rpcdist-{hashlib.sha256(token.encode()).hexdigest()[:12]}"


def _check_token(app: ASGIApp, token: str) -> ASGIApp:
    """Rejects requests without the token, and adds the headers that keep other pages out."""
    cookie = cookie_of(token)  # browsers have one cookie jar for all ports of a host

    def is_token(given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), token.encode())

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        request = Request(scope)
        answer: ASGIApp = app
        if is_token(request.query_params.get("token")):
            # Removes the token from the address, which appears in histories and on shared screens.
            answer = redirect = RedirectResponse("/", 303)
            redirect.set_cookie(cookie, token, httponly=True, samesite="strict")
        elif not is_token(request.cookies.get(cookie)):
            text = "This page needs its token: open the address that `python -m rpcdist dashboard` has printed.\n"
            answer = PlainTextResponse(text, 403)
        await answer(scope, receive, send_with_headers)

    return checked


def _events(watch: JobWatch, is_ending: Callable[[], bool]) -> ASGIApp:
    """The response that sends the view of the job, now and after each query, until the browser disconnects."""

    async def write(send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        seen = 0
        while not is_ending():
            queries = await watch.next_query(seen, LIVE_VIEW_PERIOD_S)
            if queries > seen:
                text = f"data: {json.dumps(watch.history.view(), separators=(',', ':'))}\n\n"
            else:
                text = ": the job has not answered yet\n\n"
            seen = queries
            async with asyncio.timeout(SLOW_ANSWER_LIMIT_S):
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body"})  # the server logs an error for responses without an end

    async def respond(_: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(write(send))
        leaving = asyncio.create_task(_until_gone(receive))
        watch.enter()
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.leave()
            for task in (writing, leaving):
                task.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)

    return respond


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _file(
    name: str, package: str = "rpcdist._dashboard", folder: str = "page", headers: Mapping[str, str] | None = None
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Response(_read(package, folder, name), media_type=_TYPES[name.rpartition(".")[2]], headers=headers)

    return answer


@cache
def _read(package: str, folder: str, name: str) -> bytes:
    return (importlib.resources.files(package) / folder / name).read_bytes()
