"""The examples of reinforcement learning, recurrent net, asyncio service and DDP + RPC learn what they should."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from example_runs import EXAMPLES, last_line, torchrun
from example_runs import explanation_of as explanation_of
from full_sets import FULL_ONLY
from program_sessions import STOP_LIMIT_S, assert_no_process_left, read_until, run, session_members, start

PNG = b"\x89PNG"


@pytest.mark.multiproc
def test_an_agent_learns_from_observers(tmp_path: Path) -> None:
    picture = tmp_path / "made" / "a.png"
    command = (sys.executable, EXAMPLES / "reinforcement_learning.py", "--min-reward", "40", "--picture", picture)
    result = run(*command, "--rounds", "6")
    found = last_line(
        result,
        r"mean reward (\d+) \((\d+) at first; 2 observers, 12288 steps\), batches (\d+\.\d) times as fast, picture: .*",
    )
    assert float(found[1]) > 2 * float(found[2])  # it learned
    assert float(found[3]) > 0  # a ratio of speeds, on a machine that does other things as well
    assert result.stderr == ""
    assert sum(line.startswith("round ") for line in result.stdout.splitlines()) == 6
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.multiproc
def test_a_recurrent_net_over_two_workers_learns(tmp_path: Path) -> None:
    script = (EXAMPLES / "recurrent_net.py", "--steps", "80", "--max-loss", "4.6")  # reaches 4.3
    result = run(sys.executable, *script, cwd=tmp_path)
    found = last_line(
        result, r"validation loss (\d\.\d\d) \(guessing by frequency: (\d\.\d\d); 80 steps, .* s\), picture: .*"
    )
    assert float(found[1]) < float(found[2])
    assert result.stderr == ""
    assert (tmp_path / "out" / "recurrent_net.png").read_bytes().startswith(PNG)


@pytest.mark.multiproc
def test_the_asyncio_service_shows_what_it_says(tmp_path: Path) -> None:
    script = (EXAMPLES / "asyncio_service.py", "--min-accuracy", "90", "--epochs", "5")
    result = run(*torchrun(2), *script, cwd=tmp_path)
    last_line(
        result, r"test accuracy .* %, 5000 calls waited for it at a service with \d+ threads \(.* s\), picture: .*"
    )
    out = result.stdout
    assert "named failure, on worker 'service': NotTrained: the model is not trained yet: 0 steps done\n" in out
    assert "deadline: the call ended after 0.5 s, here and at the service\n" in out
    assert "cancellation: a waiting call and a stream were left, and ended at the service\n" in out
    [threads] = re.findall(r"^waiting: 5000 calls, all at the service, which has (\d+) threads$", out, re.MULTILINE)
    assert int(threads) < 30
    [ahead] = re.findall(r"^streaming: 220 losses, at most (\d+) ahead of the slow client$", out, re.MULTILINE)
    assert 1 <= int(ahead) <= 18
    assert (tmp_path / "out" / "asyncio_service.png").read_bytes().startswith(PNG)


@pytest.mark.multiproc
def test_ddp_and_rpc_learn_together(tmp_path: Path) -> None:
    """A master, two servers and two trainers; an accuracy that cannot be reached makes it fail."""
    script = (EXAMPLES / "ddp_rpc.py", "--epochs", "1", "--servers", "2", "--min-accuracy", "100")
    result = run(*torchrun(5), *script, cwd=tmp_path)
    assert result.returncode == 1
    out = result.stdout
    found = re.search(
        r"^test accuracy (.*) % \(guessing: (.*) %; 2 trainers, 2 servers, 1 epoch, .*\), picture: ", out, re.MULTILINE
    )
    assert found, out + result.stderr
    assert float(found[1]) > 2 * float(found[2])
    assert f"test accuracy {found[1]} % is below --min-accuracy 100\n" in result.stderr
    assert "the dense layers of 2 trainers differ by 0\n" in out
    assert (tmp_path / "out" / "ddp_rpc.png").read_bytes().startswith(PNG)


@FULL_ONLY  # what Ctrl-C does is a matter of `rpcdist.launch`, whose tests run always
@pytest.mark.multiproc
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    with start(sys.executable, EXAMPLES / "recurrent_net.py", "--steps", "600", cwd=tmp_path) as process:
        assert process.stdout is not None
        read_until(process.stdout, "step 60/")
        assert len(session_members(process.pid)) >= 3  # the parent, the trainer, the server
        interrupted = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=STOP_LIMIT_S)
        assert_no_process_left(process.pid, STOP_LIMIT_S)
        assert time.monotonic() - interrupted < STOP_LIMIT_S
    assert (process.returncode, errors) == (130, "\ninterrupted\n")


@pytest.mark.parametrize(
    ("example", "arguments", "message"),
    [
        ("reinforcement_learning", ("--observers", "0"), "--observers: '0' is not a positive whole number"),
        ("reinforcement_learning", ("--steps", "3"), "--steps 3: at least 4"),
        ("recurrent_net", ("--picture", "a.txt"), "the name must end in .png, .pdf or .svg"),
        ("recurrent_net", ("--lr", "inf"), "--lr: 'inf' is not a positive number"),
        ("asyncio_service", ("--waiters", "many"), "--waiters: 'many' is not a positive whole number"),
        ("ddp_rpc", ("--servers", "0"), "--servers: '0' is not a positive whole number"),
    ],
)
def test_bad_arguments_are_explained(
    example: str, arguments: tuple[str, ...], message: str, explanation_of: Callable[..., str]
) -> None:
    assert message in explanation_of(example, *arguments)


@pytest.mark.parametrize(
    ("example", "world_size", "message"),
    [
        ("reinforcement_learning", 1, "torchrun must start at least 2 processes, an agent and an observer"),
        ("recurrent_net", 3, "torchrun must start 2 processes, the trainer and the server"),
        ("asyncio_service", 1, "torchrun must start 2 processes, the client and the service"),
        ("ddp_rpc", 2, "torchrun must start the master, 1 server and the trainers: --nproc-per-node 4"),
    ],
)
def test_too_few_processes_are_explained(
    example: str, world_size: int, message: str, explanation_of: Callable[..., str]
) -> None:
    assert message in explanation_of(example, RANK="0", WORLD_SIZE=str(world_size))
