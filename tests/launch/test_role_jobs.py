"""`launch` with roles, restarts, files for the output, and the commands of a shell, with real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import role_functions as functions
from program_sessions import LIMIT_S, environment, read_until, session_members, start

from rpcdist import LocalCluster, Role, launch, rpc
from rpcdist._launch.output import JobOutput
from rpcdist.errors import ConfigError, ProcessFailed
from rpcdist.private_files import runtime_folder
from rpcdist.testing import Program, free_port

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # no other test's jobs


def test_roles_names_output_and_daemons(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    roles = [
        Role("server", functions.wait_for_ever, 1, daemon=True),
        Role("trainer", functions.name_and_threads, 2, ("hello",), resources={"CPU": 3}),
    ]
    results = launch(roles=roles, log_dir=tmp_path / "logs")
    assert results == {
        "server": [None],
        "trainer": [(1, "trainer0", "trainer", "3"), (2, "trainer1", "trainer", "3")],
    }
    lines = capfd.readouterr().out.splitlines()
    assert {"[trainer0] says hello", "[trainer1] says hello"} <= set(lines)
    assert set(lines) <= {"[trainer0] says hello", "[trainer1] says hello", "[server0] waits"}
    assert (tmp_path / "logs" / "trainer1.0.log").read_text() == "says hello\n"
    assert not list(tmp_path.glob("rpcdist/*"))  # the record of the job is gone


def test_the_last_lines_of_a_rank_that_died_are_in_the_error() -> None:
    with pytest.raises(ProcessFailed) as caught:
        launch(roles=[Role("waiter", functions.wait_for_ever, 1), Role("bad", functions.exit_after_lines, 1)])
    lines = "".join(f"line {number}\n" for number in range(10, 30))
    expected = "bad0 (rank 1) ended with exit code 3 before its function returned; its last lines:\n\n" + lines
    assert str(caught.value) == expected.rstrip()
    assert (caught.value.worker, caught.value.exit_code, caught.value.output) == ("bad0", 3, lines)
    died = "ended with exit code 3 before its function returned"
    assert caught.value.outcomes == {"waiter0": "stopped", "bad0": died}


def test_killed_ranks_come_back_under_their_names(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0, to which the others connect, and then another one."""
    folders = {name: str(tmp_path / name) for name in ("first", "second")}
    for folder in folders.values():
        Path(folder).mkdir()
    dying = [Role(name, functions.die_once, 1, (folder,), max_restarts=1) for name, folder in folders.items()]
    victims = {f"{name}0": folder for name, folder in folders.items()}
    results = launch(roles=[*dying, Role("caller", functions.call_until_back, 1, (victims,))], log_dir=tmp_path)
    assert results == {"first": ["came back"], "second": ["came back"], "caller": [[(True, True)] * 2]}
    for name in victims:
        assert sorted(path.name for path in tmp_path.glob(f"{name}.*")) == [f"{name}.0.log", f"{name}.1.log"]


def test_restarts_that_are_used_up_are_counted(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ProcessFailed, match="rank 0 ended with exit code 3") as caught:
        launch(functions.exit_after_lines, workers=1, max_restarts=1)
    died = "ended with exit code 3 before its function returned"
    assert caught.value.__notes__ == [f"worker0 {died}, and was restarted 1 of 1 times"]
    assert caught.value.outcomes == {"worker0": f"{died} (restarted 1 of 1 times)"}
    assert capfd.readouterr().err.count("line 29\n") == 2


def test_the_output_of_a_cluster(no_agent: None, tmp_path: Path) -> None:
    with LocalCluster(2, log_dir=tmp_path, resources={"CPU": 5}, env=[{}, {"EXTRA": "more"}]) as cluster:
        assert rpc.rpc_sync("worker1", os.getenv, ("OMP_NUM_THREADS",)) == "5"
        assert rpc.rpc_sync("worker1", os.getenv, ("EXTRA",)) == "more"
        rpc.rpc_sync("worker1", print, ("said by a worker",))
        with pytest.raises(ConfigError, match="no process was started for 'worker0'; there are worker1"):
            cluster.logs("worker0")
    assert cluster.logs("worker1") == "said by a worker\n"
    assert (tmp_path / "worker1.0.log").read_text() == "said by a worker\n"
    with pytest.raises(ConfigError, match=r"env has .* for 'worker0', which is this process"):
        LocalCluster(2, env=[{"A": "b"}, {}])


@pytest.mark.parametrize("chunks", [[b"one\ntw", b"o\nbar\rthree"], [b"one\ntwo\nbar\rthree"]])
def test_lines_have_names_however_they_arrive(chunks: list[bytes], capfd: pytest.CaptureFixture[str]) -> None:
    output = JobOutput(prefix=True).open("w", 0)
    for chunk in chunks:
        output.write("stdout", chunk)
    output.write("stderr", b"x" * 10_000)
    output.close()
    out, err = capfd.readouterr()
    assert out.splitlines() == ["[w] one", "[w] two", "[w] bar", "[w] three"]
    assert err == f"[w] {'x' * 8192}[w] {'x' * 1808}\n"


def test_a_long_line_in_many_chunks_is_copied(capfd: pytest.CaptureFixture[str]) -> None:
    """Each byte is looked at a few times: a search for the end of the line from every byte took minutes."""
    output = JobOutput(prefix=True).open("w", 0)
    for _ in range(160):
        output.write("stdout", b"x" * (1 << 16))
    output.close()
    assert capfd.readouterr().out.replace("[w] ", "") == "x" * (160 << 16) + "\n"


def launched_beside(job: dict[str, Any], other: dict[str, Any]) -> str:
    """Runs a job, and another one from its rank's process; returns the error of that."""
    return launch(functions.launch_another, (other,), workers=1, **job)[0]


def test_jobs_at_once_do_not_share_a_log_a_port_or_a_name(tmp_path: Path) -> None:
    """The logs of one would replace those of the other, and its ranks would join the other's."""
    logs, port = tmp_path / "logs", free_port()
    text = launched_beside({"log_dir": logs}, {"log_dir": logs})
    assert text == f"another job that is running writes the log {logs / 'worker0.0.log'}; use another log_dir"
    assert launched_beside({"log_dir": logs}, {"log_dir": tmp_path / "more"}) == ""
    assert "another" not in launched_beside({"log_dir": logs}, {})
    text = launched_beside({"master_port": port, "name": "one"}, {"master_port": port, "name": "two"})
    assert re.fullmatch(rf"process \d+ already runs the job 'one' at 127.0.0.1:{port}: choose another port", text)
    text = launched_beside({"name": "one"}, {"name": "one"})
    assert re.fullmatch(r"process \d+ already runs a job 'one': choose another name", text)


def test_a_log_is_free_after_its_job_though_a_forked_process_has_it_open(tmp_path: Path) -> None:
    output = JobOutput(log_dir=tmp_path).open("w", 0)
    ended, end = os.pipe()
    if (child := os.fork()) == 0:
        os.close(end)
        os.read(ended, 1)
        os._exit(0)
    output.close()
    JobOutput(log_dir=tmp_path).open("w", 0).close()
    os.close(ended)
    os.close(end)
    os.waitpid(child, 0)


@pytest.mark.parametrize("name", ["-n", "two\nlines", "\x1b[31m", "\ud800", 5])
def test_names_that_commands_cannot_get(name: Any) -> None:
    with pytest.raises(ConfigError, match="the name of a job is a printable text"):
        launch(functions.return_nothing, workers=1, name=name)


def test_the_name_of_a_role_is_a_text() -> None:
    with pytest.raises(ConfigError, match="a role needs a name, with which the names of its workers begin, not 5"):
        launch(roles=[Role(5, functions.return_nothing, 1)])  # type: ignore[arg-type]


@pytest.mark.parametrize("start", ["launch(print, workers=1)", "LocalCluster(2).start()"])
def test_a_current_folder_that_was_deleted(start: str, tmp_path: Path) -> None:
    code = f"""
    import os, sys
    import torch
    from rpcdist import LocalCluster, launch

    torch.ones(2, 2) @ torch.ones(2, 2)  # torch's library for it does not load in a deleted folder
    os.mkdir(sys.argv[1])
    os.chdir(sys.argv[1])
    os.rmdir(sys.argv[1])
    {start}
    """
    with Program(textwrap.dedent(code), tmp_path / "gone") as program:
        assert program.end() == 1
    assert "ConfigError: the current folder of this process was deleted; call os.chdir first" in program.output


# ---------------------------------------------------------------- from a shell

FOLDER = Path(__file__).parent


def command(*arguments: str, folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rpcdist", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_a_job_is_seen_and_stopped_from_a_shell(tmp_path: Path) -> None:
    arguments = [
        "--role",
        "waiter=2:role_functions:wait_for_ever",
        "--name",
        "job",
        "--log-dir",
        str(tmp_path / "logs"),
    ]
    with start(sys.executable, "-m", "rpcdist", "launch", *arguments, cwd=FOLDER) as process:
        assert process.stdout is not None
        first = read_until(process.stdout, "waits")
        second = read_until(process.stdout, "waits")
        assert sorted([first, second]) == ["[waiter0] waits\n", "[waiter1] waits\n"]
        status = command("status").stdout
        where = re.escape(str(tmp_path / "logs"))
        assert re.fullmatch(
            rf"job: at 127\.0\.0\.1:\d+, process {process.pid}, logs in {where}\n  waiter0  runs\n  waiter1  runs\n",
            status,
        )
        address = re.findall(r"127\.0\.0\.1:\d+", status)[0]
        assert command("status", address).stdout == status
        logs = command("logs", "job", "waiter1").stdout
        assert logs == f"==> {tmp_path / 'logs' / 'waiter1.0.log'}\nwaits\n"
        wrong = command("logs", "job", "trainer0")
        assert (wrong.returncode, wrong.stderr) == (
            1,
            "ConfigError: the job job has no worker 'trainer0'; there are waiter0, waiter1\n",
        )
        stopped = command("stop", "job")
        assert (stopped.returncode, stopped.stdout) == (0, "job has ended\n"), stopped.stderr
        _, errors = process.communicate(timeout=LIMIT_S)
        assert not session_members(process.pid)
    assert (process.returncode, errors) == (128 + signal.SIGTERM, "terminated\n")
    assert command("status").stdout == "no job of this user runs on this machine\n"


def test_what_a_killed_program_leaves_is_no_job() -> None:
    with start(
        sys.executable, "-m", "rpcdist", "launch", "--workers", "1", "role_functions:wait_for_ever", cwd=FOLDER
    ) as process:
        assert process.stdout is not None
        read_until(process.stdout, "waits")
        process.kill()
        process.wait(LIMIT_S)
        unfinished = Path(runtime_folder(create=False), f"{process.pid}-1.json.new")  # it was writing the next one
        unfinished.touch()
        wrong = command("stop", "job")
    assert not [name for name in os.listdir(unfinished.parent) if name.startswith(f"{process.pid}-")]
    assert (wrong.returncode, wrong.stderr) == (
        1,
        "ConfigError: no job 'job' of this user runs on this machine; running jobs: none\n",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "pass MODULE:FUNCTION and --workers, or --role"),
        (["--workers", "2", "role_functions"], "'role_functions': write MODULE:FUNCTION"),
        (["--workers", "2", "no_such_module:f"], "No module named 'no_such_module'"),
        (["--workers", "2", "role_functions:nothing"], "the module role_functions has no function 'nothing'"),
        (
            ["--workers", "2", "role_functions:nam_and_threads"],
            "no function 'nam_and_threads'; is it name_and_threads?",
        ),
        (["--workers", "2", "role_functions:"], "'role_functions:': write MODULE:FUNCTION"),
        (["--workers", "2", ":f"], "':f': write MODULE:FUNCTION"),
        (["--workers", "2", "./role_functions.py:f"], "write the module as `import` does, role_functions:f\n"),
        (["--workers", "2", "/a/b.py:f"], "as `import` does, b:f, and start the command in /a\n"),
        (["--workers", "2", "role_functions:f", "--daemon", "b"], "no --role defines 'b'; define roles with --role"),
        (["--workers", "2", "role_functions:f", "--max-restarts", "b=1"], "no --role defines 'b'"),
        (["--workers", "2", "role_functions:f", "--env", "A"], "--env A: write NAME=VALUE"),
        (["--workers", "2", "--role", "a=1:role_functions:f"], "pass MODULE:FUNCTION and --workers, or --role"),
        (["--role", "a=1:role_functions:f", "role_functions:f"], "pass MODULE:FUNCTION and --workers, or --role"),
        (["--role", "a:role_functions:wait_for_ever"], "write NAME=N:MODULE:FUNCTION"),
        (["--role", "=1:role_functions:wait_for_ever"], "write NAME=N:MODULE:FUNCTION"),
        (["--role", "a=x:role_functions:wait_for_ever"], "with a number for N"),
        (["--role", "a=1:role_functions:wait_for_ever", "--daemon", "b"], "no --role defines 'b'; the roles are a"),
        (["--role", "a=1:role_functions:wait_for_ever", "--max-restarts", "b=2"], "no --role defines 'b'"),
        (["--role", "a=1:role_functions:wait_for_ever", "--max-restarts", "many"], "write a number, or NAME=NUMBER"),
    ],
)
def test_wrong_commands_are_explained(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rpcdist.__main__ import main

    monkeypatch.syspath_prepend(str(FOLDER))
    assert main(["launch", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise RuntimeError('no data')", "RuntimeError: no data"),
        ("def f(rank:", "SyntaxError: '(' was never closed"),
    ],
)
def test_a_module_that_cannot_be_imported_is_shown_at_its_line(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rpcdist.__main__ import main

    (tmp_path / "broken_module.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["launch", "--workers", "2", "broken_module:f"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "ConfigError: broken_module:f: the import of broken_module failed"
    assert lines[-1] == message
    files = [line for line in lines if line.startswith("  File")]
    assert len(files) == 1 and "broken_module.py" in files[0]


def test_ctrl_c_ends_a_command_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rpcdist.__main__ import main

    (tmp_path / "interrupted_module.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        main(["launch", "--workers", "2", "interrupted_module:f"])
    assert (caught.value.code, capsys.readouterr().err) == (130, "\ninterrupted\n")
    program = tmp_path / "program.py"
    program.write_text("raise KeyboardInterrupt")
    # The program takes the place of the main module, which every process imports that this one starts.
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    with pytest.raises(KeyboardInterrupt) as shown:  # the user's program ends as under `python program.py`
        main(["run", str(program)])
    assert not isinstance(shown.value, SystemExit)


# ---------------------------------------------------------------- output that nobody reads


@pytest.mark.parametrize("of_command", [False, True], ids=["program", "command"])
def test_a_job_whose_output_nobody_reads_ends_quietly(of_command: bool, tmp_path: Path) -> None:
    script = tmp_path / "talks.py"
    script.write_text(
        "import rpcdist\n\ndef talk(rank):\n    while True:\n        print('a line')\n\n"
        "if __name__ == '__main__':\n    rpcdist.launch(talk, workers=2)\n"
    )
    arguments = ["-m", "rpcdist", "launch", "--workers", "2", "talks:talk"] if of_command else [str(script)]
    with start(sys.executable, *arguments, cwd=tmp_path) as process:
        assert process.stdout is not None and process.stderr is not None
        read_until(process.stdout, "a line")
        process.stdout.close()  # as `head -n 1` does
        errors = process.stderr.read()
        assert (process.wait(LIMIT_S), errors) == (128 + signal.SIGPIPE, "")
        assert not session_members(process.pid)
