"""Agents of torchrun that come and go: the workers of all of them meet again in each new world."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from full_sets import FULL_ONLY

from rpcdist.testing import LIMIT_S, eventually, free_port

pytestmark = [pytest.mark.multiproc, pytest.mark.stress, FULL_ONLY, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("growing_program.py")
STEP_LIMIT_S = 3 * LIMIT_S  # each start of workers imports torch
RENDEZVOUS = "last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=4,join_timeout=200"


class Agents:
    """Those of one job, of which any number may run."""

    def __init__(self, folder: Path, kind: str, num_nodes: str, wanted: int) -> None:
        self._folder = folder
        self._port = free_port()
        self._command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", num_nodes, "--nproc-per-node", "1"),
            *("--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}"),
            *(
                "--rdzv-id",
                "job",
                "--rdzv-conf",
                RENDEZVOUS,
                "--local-addr",
                "127.0.0.1",
                str(PROGRAM),
                kind,
                str(wanted),
            ),
        ]
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        # With the store that agents share by default, torch's own agents never meet a newcomer (2.13): the agent of
        # rank 0 writes its address for the first world only, and the newcomer waits for that of its own.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with open(self._folder / f"{len(self._processes)}.out", "wb") as output:
            self._processes.append(
                subprocess.Popen(self._command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
        # The agent that binds the port has the store of all: it is the first one, which no test kills.
        eventually(self._store_listens, "the first agent listens", STEP_LIMIT_S)

    def _store_listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def kill(self, number: int) -> None:
        """The agent dies, and its worker, which has a session of its own."""
        agent = psutil.Process(self._processes[number].pid)
        for process in [agent, *agent.children(recursive=True)]:
            process.kill()
        self._processes[number].wait(LIMIT_S)

    def lines(self, begin: str) -> list[str]:
        """The output of the workers of all agents."""
        texts = [path.read_text(errors="replace") for path in sorted(self._folder.glob("*.out"))]
        return sorted(line for text in texts for line in text.splitlines() if line.startswith(begin))

    def wait_for(self, size: int) -> None:
        """Until a world of that size has met."""
        met = {f"MET {size} {rank} {size * (size + 1) / 2}" for rank in range(size)}
        try:
            eventually(lambda: met <= set(self.lines("MET")), f"a world of {size}", STEP_LIMIT_S)
        except AssertionError as exc:
            raise AssertionError(self.output()) from exc

    def wait_for_end(self, size: int) -> None:
        for process in self._processes:
            if process.returncode is None:
                assert process.wait(STEP_LIMIT_S) == 0, self.output()
        assert self.lines("DONE") == [f"DONE {size} {rank}" for rank in range(size)], self.output()

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self._folder.glob("*.out")))

    def end(self) -> None:
        for number, process in enumerate(self._processes):
            if process.poll() is None:
                self.kill(number)


@pytest.fixture
def agents(tmp_path: Path, kind: str, num_nodes: str, wanted: int) -> Iterator[Agents]:
    started = Agents(tmp_path, kind, num_nodes, wanted)
    yield started
    started.end()


@pytest.mark.parametrize("kind", ["rpcdist", "backend"])
@pytest.mark.parametrize(("num_nodes", "wanted"), [("2:3", 3)])
def test_a_job_grows_from_two_agents_to_three(agents: Agents) -> None:
    agents.start()
    agents.start()
    agents.wait_for(2)
    agents.start()
    agents.wait_for(3)
    agents.wait_for_end(3)


@pytest.mark.parametrize("kind", ["rpcdist"])
@pytest.mark.parametrize(("num_nodes", "wanted"), [("1:2", 2)])
def test_a_job_grows_from_one_agent_to_two(agents: Agents) -> None:
    agents.start()
    agents.wait_for(1)
    agents.start()
    agents.wait_for(2)
    agents.wait_for_end(2)


@pytest.mark.parametrize("kind", ["rpcdist", "backend"])
@pytest.mark.parametrize(("num_nodes", "wanted"), [("2:3", 3), ("3:4", 4)])
def test_an_agent_is_replaced_and_the_job_grows(agents: Agents, wanted: int) -> None:
    for _ in range(wanted - 1):
        agents.start()
    agents.wait_for(wanted - 1)
    agents.kill(1)
    agents.start()
    agents.start()
    agents.wait_for(wanted)
    agents.wait_for_end(wanted)
