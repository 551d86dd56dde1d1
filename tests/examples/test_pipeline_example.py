"""The example of the pipeline learns, in the ways in which users start it; the benchmark runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from example_runs import EXAMPLES, ROOT, torchrun
from example_runs import explanation_of as explanation_of
from full_sets import FULL_ONLY
from program_sessions import run

PIPELINE = EXAMPLES / "pipeline_parallel.py"
SHORT = ("--steps", "40", "--width", "32", "--length", "32", "--batch-size", "16")
SHORT_LOSS = 3.0  # guessing by frequency reaches 3.07, and 40 short steps about 2.8


@pytest.mark.multiproc
def test_it_learns(tmp_path: Path) -> None:
    picture = tmp_path / "made" / "a.svg"
    result = run(sys.executable, PIPELINE, "--max-loss", str(SHORT_LOSS), "--picture", picture, *SHORT)
    assert (result.returncode, result.stderr) == (0, "")
    last = r"validation loss \d\.\d\d \(guessing by frequency: 3\.\d\d; \w+, 2 workers, 40 steps, .* s\), picture: .*"
    lines = result.stdout.splitlines()
    assert re.fullmatch(last, lines[-1])
    assert sum(line.startswith("step ") for line in lines) == 10
    assert picture.stat().st_size > 10_000


@FULL_ONLY
@pytest.mark.multiproc
def test_it_runs_under_torchrun_and_fails_above_max_loss(tmp_path: Path) -> None:
    result = run(*torchrun(2), PIPELINE, "--schedule", "interleaved", "--max-loss", "1", *SHORT, cwd=tmp_path)
    assert result.returncode == 1
    assert re.search(r"^validation loss \d\.\d\d is above --max-loss 1$", result.stderr, re.MULTILINE)
    assert (tmp_path / "out" / "pipeline.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "0"), "--workers: '0' is not a positive whole number"),
        (("--layers", "1"), "--layers 1: at least one for each of the 2 stages"),
        (("--width", "30"), "--width 30: must be a multiple of 4"),
        (("--schedule", "interleaved", "--microbatches", "5"), "must be a multiple of --workers"),
        (("--picture", "a.txt"), "the name must end in .png, .pdf or .svg"),
    ],
)
def test_bad_arguments_are_explained(
    arguments: tuple[str, ...], message: str, explanation_of: Callable[..., str]
) -> None:
    assert message in explanation_of("pipeline_parallel", *arguments)


@pytest.mark.multiproc
def test_the_benchmark_compares_with_torch(tmp_path: Path) -> None:
    command = (sys.executable, ROOT / "benchmarks" / "pipeline.py", "--quick", "--rounds", "1", "--steps", "1")
    result = run(*command, "--only", "1f1b", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (line,) = [line.strip("| ").split("|") for line in result.stdout.splitlines() if line.startswith("| 1f1b")]
    assert all(float(line[column]) > 0 for column in (1, 2, 5, 6))
