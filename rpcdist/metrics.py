"""Metrics of a worker, for Prometheus and OpenTelemetry: calls, bytes, queues, references, losses, collectives.

    RPCDIST_METRICS=9464 python train.py        # http://127.0.0.1:9464/metrics, from `init_rpc` on

    from rpcdist import metrics
    metrics.serve("127.0.0.1:9464-9471")        # the same from a program; the first free port of the range
    metrics.export_to_opentelemetry()           # into the meter provider of the program

Names and units follow OpenTelemetry's conventions for RPC. Nothing is counted before one of these is used. The page
docs/metrics.md lists the metrics; `families` returns them as data.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from rpcdist._counters import (
    BUCKET_BOUNDS,
    METRICS_VARIABLE,
    Family,
    Histogram,
    Histograms,
    Kind,
    TrainingCounts,
    call_histograms,
    training,
)
from rpcdist.collectives._group.flight_records import FlightRecorder, Record
from rpcdist.collectives._group.world import current_world
from rpcdist.errors import ConfigError, TransportError, raised_as
from rpcdist.own_shortage import keep_newest, names_shortage
from rpcdist.rpc._agent import Agent
from rpcdist.rpc._current import agent_or_none
from rpcdist.time_limits import ANSWER_LIMIT_S
from rpcdist.transport.addresses import PortRange
from rpcdist.transport.node import Node

logger = logging.getLogger(__name__)

__all__ = ["METRICS", "Family", "Histogram", "attach", "export_to_opentelemetry", "families", "serve"]

_LOOPBACK: Final = "127.0.0.1"
_MAX_CONNECTIONS: Final = 16
_SIZES: Final = ((1 << 10, "1 KiB"), (64 << 10, "64 KiB"), (1 << 20, "1 MiB"), (16 << 20, "16 MiB"))
_LARGEST: Final = "more"
_MAX_UNREAD: Final = 10_000  # operations that have not ended; the oldest ones beyond this number are not counted
_FOLDED_FROM: Final = 1024
_ITEM_BYTES: Final = {"float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "bool": 1}

METRICS: Final[Mapping[str, tuple[Kind, str, str]]] = {
    "rpc.client.call.duration": ("histogram", "s", "Calls that this worker made, until their reply or failure."),
    "rpc.server.call.duration": ("histogram", "s", "Calls that this worker served, from arrival to answer."),
    "rpcdist.worker": ("gauge", "{worker}", "This worker: its name and rank; the value is 1."),
    "rpcdist.active_calls": ("gauge", "{call}", "Calls that have not ended."),
    "rpcdist.pool.threads": ("gauge", "{thread}", "Threads that run the calls of others."),
    "rpcdist.pool.queued": ("gauge", "{job}", "Jobs that wait for such a thread."),
    "rpcdist.references.owned": ("gauge", "{reference}", "Values here that remote references hold."),
    "rpcdist.references.shares": ("gauge", "{share}", "Shares of these values that workers have."),
    "rpcdist.autograd.contexts": ("gauge", "{context}", "Open contexts of distributed autograd."),
    "rpcdist.autograd.passes": ("gauge", "{pass}", "Backward passes under way."),
    "rpcdist.workers.lost": ("counter", "{worker}", "Workers that this one declared lost."),
    "rpcdist.workers.replaced": ("counter", "{worker}", "Workers whose place another process has taken."),
    "rpcdist.network.io": ("counter", "By", "Bytes of all sessions, by channel and direction."),
    "rpcdist.sessions": ("gauge", "{session}", "Open sessions, by channel."),
    "rpcdist.queue.messages": ("gauge", "{message}", "Messages that wait to be written."),
    "rpcdist.strangers.refused": ("counter", "{connection}", "Connections that were refused."),
    "rpcdist.collective.duration": ("histogram", "s", "Operations of groups, by the class of their size."),
    "rpcdist.ddp.bucket.wait": ("histogram", "s", "Waits of a rank for a bucket, until it is delivered."),
    "rpcdist.pipeline.bubble": ("gauge", "1", "Part of the last pipeline step in which its workers computed nothing."),
}
"""Each metric's kind, unit by UCUM, and meaning."""

_lock = threading.Lock()
_endpoint: list[str] = []
"""The address at which this process serves its metrics, as the only entry; empty before `serve`."""
_exported: list[Any] = []
"""A dictionary of OpenTelemetry's histograms by name, as the only entry; empty before the export begins."""


class _WorkerCounts:
    """The counts of one agent, from the time at which metrics are requested."""

    def __init__(self, agent: Agent) -> None:
        self.made = call_histograms(False, _observer("rpc.client.call.duration"))
        self.served = call_histograms(True, _observer("rpc.server.call.duration"))
        self.num_lost = self.num_replaced = 0
        agent.caller.calls.ended.add(self.made.note)
        agent.dispatcher.calls.ended.add(self.served.note)
        agent.events.lost.listen(self._lost)
        agent.events.replaced.listen(self._replaced)

    def _lost(self, *_: object) -> None:
        self.num_lost += 1  # on the I/O loop alone

    def _replaced(self, *_: object) -> None:
        self.num_replaced += 1


def _operation_histograms(recorder: FlightRecorder) -> Histograms[Record]:
    """Returns histograms of the operations that a flight recorder notes, by operation, size and error.

    A record is noted when its operation begins, so a record that has not ended waits for the next reading.
    """

    def read(record: Record) -> tuple[tuple[str, ...], float] | None:
        if not record.ended_ns:
            return None
        num_bytes = sum(record.input_sizes or record.output_sizes) * _ITEM_BYTES.get(record.dtype, 8)
        size = next((name for limit, name in _SIZES if num_bytes <= limit), _LARGEST)
        time_s = (record.ended_ns - (record.started_ns or record.queued_ns)) / 1e9
        return (record.operation, size, "" if record.state == "done" else "failed"), max(0.0, time_s)

    histograms = Histograms(read, _FOLDED_FROM, _MAX_UNREAD)
    note = recorder.note

    def note_both(record: Record) -> None:
        note(record)
        histograms.note(record)

    recorder.note = note_both
    return histograms


def attach(agent: Agent | None = None) -> None:
    """Begins to count for a worker, and serves the metrics if `RPCDIST_METRICS` is set; idempotent.

    `init_rpc` and `init_process_group` call this if metrics are requested.

    Args:
        agent: the worker; by default the current one, if there is one.

    Raises:
        ConfigError, TransportError: as `serve`, for the variable `RPCDIST_METRICS`.
    """
    with _lock:
        agent = agent or agent_or_none()
        if agent is not None and agent.counts is None:
            agent.counts = _WorkerCounts(agent)
        process = current_world().process
        if process.counts is None:
            process.counts = _operation_histograms(process.recorder)
        if not training:
            training.append(TrainingCounts(_observe_wait))
    where = os.environ.get(METRICS_VARIABLE)
    if where and not _endpoint:
        serve(where)


def families() -> list[Family]:
    """The metrics of this process as data. Any thread may call it; it takes milliseconds.

    Raises:
        TimeoutError: the I/O loop did not answer within two seconds.
    """
    found: list[Family] = []
    agent = agent_or_none()
    if agent is not None and agent.counts is not None:
        found += [*_of_calls(agent.counts), *_of_worker(agent), *_of_network(agent)]
    operations = current_world().process.counts
    if operations is not None:
        found += _of_operations(operations)
    for counts in training:
        found.append(_family("rpcdist.ddp.bucket.wait", ({}, counts.bucket_waits())))
        found.append(_family("rpcdist.pipeline.bubble", *([] if counts.bubble is None else [({}, counts.bubble)])))
    return found


def _of_calls(counts: _WorkerCounts) -> Iterator[Family]:
    for name, of_side in (("rpc.client.call.duration", counts.made), ("rpc.server.call.duration", counts.served)):
        yield _family(
            name,
            *(
                ({"rpc.system.name": "rpcdist", "rpc.method": function, "error.type": error}, histogram)
                for (function, error), histogram in of_side.histograms().items()
            ),
        )


def _of_worker(agent: Agent) -> Iterator[Family]:
    counts: _WorkerCounts = agent.counts
    stats, info = agent.pool.facts(), agent.get_debug_info()
    yield _family("rpcdist.worker", ({"rpcdist.name": agent.worker_name, "rpcdist.rank": str(agent.worker_id)}, 1))
    yield _family(
        "rpcdist.active_calls",
        ({"rpcdist.side": "client"}, len(agent.caller.calls)),
        ({"rpcdist.side": "server"}, len(agent.dispatcher.calls)),
    )
    states = {"idle": stats.idle, "running": stats.running, "blocked": stats.blocked}
    yield _family("rpcdist.pool.threads", *(({"rpcdist.state": state}, count) for state, count in states.items()))
    yield _family("rpcdist.pool.queued", ({}, stats.queued))
    yield _family("rpcdist.references.owned", ({}, int(info["num_owner_rrefs"])))
    yield _family("rpcdist.references.shares", ({}, int(info["num_forks"])))
    yield _family("rpcdist.autograd.contexts", ({}, int(info["num_autograd_contexts"])))
    yield _family("rpcdist.autograd.passes", ({}, int(info["num_current_backward_passes"])))
    yield _family("rpcdist.workers.lost", ({}, counts.num_lost))
    yield _family("rpcdist.workers.replaced", ({}, counts.num_replaced))


def _of_network(agent: Agent) -> Iterator[Family]:
    node = agent.network
    if not isinstance(node, Node):  # workers of one process, without a network
        return
    traffic, kinds, num_queued = node.run(_traffic(node), ANSWER_LIMIT_S)
    yield _family(
        "rpcdist.network.io",
        *(
            ({"rpcdist.channel": channel, "network.io.direction": direction}, num_bytes)
            for (channel, direction), num_bytes in sorted(traffic.items())
        ),
    )
    yield _family("rpcdist.sessions", *(({"rpcdist.channel": kind}, kinds[kind]) for kind in ("local", "tcp", "grpc")))
    yield _family("rpcdist.queue.messages", ({}, num_queued))
    yield _family("rpcdist.strangers.refused", ({}, node.strangers.refused))


async def _traffic(node: Node) -> tuple[Counter[tuple[str, str]], Counter[str], int]:
    """The bytes of all sessions, the open ones by channel, and the messages that wait there; on the I/O loop."""
    sessions = [*node.sessions, *(link.session for link in node.links)]
    kinds = Counter(session.channel_kind for session in sessions)
    return await node.traffic(), kinds, sum(session.num_queued for session in sessions)


def _of_operations(counts: Histograms[Record]) -> Iterator[Family]:
    found = counts.histograms()
    labels = [
        {"rpcdist.operation": operation, "rpcdist.size": size, "error.type": error} for operation, size, error in found
    ]
    yield _family("rpcdist.collective.duration", *zip(labels, found.values(), strict=True))


def _family(name: str, *samples: tuple[Mapping[str, str], float | Histogram]) -> Family:
    kind, unit, text = METRICS[name]
    return Family(name, kind, unit, text, list(samples))


# ---------------------------------------------------------------------- Prometheus


def serve(address: str) -> str:
    """Serves the metrics of this process over HTTP, for Prometheus; needs `pip install 'rpcdist[metrics]'`.

    Every process that reaches the address can read them without a token: names of functions and workers, counts and
    times. So the default is loopback.

    Args:
        address: "9464", "0.0.0.0:9464", or a range for the workers of one host, such as "9464-9471".

    Returns:
        host:port as bound. A second call returns the result of the first.

    Raises:
        ConfigError: the address is malformed, or the package is missing.
        TransportError: the port is taken, or this process lacks descriptors or threads.
    """
    problem = "metrics over HTTP need prometheus_client: pip install 'rpcdist[metrics]'"
    with raised_as(ConfigError, problem, ImportError):
        from prometheus_client import CollectorRegistry, start_http_server
    host, ports = _parsed(address)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector())
    with _lock:
        if _endpoint:
            return _endpoint[0]

        def bind(port: int) -> int:
            _bound_connections(start_http_server(port, host, registry)[0])
            return port

        try:
            with names_shortage("serving the metrics"):
                _endpoint.append(f"{host}:{ports.bind(bind, METRICS_VARIABLE)}")
        except OSError as exc:
            raise TransportError(
                f"the metrics cannot be served at {address}: {exc.strerror or exc}. Where a host has several workers, "
                f"{METRICS_VARIABLE} is a range of ports, such as '9464-9471'"
            ) from exc
    attach()
    return _endpoint[0]


def _bound_connections(server: Any) -> None:
    start_thread, came = server.process_request, keep_newest(_MAX_CONNECTIONS)

    def process_request(request: socket.socket, address: object) -> None:
        came(lambda: request.fileno() >= 0, partial(request.shutdown, socket.SHUT_RDWR))
        start_thread(request, address)

    def log_failure(_request: socket.socket, address: object) -> None:
        logger.debug("a connection from %s to the metrics failed", address, exc_info=True)

    server.process_request = process_request
    server.handle_error = log_failure  # by default it writes a traceback for each, as many as a stranger likes


def _parsed(address: str) -> tuple[str, PortRange]:
    host, colon, ports = address.rpartition(":")
    return (host.strip("[]") if colon else _LOOPBACK), PortRange.of_text(ports, METRICS_VARIABLE)


class _Collector:
    """Makes the metrics at each scrape, on a thread of prometheus_client."""

    def collect(self) -> Iterator[Any]:
        """The metrics under Prometheus' names."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        for family in families():
            labels = sorted({label for given, _ in family.samples for label in given})
            suffix = {"s": "_seconds", "By": "_bytes"}.get(family.unit, "")
            name = family.name.replace(".", "_") + suffix
            made = kinds[family.kind](name, family.help, labels=[label.replace(".", "_") for label in labels])
            for given, value in family.samples:
                values = [given.get(label, "") for label in labels]
                if isinstance(value, Histogram):
                    made.add_metric(values, list(_buckets(value)), value.total_s)
                else:
                    made.add_metric(values, value)
            yield made


def _buckets(histogram: Histogram) -> Iterator[tuple[str, float]]:
    """Upper bounds, and the number of times below each of them."""
    below = 0
    for bound, count in zip((*BUCKET_BOUNDS, float("inf")), histogram.counts, strict=True):
        below += count
        yield ("+Inf" if bound == float("inf") else repr(bound)), below


# ---------------------------------------------------------------------- OpenTelemetry


def export_to_opentelemetry(meter_provider: Any = None) -> None:
    """Exports the metrics of this process to OpenTelemetry; needs `pip install 'rpcdist[otel]'` and an SDK.

    Durations of calls are recorded in groups of 64, and before each export; all other metrics are read when the SDK
    collects them. A second call does nothing. Call it before `init_rpc`, so that no call is missed.

    Args:
        meter_provider: the meter provider of the SDK; by default the global one.
    Raises:
        ConfigError: the package `opentelemetry-api` is missing.
    """
    with raised_as(ConfigError, "this needs opentelemetry-api: pip install 'rpcdist[otel]'", ImportError):
        from opentelemetry import metrics as api
    with _lock:
        if _exported:
            return
        meter = api.get_meter("rpcdist", meter_provider=meter_provider)
        recorded: dict[str, Any] = {}
        for name, (kind, unit, text) in METRICS.items():
            if name.startswith("rpc.") or name == "rpcdist.ddp.bucket.wait":
                advice = list(BUCKET_BOUNDS)
                recorded[name] = meter.create_histogram(name, unit, text, explicit_bucket_boundaries_advisory=advice)
            elif kind == "gauge":
                meter.create_observable_gauge(name, [_callback(api, name)], unit, text)
            elif kind == "counter":
                meter.create_observable_counter(name, [_callback(api, name)], unit, text)
        # Operations are not recorded as they end, and OpenTelemetry has no observable histogram.
        operations = "rpcdist.collective.duration"
        number = _callback(api, operations, lambda histogram: sum(histogram.counts))
        text = METRICS[operations][2]
        meter.create_observable_counter("rpcdist.collective.operations", [number], "{operation}", text)
        time = _callback(api, operations, lambda histogram: histogram.total_s)
        meter.create_observable_counter("rpcdist.collective.time", [time], "s", text)
        _exported.append(recorded)
    attach()


def _callback(
    api: Any, name: str, value_of: Callable[[Histogram], float] = lambda histogram: histogram.total_s
) -> Callable[[Any], Iterable[Any]]:
    """The function that OpenTelemetry calls for one instrument when it collects."""

    def observe(_options: Any) -> Iterator[Any]:
        for family in families():
            if family.name == name:
                for labels, value in family.samples:
                    yield api.Observation(value_of(value) if isinstance(value, Histogram) else value, dict(labels))

    return observe


def _observer(name: str) -> Callable[[str, str, float], None]:
    """Returns a function that records a call's duration with OpenTelemetry, once the export has begun."""

    def observe(function: str, error: str, time_s: float) -> None:
        for recorded in _exported:
            labels = {"rpc.system.name": "rpcdist", "rpc.method": function}
            recorded[name].record(time_s, {**labels, "error.type": error} if error else labels)

    return observe


def _observe_wait(time_s: float) -> None:
    for recorded in _exported:
        recorded["rpcdist.ddp.bucket.wait"].record(time_s)
