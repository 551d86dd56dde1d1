"""Groups over several hosts: network namespaces play the hosts, with a pair of virtual interfaces as their cable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hosts_program
import pytest
from full_sets import FULL_ONLY
from network_cable import enter_namespace

from rpcdist.testing import WorkerPool

pytestmark = pytest.mark.multiproc

PROGRAM = str(Path(hosts_program.__file__))
LIMIT_S = 90.0
PORT = "29511"


@dataclass(frozen=True, slots=True)
class Host:
    namespace: str
    address: str

    def start(self, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **variables}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    """Two namespaces with a cable between them."""
    mark = f"rd{os.getpid()}"
    hosts = [Host(f"{mark}{letter}", f"10.213.7.{number}") for number, letter in enumerate("ab", 1)]
    try:
        try:
            for host in hosts:
                ip("netns", "add", host.namespace)
            ip("link", "add", f"{mark}va", "type", "veth", "peer", "name", f"{mark}vb")
            for host, letter in zip(hosts, "ab", strict=True):
                ip("link", "set", f"{mark}v{letter}", "netns", host.namespace)
                ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", f"{mark}v{letter}")
                ip("-n", host.namespace, "link", "set", f"{mark}v{letter}", "up")
                ip("-n", host.namespace, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as exc:
            pytest.skip(f"network namespaces cannot be made here (it takes root and iproute2): {exc}")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], check=False, capture_output=True, timeout=10)


def results(processes: Sequence[subprocess.Popen[str]]) -> list[dict[str, object]]:
    """The JSON lines of all ranks, by rank."""
    found = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, errors[-4000:]
            found += [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate(timeout=10)
    return sorted(found, key=lambda entry: int(str(entry["rank"])))


def check(found: list[dict[str, object]], transport: str) -> None:
    size = len(found)
    for rank, entry in enumerate(found):
        assert transport in str(entry["transport"])
        assert entry["small"] == [size * (size + 1) / 2] * 3
        assert entry["large"] == [(size - 1) / 2] * 2
        assert entry["gathered"] == list(range(size))
        assert entry["parts"] == [rank * 10 + other for other in range(size)]
        assert entry["objects"] == [{"rank": other} for other in range(size)]


@pytest.mark.parametrize(
    ("places", "transport"),
    [
        pytest.param([0, 1], "Socket", id="one rank on each host"),
        pytest.param([0, 0, 1, 1], "Hierarchical", id="two ranks on each host"),
        pytest.param([0, 1, 0], "Hierarchical", id="two ranks on one host, interleaved", marks=FULL_ONLY),
    ],
)
def test_ranks_on_two_hosts(worker_pool: WorkerPool, hosts: list[Host], places: list[int], transport: str) -> None:
    address = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": PORT, "WORLD_SIZE": str(len(places))}
    ranks = [worker_pool.start(f"rank{rank}", {"RANK": str(rank), **address}) for rank in range(len(places))]
    for rank, place in zip(ranks, places, strict=True):
        rank.run(enter_namespace, hosts[place].namespace)
    running = [rank.begin(hosts_program.main) for rank in ranks]
    check([found.result(LIMIT_S) for found in running], transport)


@FULL_ONLY  # the same ranks as above; `test_torchrun.py` always has several agents
def test_two_torchrun_agents(hosts: list[Host]) -> None:
    processes = [
        host.start(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
                f"--node-rank={number}", f"--master-addr={hosts[0].address}", f"--master-port={PORT}", PROGRAM,
            ]
        )
        for number, host in enumerate(hosts)
    ]  # fmt: skip
    check(results(processes), "Hierarchical")
