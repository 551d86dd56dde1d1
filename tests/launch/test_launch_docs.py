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
@pytest.mark.parametrize(
    ("number", "name"),
    [
        (0, "cluster.py"),
        pytest.param(1, "average.py", marks=FULL_ONLY),  # `test_torchrun.py` always runs it, in processes of torchrun
        (2, "roles.py"),
    ],
)
def test_the_programs_print_what_the_page_says(tmp_path: Path, number: int, name: str) -> None:
    (tmp_path / name).write_text(PROGRAMS[number])
    [printed] = run([([sys.executable, name], environment())], tmp_path)
    assert f"$ python {name}\n{printed}" == OUTPUTS[number]


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
