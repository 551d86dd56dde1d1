"""Metrics of living workers, as Prometheus and OpenTelemetry read them."""

from __future__ import annotations

import json
import re
import signal
import socket
import struct
import threading
from contextlib import ExitStack

import pytest
from docs_programs import ROOT, page
from metrics_functions import (
    call,
    collect_with_opentelemetry,
    reduce_alone,
    run_pipeline,
    scraped,
    serve_at,
    train_alone,
    what_is_counted,
)

from rpcdist.errors import ConfigError, TransportError
from rpcdist.metrics import METRICS
from rpcdist.testing import Worker, WorkerPool, eventually, free_port

CALLS = 'rpc_{}_call_duration_seconds_count{{error_type="{}",rpc_method="{}",rpc_system_name="rpcdist"}}'
BYTES = 'rpcdist_network_io_bytes_total{{network_io_direction="{}",rpcdist_channel="{}"}}'
NOTHING, FAIL = "metrics_functions:nothing", "metrics_functions:fail"


@pytest.mark.multiproc
@pytest.mark.parametrize(("channels", "channel"), [("auto", "shared memory"), ("tcp", "tcp"), ("grpc", "grpc")])
def test_a_scrape_has_calls_and_bytes_of_both_sides(worker_pool: WorkerPool, channels: str, channel: str) -> None:
    ports = [free_port(), free_port()]
    worker_pool.environment["RPCDIST_CHANNELS"] = channels
    world = worker_pool.new_world(2)
    pending = []
    for rank, port in enumerate(ports):
        worker_pool.environment["RPCDIST_METRICS"] = str(port)
        pending.append(world.begin_join(f"w{rank}", rank))
    for each in pending:
        each.result()
    world["w0"].run(call, "w1", 20)
    caller, callee = (scraped(f"127.0.0.1:{port}") for port in ports)
    assert caller[CALLS.format("client", "", NOTHING)] == 20
    assert caller[CALLS.format("client", "KeyError", FAIL)] == 1
    assert callee[CALLS.format("server", "", NOTHING)] == 20
    assert callee[CALLS.format("server", "KeyError", "_OTHER")] == 1  # a name that has led to no result
    num_bytes = 4 << 20
    assert num_bytes <= caller[BYTES.format("receive", channel)] < 2 * num_bytes
    assert num_bytes <= callee[BYTES.format("transmit", channel)] < 2 * num_bytes
    assert caller['rpcdist_worker{rpcdist_name="w0",rpcdist_rank="0"}'] == 1
    assert caller["rpcdist_workers_lost_total"] == caller["rpcdist_strangers_refused_total"] == 0
    world.shutdown()


@pytest.mark.multiproc
def test_a_lost_worker_is_counted(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("w0", "w1")
    address = world["w0"].run(serve_at, str(free_port()))
    world["w0"].run(call, "w1", 3)
    world["w1"].signal(signal.SIGKILL)
    world["w1"].wait()
    eventually(lambda: scraped(address)["rpcdist_workers_lost_total"] == 1, "the loss is counted")


@pytest.mark.multiproc
def test_nothing_is_counted_before_it_is_asked_for(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("w0", "w1")
    world["w0"].run(call, "w1", 3)
    assert world["w0"].run(what_is_counted) == (False, False)
    address = world["w0"].run(serve_at, str(free_port()))
    assert world["w0"].run(what_is_counted) == (True, True)
    world["w0"].run(call, "w1", 5)
    assert scraped(address)[CALLS.format("client", "", NOTHING)] == 5
    assert world["w0"].run(serve_at, "1") == address  # a second call serves nothing more
    world.shutdown()


@pytest.mark.multiproc
def test_collective_operations_are_counted_by_size(worker_pool: WorkerPool) -> None:
    worker = worker_pool.start("rank0")
    address = worker.run(serve_at, str(free_port()))
    worker.run(reduce_alone, 1500)
    labels = 'error_type="",rpcdist_operation="all_reduce",rpcdist_size="64 KiB"'
    assert scraped(address)[f"rpcdist_collective_duration_seconds_count{{{labels}}}"] == 1500


@pytest.mark.multiproc
def test_waits_for_buckets_and_the_bubble_of_a_pipeline(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("w0", "w1")
    address = world["w0"].run(serve_at, str(free_port()))
    assert "rpcdist_pipeline_bubble" not in scraped(address)
    bubble = world["w0"].run(run_pipeline, ["w0", "w1"])
    assert 0 < bubble < 1 and scraped(address)["rpcdist_pipeline_bubble"] == pytest.approx(bubble)
    world["w0"].run(train_alone, 3)
    found = scraped(address)
    assert found["rpcdist_ddp_bucket_wait_seconds_count"] >= 3
    assert found["rpcdist_ddp_bucket_wait_seconds_sum"] > 0
    world.shutdown()


@pytest.mark.multiproc
def test_opentelemetry_gets_the_same(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("w0", "w1")
    found = world["w0"].run(collect_with_opentelemetry, "w1", 200)
    counts = {
        (labels["rpc.method"], labels.get("error.type")): count
        for labels, count, _ in found["rpc.client.call.duration"]
    }
    assert counts[NOTHING, None] == 200 and counts[FAIL, "KeyError"] == 1
    received = {labels["rpcdist.channel"]: value for labels, _, value in found["rpcdist.network.io"]}
    assert "local" in received
    assert found["rpcdist.ddp.bucket.wait"][0][1] == 1 and 0 < found["rpcdist.pipeline.bubble"][0][2] < 1
    assert {name for name in METRICS if not name.startswith(("rpc.server", "rpcdist.collective"))} <= set(found)
    world.shutdown()


@pytest.mark.multiproc
def test_the_address_is_loopback_unless_told(worker_pool: WorkerPool) -> None:
    worker = worker_pool.start("w0")
    port = free_port()
    assert worker.run(serve_at, str(port)) == f"127.0.0.1:{port}"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.2", port)) != 0  # nothing listens at other addresses of this machine
    everywhere = worker_pool.start("w1")
    port = free_port()
    assert everywhere.run(serve_at, f"0.0.0.0:{port}") == f"0.0.0.0:{port}"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.2", port)) == 0


def serving(worker_pool: WorkerPool) -> tuple[Worker, str, int]:
    """A worker that serves its metrics, the address, and the number of its threads."""
    worker = worker_pool.start("w0")
    address = worker.run(serve_at, str(free_port()))
    return worker, address, worker.run(threading.active_count)


@pytest.mark.multiproc
def test_silent_connections_take_no_thread_each(worker_pool: WorkerPool) -> None:
    """300 of them took 300 threads and descriptors of the worker, for as long as they liked."""
    worker, address, before = serving(worker_pool)
    host, _, port = address.rpartition(":")
    with ExitStack() as held:
        silent = [held.enter_context(socket.create_connection((host, int(port)))) for _ in range(60)]
        for connection in silent[:30]:
            assert connection.recv(1) == b""  # the oldest are ended
        scraped(address)
        eventually(lambda: worker.run(threading.active_count) <= before + 17)
    eventually(lambda: worker.run(threading.active_count) <= before)


@pytest.mark.multiproc
def test_a_connection_that_breaks_writes_no_traceback(worker_pool: WorkerPool) -> None:
    """Any process that reached the port could fill the log of the worker."""
    worker, address, before = serving(worker_pool)
    host, _, port = address.rpartition(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET " + b"/" * 60_000)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no end
    scraped(address)
    eventually(lambda: worker.run(threading.active_count) <= before)
    assert "Traceback" not in worker.output()


def test_a_port_that_is_taken_is_named(worker_pool: WorkerPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        worker = worker_pool.start("w0")
        with pytest.raises(TransportError, match=rf"cannot be served at {port}.*a range of ports"):
            worker.run(serve_at, str(port))
    with pytest.raises(ConfigError, match="RPCDIST_METRICS must be a port or a range of ports"):
        worker.run(serve_at, "everywhere")


# ---- documentation


def prometheus_name(name: str) -> str:
    kind, unit, _ = METRICS[name]
    suffix = {"s": "_seconds", "By": "_bytes"}.get(unit, "")
    return name.replace(".", "_") + suffix + ("_total" if kind == "counter" else "")


def test_the_page_lists_every_metric() -> None:
    rows = re.findall(r"^\| `([a-z._]+)` \| `([a-z_]+)` \| (\w+)", page("docs/metrics.md"), re.MULTILINE)
    assert rows == [(name, prometheus_name(name), METRICS[name][0]) for name in METRICS]


def test_the_board_shows_metrics_that_exist() -> None:
    board = json.loads((ROOT / "examples" / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(expressions) >= 10
    used = {name for text in expressions for name in re.findall(r"\b(?:rpc|rpcdist)_[a-z_]+(?=[{\[])", text)}
    histograms = {prometheus_name(name) for name, (kind, _, _) in METRICS.items() if kind == "histogram"}
    known = {prometheus_name(name) for name in METRICS}
    parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "count", "sum")}
    assert used <= known | parts
    assert known - histograms <= used
