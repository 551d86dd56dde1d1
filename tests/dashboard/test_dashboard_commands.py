"""The commands and `LocalCluster(dashboard=True)` on a real job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from http.cookiejar import CookieJar
from typing import Any

import pytest

import rpcdist
from rpcdist import _local_cluster, rpc
from rpcdist.testing import WorkerPool
from rpcdist.testing.worker_pool import join

LIMIT_S = 60.0


def first_view(url: str, curve: str) -> Any:
    """The first view in a browser that has a curve; an answer that is a moment old may lack it."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    with opener.open(url, timeout=LIMIT_S) as page:
        assert b"rpcdist" in page.read()
    with opener.open(url.partition("?")[0] + "events", timeout=LIMIT_S) as events:
        while line := events.readline():
            if line.startswith(b"data: ") and curve in (view := json.loads(line[6:]))["curves"]:
                return view
    raise AssertionError("the events have ended")


@pytest.mark.multiproc
@pytest.mark.timeout(240)
def test_a_cluster_with_a_page(no_agent: None, capfd: pytest.CaptureFixture[str]) -> None:
    with rpcdist.LocalCluster(2, dashboard=True) as cluster:
        rpcdist.publish("loss", 0.5)
        assert rpc.rpc_sync("worker1", pow, (2, 10)) == 1024
        assert cluster.dashboard_url is not None and cluster.dashboard_url in capfd.readouterr().err
        view = first_view(cluster.dashboard_url, "worker0: loss")
        assert [row["name"] for row in view["workers"]] == ["worker0", "worker1"]
        assert [row["state"] for row in view["workers"]] == ["answers", "answers"]
        assert view["curves"]["worker0: loss"][0][1] == 0.5
    with pytest.raises(OSError):
        first_view(cluster.dashboard_url, "worker0: loss")


@pytest.mark.multiproc
@pytest.mark.timeout(240)
def test_a_job_goes_on_when_its_page_is_slow_stopped_or_killed(no_agent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[subprocess.Popen[bytes]] = []
    first_line = _local_cluster._first_line

    def note(page: subprocess.Popen[bytes]) -> str:
        pages.append(page)
        return first_line(page)

    monkeypatch.setattr(_local_cluster, "_first_line", note)
    with rpcdist.LocalCluster(2, dashboard=True) as cluster:
        assert cluster.dashboard_url is not None
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        opener.open(cluster.dashboard_url, timeout=LIMIT_S).close()
        with opener.open(cluster.dashboard_url.partition("?")[0] + "events", timeout=LIMIT_S) as events:
            assert events.readline()  # a reader that reads no more from here on
            assert rpc.rpc_sync("worker1", pow, (2, 10)) == 1024
            [page] = pages
            page.send_signal(signal.SIGSTOP)
            assert rpc.rpc_sync("worker1", pow, (2, 11)) == 2048
            page.kill()
            page.wait(LIMIT_S)
            assert rpc.rpc_sync("worker1", pow, (2, 12)) == 4096


@pytest.mark.multiproc
@pytest.mark.timeout(240)
def test_several_jobs_of_a_host_are_listed(no_agent: None, module_pool: WorkerPool) -> None:
    token = {"RPCDIST_TOKEN": f"only of the two jobs of {os.getpid()}"}  # other tests have jobs on this host meanwhile
    workers = [module_pool.start(name, token) for name in ("first", "second")]
    for worker in workers:
        worker.run(join, "worker0", 0, 1, module_pool.new_url())
    for command in ("dashboard", "top"):
        arguments = [sys.executable, "-m", "rpcdist", command]
        ended = subprocess.run(arguments, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **token})
        says, *lines = ended.stderr.splitlines()
        assert ended.returncode == 1 and "2 jobs have workers on this host: pass one of these addresses" in says
        assert len(lines) == 2
        for worker in workers:
            [line] = [line for line in lines if f"process {worker.pid}: " in line]
            assert "is default/" in line and ": worker0, process" in line and "python" in line


@pytest.mark.parametrize("command", ["dashboard", "top"])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["127.0.0.1:1"], "ConnectFailed"),
        (["127.0.0.1:1", "--period", "0"], "must be from 0.2 to 3600 seconds"),
        (["nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_named(command: str, arguments: list[str], says: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "rpcdist", command, *arguments], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 1 and says in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr
