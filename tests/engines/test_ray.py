"""Jobs on Ray: one launch on one node in `make test` where Ray is installed; the rest in `make engines`."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from program_sessions import environment, read_until

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.timeout(400),  # Ray alone takes half a minute to start on a busy machine
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: make engines installs it"
    ),
]
ONLY_ENGINES = pytest.mark.skipif(os.environ.get("RPCDIST_ENGINES") != "1", reason="make engines runs it")

PROGRAMS = Path(__file__).with_name("ray_programs.py")
LIMIT_S = 300.0


def variables(folder: Path) -> dict[str, str]:
    quiet = {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    without_token = {name: value for name, value in environment().items() if name != "RPCDIST_TOKEN"}
    return {**without_token, **quiet, "RPCDIST_TEST_FOLDER": str(folder), "XDG_RUNTIME_DIR": str(folder)}


def run(name: str, folder: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(PROGRAMS), name],
        cwd=PROGRAMS.parent,
        env=variables(folder),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0 and "done" in ran.stdout.splitlines(), ran.stdout + ran.stderr


def test_one_node(tmp_path: Path) -> None:
    run("on_one_node", tmp_path)


@ONLY_ENGINES
@pytest.mark.parametrize("name", ["lost_ranks", "lost_node", "cluster"])
def test_workers_come_and_go(name: str, tmp_path: Path) -> None:
    run(name, tmp_path)


@ONLY_ENGINES
@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="Ray Train is not installed: ray[train]")
def test_ray_train(tmp_path: Path) -> None:
    run("ray_train", tmp_path)


@ONLY_ENGINES
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, str(PROGRAMS), "interrupted"],
        cwd=PROGRAMS.parent,
        env=variables(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            read_until(process.stdout, "waits")
            read_until(process.stdout, "waits")
            family = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 130, errors
            _, alive = psutil.wait_procs(family, timeout=60)
            assert not alive, alive
        finally:
            process.kill()
