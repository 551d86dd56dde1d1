"""The examples do what their first lines say, in the ways in which users start and stop them; the benchmark runs."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from example_runs import EXAMPLES, ROOT, last_line, torchrun
from example_runs import explanation_of as explanation_of
from full_sets import FULL_ONLY
from program_sessions import LIMIT_S, STOP_LIMIT_S, assert_no_process_left, read_until, run, session_members, start

from rpcdist.testing import eventually

PARAMETER_SERVER = EXAMPLES / "parameter_server.py"
ELASTIC_SERVER = EXAMPLES / "elastic_parameter_server.py"
WITH_OPTIONS = sorted({path.stem for path in EXAMPLES.glob("[a-z]*.py")} - {"hello_rpc"})
SHORT = ("--epochs", "8")
SHORT_ACCURACY = 90.0  # what 8 epochs reach with room to spare; a full run reaches 97


def last_accuracy(result: subprocess.CompletedProcess[str]) -> float:
    return float(last_line(result, r"test accuracy (\d+\.\d) % \(.*\), picture: .*")[1])


@pytest.mark.multiproc
def test_hello_prints_what_its_docstring_says() -> None:
    program = EXAMPLES / "hello_rpc.py"
    expected = program.read_text().split('"""')[1].partition("\n")[2]
    result = run(sys.executable, program)
    assert (result.stdout, result.stderr, result.returncode) == (expected, "", 0)


@pytest.mark.multiproc
@pytest.mark.timeout(500)
@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=FULL_ONLY)])
def test_elastic_parameter_server_goes_on_whoever_is_killed(tmp_path: Path, kills: int) -> None:
    """The server first of all."""
    picture = tmp_path / "picture.png"
    result = run(
        sys.executable, ELASTIC_SERVER, "--steps", "150", "--kills", f"{kills}", "--picture", picture, limit_s=400.0
    )
    found = last_line(result, rf"test accuracy (\d+\.\d) % \(150 steps of 2 trainers, {kills} kills, .*\), picture: .*")
    assert float(found[1]) >= 80.0  # 150 steps reach 90 and more
    said = [line.partition(": ")[2] for line in result.stdout.splitlines()]
    assert "server is back" in said and "was taken back" in result.stderr, said
    assert picture.exists() and not picture.with_suffix(".state").exists()


@pytest.mark.multiproc
@pytest.mark.timeout(500)
@FULL_ONLY
def test_elastic_ddp_goes_on_whoever_is_killed(tmp_path: Path) -> None:
    arguments = ("--steps", "2000", "--kills", "1", "--picture", tmp_path / "picture.png")
    result = run(sys.executable, EXAMPLES / "elastic_ddp.py", *arguments, limit_s=400.0)
    what = r"\(loss .*, 2000 steps of 3 ranks, 1 kill, back after .* s\)"
    last_line(result, rf"test accuracy 9\d\.\d % {what}, picture: .*")
    assert "kill 1: the new process trains" in result.stdout and (tmp_path / "picture.png").exists()


@pytest.mark.multiproc
@pytest.mark.timeout(500)
@FULL_ONLY
def test_elastic_parameter_server_goes_on_after_a_restart_by_torchrun(tmp_path: Path) -> None:
    arguments = ("--steps", "300", "--kills", "2", "--picture", tmp_path / "picture.png")
    result = run(*torchrun(3), "--max-restarts", "2", ELASTIC_SERVER, *arguments, limit_s=400.0)
    last_line(result, r"test accuracy [89]\d\.\d % \(300 steps of 2 trainers, 2 kills, .*\), picture: .*")
    assert result.stdout.count("server is back") == 2


@pytest.mark.multiproc
@pytest.mark.timeout(500)
@FULL_ONLY
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_parameter_server_outlives_a_trainer(mode: str, tmp_path: Path) -> None:
    arguments = ("--mode", mode, "--kill", "1", *SHORT, "--picture", tmp_path / "picture.png")
    result = run(sys.executable, PARAMETER_SERVER, *arguments, limit_s=400.0)  # torch is imported twice, in turn
    assert last_accuracy(result) >= SHORT_ACCURACY
    said = [line.split(" after")[0] for line in result.stdout.splitlines()]
    assert said.index("trainer1: killed") < said.index("trainer1: back")
    assert [line for line in said if line.startswith("trainer1: epoch 8/8")]
    assert (tmp_path / "picture.png").exists()


@pytest.mark.multiproc
@pytest.mark.timeout(500)
@FULL_ONLY  # `test_examples_under_torchrun.py` always runs it; the elastic parameter server always replaces a process
def test_asynchronous_reinforcement_learning_goes_on_without_a_generator(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    arguments = ("--kill", "generator", "--steps", "300", "--picture", picture)
    result = run(sys.executable, EXAMPLES / "async_rl.py", *arguments, limit_s=400.0)
    what = r"\(2 generators, one killed once, 300 steps, .* s\)"
    found = last_line(result, rf"(\d+) % of the lists are sorted right {what}, picture: .*")
    assert int(found[1]) >= 80  # 300 steps reach 95 and more
    assert "generator0: killed" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@FULL_ONLY  # `test_examples_under_torchrun.py` always runs it
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--mode async --trainers 2", "async, 2 trainers"),
        ("--mode sync --trainers 3", "sync, 3 trainers"),
        ("--servers 2 --staleness 1", "async, 2 servers, 2 trainers"),
    ],
    ids=["async", "sync", "servers"],
)
def test_parameter_server_learns(arguments: str, said: str, tmp_path: Path) -> None:
    picture = tmp_path / "made" / "picture.png"
    result = run(sys.executable, PARAMETER_SERVER, *arguments.split(), "--picture", picture, *SHORT)
    assert last_accuracy(result) >= SHORT_ACCURACY
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert f"({said}, 8 epochs, " in lines[-1]
    trainers = int(said[-len("3 trainers")])
    assert [sum(f"trainer{trainer}: epoch" in line for line in lines) for trainer in range(trainers)] == [8] * trainers
    assert picture.read_bytes().startswith(b"\x89PNG")


@FULL_ONLY
@pytest.mark.multiproc
def test_parameter_server_runs_under_torchrun(tmp_path: Path) -> None:
    result = run(*torchrun(3), PARAMETER_SERVER, "--mode", "sync", *SHORT, cwd=tmp_path)
    assert last_accuracy(result) >= SHORT_ACCURACY
    assert (tmp_path / "out" / "parameter_server.png").exists()


@FULL_ONLY  # `test_examples_under_torchrun.py` always has an example that fails so
@pytest.mark.multiproc
def test_parameter_server_fails_below_min_accuracy(tmp_path: Path) -> None:
    result = run(
        sys.executable, PARAMETER_SERVER, "--trainers", "1", "--epochs", "1", "--min-accuracy", "100", cwd=tmp_path
    )
    assert result.returncode == 1
    assert re.fullmatch(r"test accuracy \d+\.\d % is below --min-accuracy 100\n", result.stderr)


@FULL_ONLY  # what Ctrl-C does is a matter of `rpcdist.launch`, whose tests run always
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("mode", "whole_group"),
    [("async", True), ("sync", False)],
    ids=["terminal", "parent-only"],
)
def test_ctrl_c_ends_everything(mode: str, whole_group: bool, tmp_path: Path) -> None:
    with start(sys.executable, PARAMETER_SERVER, "--mode", mode, "--epochs", "100000", cwd=tmp_path) as process:
        assert process.stdout is not None
        read_until(process.stdout, "epoch 1/")
        assert len(session_members(process.pid)) >= 4  # the parent, the server, two trainers
        interrupted = time.monotonic()
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert_no_process_left(process.pid, STOP_LIMIT_S)
        assert time.monotonic() - interrupted < STOP_LIMIT_S
    assert (process.returncode, errors.strip()) == (130, "interrupted")


@FULL_ONLY
@pytest.mark.multiproc
def test_ctrl_c_during_the_start(tmp_path: Path) -> None:
    with start(sys.executable, PARAMETER_SERVER, "--epochs", "100000", cwd=tmp_path) as process:
        # No output tells: the children import torch.
        eventually(lambda: len(session_members(process.pid)) >= 4, "all processes run", LIMIT_S)
        interrupted = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=LIMIT_S)
        assert time.monotonic() - interrupted < STOP_LIMIT_S
        assert_no_process_left(process.pid)
    said = "starting 3 processes ...\n"
    assert (process.returncode, out, errors.strip()) == (130, said, "interrupted")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trainers", "0"), "--trainers: '0' is not a positive whole number"),
        (("--trainers", "50"), "--trainers 50: each has fewer images than a batch of 32"),
        (("--picture", "curves.txt"), "the name must end in .png, .pdf or .svg"),
        (("--mode", "sync", "--staleness", "2"), "for --mode async; in sync no trainer is ahead"),
        (("--staleness", "-1"), "--staleness is a number of steps"),
        (("--kill", "2"), "--kill 2: one of the trainers 0 to 1"),
        (("--kill", "1", "--epochs", "1"), "half-way of --epochs"),
        (("--servers", "0"), "--servers: '0' is not a positive whole number"),
        (("--servers", "999"), "choose fewer, or add --yes"),
    ],
)
def test_bad_arguments_are_explained(
    arguments: tuple[str, ...], message: str, explanation_of: Callable[..., str]
) -> None:
    assert message in explanation_of("parameter_server", *arguments)


def test_help_needs_no_torch() -> None:
    """Importing torch takes seconds."""
    program = f"""
import runpy, sys
sys.path.insert(0, ".")
sys.argv = ["example", "--help"]
for example in {WITH_OPTIONS}:
    try:
        runpy.run_path(example + ".py", run_name="__main__")
    except SystemExit as ended:
        assert ended.code == 0, example
    assert "torch" not in sys.modules, example
for command in ([], ["port"], ["run"]):
    sys.argv = ["rpcdist", *command, "--help"]
    try:
        runpy.run_module("rpcdist", run_name="__main__")
    except SystemExit as ended:
        assert ended.code == 0, command
    assert "torch" not in sys.modules, command
"""
    result = run(sys.executable, "-c", program, cwd=EXAMPLES)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("usage: ") == len(WITH_OPTIONS) + 3 >= 12


def test_many_processes_are_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    confirm_many = importlib.import_module("_shared").confirm_many
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    asked: list[str] = []
    answers = ["", "no", "y"]

    def ask(question: str) -> str:
        asked.append(question)
        return answers.pop(0)

    monkeypatch.setattr("builtins.input", ask)
    for _ in range(2):
        with pytest.raises(SystemExit, match="nothing was started"):
            confirm_many(999, sure=False)
    confirm_many(999, sure=False)
    assert len(asked) == 3 and "999 processes" in asked[0]
    confirm_many(999, sure=True)
    confirm_many(3, sure=False)
    assert len(asked) == 3


@FULL_ONLY
@pytest.mark.multiproc
def test_the_rpc_benchmark_compares_with_torch(tmp_path: Path) -> None:
    cases = ("noop", "echo-1KiB", "remote")
    only = [word for case in cases for word in ("--only", case)]
    result = run(sys.executable, ROOT / "benchmarks" / "rpc.py", "--quick", "--rounds", "1", *only, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    table = [line.strip("| ").split("|") for line in result.stdout.splitlines() if line.startswith("|")][2:]
    assert len(table) == 4  # the no-op has two rows
    for _what, _size, _unit, ours, torch, ratio, *_ in table:
        assert float(ours.replace(",", "")) > 0 and float(torch.replace(",", "")) > 0 and ratio.strip().endswith("x")


@FULL_ONLY
@pytest.mark.multiproc
def test_the_benchmark_of_the_pipeline_compares_with_torch(tmp_path: Path) -> None:
    command = (sys.executable, ROOT / "benchmarks" / "pipeline.py", "--quick", "--rounds", "1", "--steps", "1")
    result = run(*command, "--only", "1f1b", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (line,) = [line.strip("| ").split("|") for line in result.stdout.splitlines() if line.startswith("| 1f1b")]
    assert all(float(line[column]) > 0 for column in (1, 2, 5, 6))
