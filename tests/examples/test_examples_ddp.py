"""The examples of data parallel training and of the collectives learn what they should, and resume."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from example_runs import EXAMPLES, last_line, torchrun
from example_runs import explanation_of as explanation_of
from program_sessions import run

DDP = EXAMPLES / "ddp.py"
COLLECTIVES = EXAMPLES / "collectives.py"


@pytest.mark.multiproc
def test_ddp_learns_and_resumes_under_torchrun(tmp_path: Path) -> None:
    checkpoint = tmp_path / "made" / "model.pt"
    result = run(sys.executable, DDP, "--epochs", "2", "--checkpoint", checkpoint)
    found = last_line(
        result, r"test accuracy (\d+\.\d) % \(2 ranks, 2 epochs, \d+\.\d\d s each\), checkpoint: .*/made/model\.pt"
    )
    assert float(found[1]) >= 85  # 97 with the default seed
    assert result.stderr == ""
    assert sum(line.startswith("epoch ") for line in result.stdout.splitlines()) == 2
    state = torch.load(checkpoint, weights_only=True)
    assert state["epochs"] == 2
    assert "0.weight" in state["model"]
    again = run(*torchrun(2), DDP, "--epochs", "3", "--resume", "--checkpoint", checkpoint)
    found = last_line(again, r"test accuracy (\d+\.\d) % \(2 ranks, 3 epochs, .*")
    assert float(found[1]) >= 92
    lines = again.stdout.splitlines()
    assert lines[0] == "resumed after 2 epochs"
    assert re.match(r"epoch 3/3: loss 0\.\d+, test accuracy \d+\.\d %, \d+\.\d\d s", lines[1])


@pytest.mark.multiproc
def test_collectives_are_shown_and_averaging_learns(tmp_path: Path) -> None:
    result = run(sys.executable, COLLECTIVES, "--rounds", "4", "--local-steps", "15", cwd=tmp_path)
    found = last_line(result, r"parameter averaging: test accuracy (\d+\.\d) % on each of 3 ranks, 4 rounds, \d+\.\d s")
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
    for which in ("ring", "built-in"):
        assert all(re.fullmatch(r"\d+\.\d ms", time) for time in shown[f"{which} all_reduce took"])
    assert len(set(shown["round 4/4, after averaging"])) == 1


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (DDP, ("--ranks", "0"), "--ranks: '0' is not a positive whole number"),
        (DDP, ("--batch-size", "1000"), "2 batches of 1000 are more than the 1437 images"),
        (DDP, ("--resume", "--checkpoint", "none.pt"), "--resume: there is no checkpoint none.pt; train without"),
        (DDP, ("--port", "70000"), "--port: master_port 70000: must be between 0 and 65535"),
        (COLLECTIVES, ("--ranks", "1"), "--ranks: at least 2"),
        (COLLECTIVES, ("--lr", "nan"), "--lr: 'nan' is not a positive number"),
    ],
)
def test_bad_arguments_are_explained(
    script: Path, arguments: tuple[str, ...], message: str, explanation_of: Callable[..., str]
) -> None:
    assert message in explanation_of(script.stem, *arguments)
