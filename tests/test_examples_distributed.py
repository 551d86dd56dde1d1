"""The examples of reinforcement learning, recurrent net, asyncio service and DDP + RPC learn what they should."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_examples import EXAMPLES, free_port, run

PNG = b"\x89PNG"


def torchrun(processes: int) -> tuple[str, ...]:
    command = ("-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(free_port()))
    return (sys.executable, *command)


def last_line(result: subprocess.CompletedProcess[str], pattern: str) -> re.Match[str]:
    """The last line of a run that went well, which has this form."""
    assert result.returncode == 0, result.stdout + result.stderr
    found = re.fullmatch(pattern, result.stdout.splitlines()[-1])
    assert found, result.stdout
    return found


@pytest.mark.multiproc
def test_an_agent_learns_from_observers(tmp_path: Path) -> None:
    picture = tmp_path / "made" / "a.png"
    command = (sys.executable, EXAMPLES / "reinforcement_learning.py", "--min-reward", "60", "--picture", picture)
    result = run(*command, "--rounds", "9")
    found = last_line(
        result,
        r"mean reward (\d+) \((\d+) at first; 2 observers, 18432 steps\), batches (\d+\.\d) times as fast, picture: .*",
    )
    assert float(found[1]) > 2 * float(found[2])  # it learned
    assert float(found[3]) > 0
    assert result.stderr == ""
    assert sum(line.startswith("round ") for line in result.stdout.splitlines()) == 9
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.multiproc
def test_questions_may_be_answered_one_by_one(tmp_path: Path) -> None:
    """Under torchrun, too; a reward that cannot be reached so soon makes it fail."""
    script = (EXAMPLES / "reinforcement_learning.py", "--rounds", "1", "--steps", "16", "--select", "single")
    result = run(*torchrun(2), *script, "--min-reward", "500", cwd=tmp_path)
    assert result.returncode == 1
    assert re.search(r"^mean reward \d+ is below --min-reward 500$", result.stderr, re.MULTILINE)
    assert (tmp_path / "out" / "reinforcement.png").exists()


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
    assert "named failure: NotTrained(0) with steps_done=0. On worker 'service':\n" in out
    assert "deadline: the call ended after 0.5 s, here and at the service\n" in out
    assert "cancellation: a waiting call and a stream were left, and ended at the service\n" in out
    [threads] = re.findall(r"^waiting: 5000 calls, all at the service, which has (\d+) threads$", out, re.MULTILINE)
    assert int(threads) < 30
    [ahead] = re.findall(r"^streaming: 220 losses, at most (\d+) ahead of the slow client$", out, re.MULTILINE)
    assert 1 <= int(ahead) <= 18
    assert (tmp_path / "out" / "asyncio_service.png").read_bytes().startswith(PNG)


@pytest.mark.multiproc
@pytest.mark.parametrize("servers", [1, 2])
def test_ddp_and_rpc_learn_together(servers: int, tmp_path: Path) -> None:
    start = (sys.executable,) if servers == 1 else torchrun(1 + servers + 1)
    script = (EXAMPLES / "ddp_rpc.py", "--epochs", "1", "--servers", str(servers), "--min-accuracy", "70")
    result = run(*start, *script, cwd=tmp_path)
    found = last_line(result, r"test accuracy (.*) % \(guessing: (.*) %; \d trainers?, \d servers?, 1 epochs, .*")
    assert float(found[1]) > 2 * float(found[2])
    assert re.search(r"^the dense layers of \d trainers? differ by 0$", result.stdout, re.MULTILINE)
    assert (tmp_path / "out" / "ddp_rpc.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("example", "arguments", "message"),
    [
        ("reinforcement_learning", ("--observers", "0"), "--observers: '0' is not a positive whole number"),
        ("reinforcement_learning", ("--steps", "3"), "--steps 3: at least 4"),
        ("recurrent_net", ("--picture", "a.txt"), "the name must end in .png, .pdf or .svg"),
        ("recurrent_net", ("--lr", "inf"), "--lr: 'inf' is not a positive number"),
        ("asyncio_service", ("--waiters", "many"), "--waiters: 'many' is not a positive whole number"),
        ("asyncio_service", ("--port", "70000"), "--port 70000: must be between 0 and 65535"),
        ("ddp_rpc", ("--servers", "0"), "--servers: '0' is not a positive whole number"),
    ],
)
def test_bad_arguments_are_explained(
    example: str,
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", [example, *arguments])
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(example).main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


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
    example: str,
    world_size: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setattr(sys, "argv", [example])
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(example).main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
