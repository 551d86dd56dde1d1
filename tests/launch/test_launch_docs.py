"""The programs in docs/launch.md do what the page says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from docs_programs import LIMIT_S, blocks, environment, page, run
from full_sets import FULL_ONLY

PROGRAMS = [code for _, code in blocks(page("docs/launch.md"), "python")]
OUTPUTS = [text for _, text in blocks(page("docs/launch.md"), "text")]


@pytest.mark.multiproc
def test_the_cluster_runs(tmp_path: Path) -> None:
    (tmp_path / "cluster.py").write_text(PROGRAMS[0])
    [printed] = run([([sys.executable, "cluster.py"], environment())], tmp_path)
    assert f"$ python cluster.py\n{printed}" == OUTPUTS[0]


@FULL_ONLY  # `test_torchrun.py` always runs it, in processes of torchrun
@pytest.mark.multiproc
def test_the_launched_program_runs(tmp_path: Path) -> None:
    (tmp_path / "average.py").write_text(PROGRAMS[1])
    [printed] = run([([sys.executable, "average.py"], environment())], tmp_path)
    assert f"$ python average.py\n{printed}" == OUTPUTS[1]


@pytest.mark.multiproc
def test_the_roles_run(tmp_path: Path) -> None:
    (tmp_path / "roles.py").write_text(PROGRAMS[2])
    [printed] = run([([sys.executable, "roles.py"], environment())], tmp_path)
    assert f"$ python roles.py\n{printed}" == OUTPUTS[2]


@pytest.mark.multiproc
def test_the_rank_that_failed_first_is_shown(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(PROGRAMS[3])
    result = subprocess.run(
        [sys.executable, "fails.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.replace(f"{tmp_path}/", "").endswith(OUTPUTS[3])
