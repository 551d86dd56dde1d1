"""`rpcdist.launch` with real processes: what it hands each, how failures are named, and that nobody is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import launch_functions as functions
import psutil
import pytest
from program_sessions import (
    LIMIT_S,
    STOP_LIMIT_S,
    assert_no_process_left,
    read_until,
    run,
    session_members,
    start,
)

from rpcdist import launch
from rpcdist._launch import launching, local_ranks
from rpcdist._launch.progress import Progress
from rpcdist.errors import ConfigError, DeadlineExceeded, ProcessFailed, SerializationError

PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
{imports}
from launch_functions import *
from rpcdist import launch

def fail(rank):
    print("what it printed before")
    raise ValueError(f"no by {{rank}}")

if __name__ == "__main__":
    {statement}
"""


def program(tmp_path: Path, statement: str, imports: str = "") -> tuple[str, Path]:
    """The command of a program that calls `launch`."""
    script = tmp_path / "program.py"
    folder = str(Path(__file__).parent)
    script.write_text(PROGRAM.format(folder=folder, statement=statement, imports=imports))
    return sys.executable, script


@pytest.mark.multiproc
def test_each_rank_gets_its_place_and_returns_its_result(no_launcher: None) -> None:
    results = launch(functions.describe, ("word",), workers=3, env={"EXTRA": "more"})
    assert [(rank, word, variables, extra) for rank, _, word, variables, extra in results] == [
        (rank, "word", f"{rank} {rank} 3 127.0.0.1", "more") for rank in range(3)
    ]
    assert len({os.getpid(), *(pid for _, pid, *_ in results)}) == 4
    assert "EXTRA" not in os.environ


@pytest.mark.multiproc
def test_a_large_result_and_the_port_for_rank_0(no_launcher: None) -> None:
    assert launch(functions.make, (5_000_000,), workers=2) == [bytes([rank]) * 5_000_000 for rank in range(2)]
    assert launch(functions.listen_at_the_master_port, workers=2) == ["hello", ""]


@pytest.mark.multiproc
def test_the_interpreter_of_a_rank_ends_properly(tmp_path: Path, no_launcher: None) -> None:
    """For example, the output that a module has not flushed is written."""
    launch(functions.leave_open, (str(tmp_path),), workers=2)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["last words"] * 2


@pytest.mark.multiproc
def test_the_traceback_of_the_rank_that_failed(tmp_path: Path) -> None:
    """Only one is shown, without our frames inside it; the output of the rank is not lost."""
    script = program(tmp_path, "launch(fail, workers=2)")
    result = run(*script)
    assert result.returncode == 1
    assert "what it printed before" in result.stdout
    assert result.stderr.count("Traceback") == 2  # this process's, then the rank's
    expected = (
        r"rpcdist\.errors\.ProcessFailed: rank (\d) raised ValueError\n\nTraceback \(most recent call last\):\n"
        r'  File ".*/program\.py", line \d+, in fail\n    raise ValueError\(f"no by \{rank\}"\)\nValueError: no by \1\n'
    )
    assert re.search(expected + r"\Z", result.stderr), result.stderr


@pytest.mark.multiproc
def test_the_cause_is_named_rather_than_its_consequence(no_launcher: None) -> None:
    with pytest.raises(ProcessFailed, match="rank 1 raised KeyError") as caught:
        launch(functions.fail_after_its_peer, workers=2)
    assert caught.value.rank == 1
    assert caught.value.traceback.endswith("KeyError: 'the cause'\n")


@pytest.mark.multiproc
def test_a_process_that_ends_without_a_word_is_named(no_launcher: None) -> None:
    with pytest.raises(ProcessFailed, match=r"^rank 1 was killed by SIGKILL before its function returned$") as caught:
        launch(functions.be_killed, workers=2)
    assert caught.value.exit_code == -signal.SIGKILL
    with pytest.raises(ProcessFailed, match=r"^rank 1 ended with exit code 3 before its function returned$") as caught:
        launch(functions.exit_at_once, workers=2)
    assert caught.value.exit_code == 3


@pytest.mark.multiproc
def test_children_of_a_rank_neither_hide_its_end_nor_outlive_it(tmp_path: Path, no_launcher: None) -> None:
    path = tmp_path / "children"
    with pytest.raises(ProcessFailed, match="rank 1 ended with exit code 4"):
        launch(functions.grandchild_then_exit, (str(path),), workers=2, join_timeout_s=60)
    children = [int(pid) for pid in path.read_text().split()]
    assert len(children) == 2
    psutil.wait_procs([psutil.Process(pid) for pid in children if psutil.pid_exists(pid)], timeout=STOP_LIMIT_S)
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in children)


@pytest.mark.multiproc
def test_files_of_forked_children_stay_open(no_launcher: None) -> None:
    assert launch(functions.fork_twice, workers=1) == [0]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("how", "code", "last_line"), [("return", 0, ""), ("exit", 7, ""), ("raise", 1, "ValueError: said by the child")]
)
def test_forked_children_that_leave_the_function_end_like_any_program(
    how: str, code: int, last_line: str, no_launcher: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(functions.fork_and_leave, (how,), workers=1) == [code]
    assert capfd.readouterr().err.strip().rpartition("\n")[2] == last_line


@pytest.mark.multiproc
@pytest.mark.parametrize(("code", "expected"), [("too low", "too low"), (7, 7)])
def test_sys_exit_of_a_rank_is_the_exit_of_the_program(
    code: object, expected: object, no_launcher: None, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SystemExit) as caught:
        launch(functions.exit_with, (code,), workers=2)
    assert caught.value.code == expected
    lines = [one.getMessage() for one in caplog.records if "sys.exit" in one.getMessage()]
    assert lines == (["worker1 called sys.exit(7), which ends the job"] if code == 7 else [])


@pytest.mark.multiproc
def test_results_and_exceptions_that_cannot_be_pickled(no_launcher: None) -> None:
    assert launch(functions.exit_with, (0,), workers=2) == [None, None]
    with pytest.raises(ProcessFailed, match=r"rank 0 raised TypeError(.|\n)*cannot pickle '_thread.lock'"):
        launch(functions.return_unpicklable, workers=1)
    with pytest.raises(ProcessFailed, match=r"rank 0 raised raise_unpicklable\.<locals>\.Local"):
        launch(functions.raise_unpicklable, workers=1)


@pytest.mark.multiproc
def test_a_job_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, no_launcher: None) -> None:
    monkeypatch.setattr(local_ranks, "CLOSE_LIMIT_S", 0.2)
    with pytest.raises(DeadlineExceeded, match=r"after 1\.5 s these of 2 ranks had not ended: 0, 1"):
        launch(functions.hang_deaf, workers=2, join_timeout_s=1.5)
    monkeypatch.setattr(launching, "Progress", partial(Progress, exit_limit_s=0.2))
    with pytest.raises(ProcessFailed, match="rank 0 returned, but its process did not end"):
        launch(functions.hang_in_a_thread, workers=1)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("function", "signum", "whole_group", "code", "said"),
    [
        ("wait_for_ever", signal.SIGINT, True, 130, "\ninterrupted\n"),
        ("wait_for_ever", signal.SIGINT, False, 130, "\ninterrupted\n"),
        ("wait_for_ever", signal.SIGTERM, False, 143, "terminated\n"),
        ("wait_for_ever", signal.SIGHUP, True, 129, "terminated\n"),
        ("linger", signal.SIGINT, True, 130, "\ninterrupted\n"),
    ],
    ids=["ctrl-c in a terminal", "SIGINT", "SIGTERM", "SIGHUP", "ctrl-c when the functions have returned"],
)
def test_a_signal_ends_everything(
    function: str, signum: int, whole_group: bool, code: int, said: str, tmp_path: Path
) -> None:
    with start(*program(tmp_path, f"launch({function}, workers=2)")) as process:
        assert process.stdout is not None
        read_until(process.stdout, "lingers" if function == "linger" else "runs")
        (os.killpg if whole_group else os.kill)(process.pid, signum)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert not session_members(process.pid)
    assert (process.returncode, errors) == (code, said)


@pytest.mark.multiproc
@pytest.mark.parametrize("while_they_start", [True, False])
def test_nobody_outlives_a_parent_that_is_killed(while_they_start: bool, tmp_path: Path) -> None:
    imports = "if __name__ != '__main__': __import__('threading').Event().wait(60)" if while_they_start else ""
    with start(*program(tmp_path, "launch(wait_for_ever, workers=2)", imports)) as process:
        assert process.stdout is not None
        if while_they_start:
            deadline = time.monotonic() + LIMIT_S
            while len(session_members(process.pid)) < 3:  # no output tells
                assert time.monotonic() < deadline
        else:
            read_until(process.stdout, "runs")
        process.kill()
        assert_no_process_left(process.pid, STOP_LIMIT_S)


@pytest.mark.multiproc
def test_a_program_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text("from rpcdist import LocalCluster, launch\n\nlaunch(print, workers=2)\n")
    for line, what in ((3, "launch"), (5, "LocalCluster")):
        result = run(sys.executable, script)
        where = f'{script}, line {line}: put this call of {what} under `if __name__ == "__main__":`'
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr == f"{where}, since each new process imports this file\n"
        script.write_text("import rpcdist\n\nif True:\n    # a comment\n    rpcdist.LocalCluster(2).start()\n")


MAIN_MODULE = """
from functions import named
from rpcdist import launch

def double(rank, number):
    assert __name__ == "__mp_main__"
    return 2 * number + rank

if __name__ == "__main__":
    print(launch(double, (4,), workers=2), launch(named, workers=1))
"""


@pytest.mark.multiproc
@pytest.mark.parametrize("command", [["-m", "tool"], ["-m", "tool.inner"], ["tool"], ["tool.zip"]], ids=" ".join)
def test_functions_of_a_main_module_that_is_a_folder(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package, a package in one, whose main module imports its neighbours, and a folder or archive that is none."""
    inner = tmp_path / "tool" / "inner"
    inner.mkdir(parents=True)
    relative = MAIN_MODULE.replace("from functions", "from .functions" if command[0] == "-m" else "from functions")
    for folder in (inner.parent, inner):
        (folder / "__init__.py").touch()
        (folder / "__main__.py").write_text(relative)
        (folder / "functions.py").write_text("def named(rank):\n    return __name__\n")
    shutil.make_archive(str(inner.parent), "zip", inner.parent)
    monkeypatch.chdir(tmp_path)
    result = run(sys.executable, *command)
    package = f"{command[1]}." if command[0] == "-m" else ""
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"[8, 9] ['{package}functions']\n"


@pytest.mark.multiproc
@pytest.mark.parametrize("command", [["-m", "tool"], ["tool"]], ids=" ".join)
def test_a_main_module_that_only_runs_the_program_runs_once(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "__main__.py").write_text(
        "import functions\nfrom rpcdist import launch\n\nprint(launch(functions.named, workers=2))\n"
    )
    (tmp_path / "functions.py").write_text("def named(rank):\n    return __name__\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = run(sys.executable, *command)
    assert (result.returncode, result.stdout, result.stderr) == (0, "['functions', 'functions']\n", "")


# ---------------------------------------------------------------- without processes


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def test_under_torchrun_the_function_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "host")):
        monkeypatch.setenv(name, value)
    assert launch(functions.describe, ("word",), workers=2) == [(1, os.getpid(), "word", "1 1 2 host", None)]
    # The launcher gives its ranks their devices, on several machines perhaps.
    assert len(launch(functions.describe, ("word",), workers=2, resources={"GPU": 1000})) == 1
    with pytest.raises(ConfigError, match="workers=3, but the launcher started WORLD_SIZE=2"):
        launch(functions.describe, ("word",), workers=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers must be at least 1, not 0"),
        ({"workers": 2, "join_timeout_s": 0}, "join_timeout_s must be above 0, not 0; None means no limit"),
        ({"workers": 2, "env": {"RANK": "0"}}, "env must not have RANK: `launch` sets it"),
        ({"workers": 2, "master_port": 70000}, "master_port 70000: must be between 0 and 65535"),
    ],
)
def test_wrong_arguments_are_explained(arguments: dict[str, Any], message: str, no_launcher: None) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        launch(functions.wait_for_ever, **arguments)


def test_a_port_in_use_is_an_error(no_launcher: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"master_port {port}: Address already in use"):
            launch(functions.wait_for_ever, workers=1, master_port=port)


def test_a_function_that_cannot_be_sent_is_an_error(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]  # pytest's script, or the `python -c` of a process that shares its tests
    monkeypatch.setattr(main, "__file__", getattr(main, "__file__", __file__), raising=False)
    with pytest.raises(
        SerializationError, match=r"a new process cannot find .*<lambda> by name.* Define the function at the top"
    ) as caught:
        launch(lambda rank: None, workers=1)
    assert caught.value.__cause__ is None, "one error, without that of pickle"
    with pytest.raises(SerializationError, match="with 1 arguments cannot be sent to a new process: cannot pickle"):
        launch(print, (threading.Lock(),), workers=1)
