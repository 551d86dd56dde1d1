"""The examples learn what they should, all of them under one torchrun; and, in the full set, started by themselves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from example_runs import EXAMPLES, last_line
from full_sets import FULL_ONLY
from program_sessions import STOP_LIMIT_S, assert_no_process_left, read_until, run, session_members, start
from torchrun_job import Program, Ran, run_under_torchrun

from rpcdist import checkpoint

pytestmark = pytest.mark.multiproc

PNG = b"\x89PNG"
JOB_LIMIT_S = 300.0
SHORT_PIPELINE = "--steps 40 --max-loss 3.0"  # guessing reaches 3.07, this 2.8

# By name: the example, its options, and how many ranks take part. Ranks that take no part in a run wait in the next one
# for the others, so those of few ranks come last.
RUNS = {
    "ddp_rpc": ("ddp_rpc", "--epochs 1 --servers 2 --min-accuracy 100", 5),
    "async_rl": ("async_rl", "--steps 15 --picture made/a.png", 4),
    "parameter_server": ("parameter_server", "--epochs 8 --picture made/a.png", 3),
    "reinforcement_learning": ("reinforcement_learning", "--rounds 5 --picture made/a.png", 3),
    "collectives": ("collectives", "--rounds 4", 3),
    "recurrent_net": ("recurrent_net", "--steps 80 --max-loss 4.6", 2),  # reaches 4.3
    "asyncio_service": ("asyncio_service", "--epochs 5 --waiters 1000", 2),
    "ddp": ("ddp", "--epochs 2 --checkpoint ../made/model", 2),
    "ddp again": ("ddp", "--epochs 3 --checkpoint ../made/model --resume", 2),
    "pipeline_parallel": ("pipeline_parallel", f"{SHORT_PIPELINE} --picture made/a.svg", 2),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """The outcome of all runs, one after the other in the same five processes."""
    programs = [Program(EXAMPLES / f"{name}.py", tuple(given.split()), size) for name, given, size in RUNS.values()]
    folder = tmp_path_factory.mktemp("examples")
    imports = ("rpcdist.parallel", "torch._dynamo", "sklearn.datasets", "matplotlib.pyplot", "gymnasium")
    return dict(zip(RUNS, run_under_torchrun(programs, folder, JOB_LIMIT_S, imports), strict=True))


@pytest.mark.timeout(JOB_LIMIT_S + 60)
def test_ddp_and_rpc_learn_together(ran: dict[str, Ran]) -> None:
    """A master, two servers and two trainers; an accuracy that cannot be reached makes it fail."""
    result = ran["ddp_rpc"]
    out = result.stdout
    found = re.search(
        r"^test accuracy (.*) % \(guessing: (.*) %; 2 trainers, 2 servers, 1 epoch, .*\), picture: ", out, re.MULTILINE
    )
    assert found, out + result.stderr
    assert result.returncode == 1
    assert float(found[1]) > 2 * float(found[2])
    assert f"test accuracy {found[1]} % is below --min-accuracy 100\n" in result.stderr
    assert "the dense layers of 2 trainers differ by 0\n" in out
    assert (result.folder / "out" / "ddp_rpc.png").read_bytes().startswith(PNG)


def test_an_agent_learns_from_observers(ran: dict[str, Ran]) -> None:
    result = ran["reinforcement_learning"]
    found = last_line(
        result,
        r"mean reward (\d+) \((\d+) at first; 2 observers, 10240 steps\), batches (\d+\.\d) times as fast, picture: .*",
    )
    assert float(found[1]) > 2 * float(found[2])  # it learned
    assert float(found[3]) > 0  # a ratio of speeds, on a machine that does other things as well
    assert result.stderr == ""
    assert sum(line.startswith("round ") for line in result.stdout.splitlines()) == 5
    assert (result.folder / "made" / "a.png").read_bytes().startswith(PNG)


def test_collectives_are_shown_and_averaging_learns(ran: dict[str, Ran]) -> None:
    result = ran["collectives"]
    found = last_line(result, r"parameter averaging: test accuracy (\d+\.\d) % on each of 3 ranks, 4 rounds")
    assert float(found[1]) >= 80  # 90 with the default seed
    assert result.stderr == ""
    shown = {line[:32].strip(): re.split(r"\s*rank \d: ", line[32:])[1:] for line in result.stdout.splitlines()}
    assert shown["broadcast from rank 0"] == ["[0, 10]"] * 3
    assert shown["all_reduce (sum)"] == ["[3, 33]"] * 3
    assert shown["reduce_scatter_tensor"] == ["[0, 30]", "[3, 33]", "[6, 36]"]
    assert shown["all_to_all_single"] == ["[0, 10, 20]", "[1, 11, 21]", "[2, 12, 22]"]
    assert shown["all_reduce of ranks 0 and 1"] == ["[1, 21]", "[1, 21]", "[2, 12]"]
    assert shown["from the previous rank"] == ["[2, 12]", "[0, 10]", "[1, 11]"]
    assert all(float(apart) < 1e-4 for apart in shown["ring minus built-in all_reduce"])
    assert len(set(shown["round 4/4, after averaging"])) == 1


def test_a_recurrent_net_over_two_workers_learns(ran: dict[str, Ran]) -> None:
    result = ran["recurrent_net"]
    found = last_line(
        result, r"validation loss (\d\.\d\d) \(guessing by frequency: (\d\.\d\d); 80 steps, .* s\), picture: .*"
    )
    assert float(found[1]) < float(found[2])
    assert result.stderr == ""
    assert (result.folder / "out" / "recurrent_net.png").read_bytes().startswith(PNG)


def test_the_asyncio_service_shows_what_it_says(ran: dict[str, Ran]) -> None:
    result = ran["asyncio_service"]
    found = last_line(
        result, r"test accuracy (.*) %, 1000 calls waited for it at a service with \d+ threads \(.* s\), picture: .*"
    )
    assert float(found[1]) >= 90
    out = result.stdout
    assert "named failure: NotTrained: the model is not trained yet, 220 steps to do\n" in out
    assert "deadline: the call ended after 0.5 s, here and at the service\n" in out
    assert "cancellation: a waiting call and a stream were left, and ended at the service\n" in out
    [threads] = re.findall(r"^waiting: 1000 calls, all at the service, which has (\d+) threads$", out, re.MULTILINE)
    assert int(threads) < 30
    [ahead] = re.findall(r"^streaming: 220 losses, at most (\d+) ahead of the slow client$", out, re.MULTILINE)
    assert 1 <= int(ahead) <= 18
    assert (result.folder / "out" / "asyncio_service.png").read_bytes().startswith(PNG)


def test_ddp_learns_and_resumes(ran: dict[str, Ran]) -> None:
    result, again = ran["ddp"], ran["ddp again"]
    found = last_line(
        result, r"test accuracy (\d+\.\d) % \(2 ranks, 2 epochs, \d+\.\d\d s each\), checkpoint: .*/made/model"
    )
    assert float(found[1]) >= 85  # 97 with the default seed
    assert result.stderr == ""
    assert sum(line.startswith("epoch ") for line in result.stdout.splitlines()) == 2
    found = last_line(again, r"test accuracy (\d+\.\d) % \(2 ranks, 3 epochs, .*")
    assert float(found[1]) >= 92
    lines = again.stdout.splitlines()
    assert lines[0] == "resumed after 2 epochs"
    assert re.match(r"epoch 3/3: loss 0\.\d+, test accuracy \d+\.\d %, \d+\.\d\d s", lines[1])
    state: dict[str, object] = {"epochs": 0}
    checkpoint.load(again.folder / "../made/model", state)
    assert state["epochs"] == 3


def test_a_parameter_server_learns(ran: dict[str, Ran]) -> None:
    result = ran["parameter_server"]
    found = last_line(result, r"test accuracy (\d+\.\d) % \(async, 2 trainers, 8 epochs, .*\), picture: .*")
    assert float(found[1]) >= 90  # what 8 epochs reach with room to spare; a full run reaches 97
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert [sum(f"trainer{trainer}: epoch" in line for line in lines) for trainer in range(2)] == [8, 8]
    assert (result.folder / "made" / "a.png").read_bytes().startswith(PNG)


def test_asynchronous_reinforcement_learning_runs(ran: dict[str, Ran]) -> None:
    """Its learning, and its progress without a generator, are in the full set."""
    result = ran["async_rl"]
    last_line(result, r"\d+ % of the lists are sorted right \(2 generators, 15 steps, .* s\), picture: .*")
    assert result.stderr == ""
    assert (result.folder / "made" / "a.png").read_bytes().startswith(PNG)


def test_a_pipeline_learns(ran: dict[str, Ran]) -> None:
    result = ran["pipeline_parallel"]
    guessing = r"\(guessing by frequency: 3\.\d\d; \w+, 2 workers, 40 steps, .* s\)"
    last_line(result, rf"validation loss \d\.\d\d {guessing}, picture: .*")
    assert result.stderr == ""
    assert sum(line.startswith("step ") for line in result.stdout.splitlines()) == 10
    assert (result.folder / "made" / "a.svg").stat().st_size > 10_000


@FULL_ONLY  # `test_examples.py` always starts two examples by themselves, the first one and the elastic server
@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("ddp_rpc", "ddp again")])
def test_it_starts_its_processes_itself(ran: dict[str, Ran], name: str, tmp_path: Path) -> None:
    example, given, _ = RUNS[name]
    result = run(sys.executable, EXAMPLES / f"{example}.py", *given.split(), cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert without_figures(result) == without_figures(ran[name])


def without_figures(result: subprocess.CompletedProcess[str] | Ran) -> str:
    """The text of its last line before the name of a file."""
    return re.sub(r"\d+(\.\d+)?", "0", result.stdout.splitlines()[-1].partition(" picture: ")[0])


@FULL_ONLY
def test_a_pipeline_fails_above_max_loss(tmp_path: Path) -> None:
    given = [*SHORT_PIPELINE.replace("--max-loss 3.0", "--max-loss 1").split(), "--schedule", "interleaved"]
    result = run(sys.executable, EXAMPLES / "pipeline_parallel.py", *given, cwd=tmp_path)
    assert result.returncode == 1
    assert re.search(r"^validation loss \d\.\d\d is above --max-loss 1$", result.stderr, re.MULTILINE)
    assert (tmp_path / "out" / "pipeline.png").exists()


@FULL_ONLY  # what Ctrl-C does is a matter of `rpcdist.launch`, whose tests run always
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
