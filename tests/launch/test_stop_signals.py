"""Ctrl-C that other code swallows, and where it is left to the program; output that cannot be shown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from errno import EIO
from io import StringIO
from pathlib import Path

import pytest

from rpcdist._launch.output import JobOutput
from rpcdist._launch.progress import is_unread_output
from rpcdist._launch.rank_main import drop_unread_output, takes_output
from rpcdist._launch.reports import Exited, ProcessEnded, Raised
from rpcdist._launch.supervisor import StopSignals, kept_interrupt
from rpcdist.errors import ConfigError
from rpcdist.testing import LIMIT_S, eventually, wait_until_asleep

PIPE_BYTES = 1 << 16  # the most that a pipe holds


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def handler_of_python() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_is_swallowed_comes_again_at_the_end() -> None:
    is_over = False
    with pytest.raises(KeyboardInterrupt), kept_interrupt():
        with suppress(KeyboardInterrupt):
            press_ctrl_c()
        is_over = True
    assert is_over
    with pytest.raises(KeyboardInterrupt) as caught, kept_interrupt():
        try:
            press_ctrl_c()
        except KeyboardInterrupt:
            raise ImportError("a module that was not imported to its end") from None
    assert isinstance(caught.value.__cause__, ImportError)


def test_one_that_is_raised_passes_at_once() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, kept_interrupt():
        press_ctrl_c()
        raise AssertionError("it goes on")
    assert caught.value.__cause__ is None


def test_handlers_of_the_program_and_other_threads_are_left_alone() -> None:
    pressed: list[object] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        with kept_interrupt():
            press_ctrl_c()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert pressed == [signal.SIGINT]

    def enter() -> None:
        with kept_interrupt():
            pressed.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert pressed[1:] == [signal.default_int_handler]


def test_a_closed_terminal_stops_a_job_unless_the_program_ignores_that() -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.received == signal.SIGHUP
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_output_that_cannot_be_shown_does_not_keep_a_job_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    class ClosedTerminal(StringIO):
        def flush(self) -> None:
            raise OSError(EIO, "it was closed")

    output = JobOutput()
    worker = output.open("w", 0)
    monkeypatch.setattr("sys.stdout", ClosedTerminal())
    with pytest.raises(ConfigError, match="cannot be written to stdout: it was closed"):
        worker.write("stdout", b"seen by nobody")
    output.is_ending = True
    worker.write("stdout", b"seen by nobody")


@pytest.mark.parametrize("is_blocking", [True, False])
def test_output_waits_for_a_reader_that_is_stopped(is_blocking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor waited in the write, deaf to Ctrl-C; and a pipe that another process set so failed the job."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, is_blocking)
    lines = [b"%d\n" % number for number in range(2 * PIPE_BYTES // 4)]
    with open(read_end, "rb", buffering=0) as reader, open(write_end, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        output = JobOutput(takes_output=takes_output)
        worker = output.open("w", 0)
        for line in lines:
            worker.write("stdout", line)
        assert output.blocked() == {"stdout": write_end}
        received = b""
        while output.blocked():
            received += reader.read(PIPE_BYTES)
            output.write_on("stdout")
        stdout.close()
        received += reader.read(PIPE_BYTES)
    assert received == b"".join(lines)


FLOOD = """
def flood(rank):
    while True:
        print("a line that nobody reads", flush=True)
"""


@pytest.mark.multiproc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_ends_while_the_reader_of_its_output_is_stopped(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "flooding.py").write_text(FLOOD)
    command = [sys.executable, "-m", "rpcdist", "launch", "--workers", "2", "flooding:flood"]
    read_end, write_end = os.pipe()
    with open(read_end, "rb"), open(write_end, "wb") as stdout:
        with subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, cwd=tmp_path) as program:
            try:
                eventually(lambda: not takes_output(write_end), "the pipe is full")
                program.send_signal(number)
                assert program.wait(LIMIT_S) == 128 + number
            finally:
                program.kill()


CLUSTER = """
import sys
import rpcdist
from rpcdist import rpc

def write(num_bytes):
    print("x" * num_bytes, flush=True)

if __name__ == "__main__":
    with rpcdist.LocalCluster(2) as cluster:
        writing = rpc.rpc_async("worker1", write, (int(sys.argv[1]),), timeout=0)
        if len(sys.argv) > 2:
            writing.wait()
        print("closing", file=sys.stderr, flush=True)
"""


@pytest.mark.multiproc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("arguments", [[f"{8 * PIPE_BYTES}"], [f"{PIPE_BYTES + 1}", "done"]], ids=["calls", "output"])
def test_a_cluster_ends_while_the_reader_of_its_output_is_stopped(
    number: signal.Signals, arguments: list[str], tmp_path: Path
) -> None:
    """Its end waits for the call that writes, or for the reader. It was deaf to Ctrl-C and SIGTERM meanwhile."""
    program = tmp_path / "writes.py"
    program.write_text(CLUSTER)
    read_end, write_end = os.pipe()
    with open(read_end, "rb"), open(write_end, "wb") as stdout:
        with subprocess.Popen([sys.executable, program, *arguments], stdout=stdout, stderr=subprocess.PIPE) as cluster:
            try:
                assert cluster.stderr is not None and b"closing" in cluster.stderr.readline()
                eventually(lambda: not takes_output(write_end), "the pipe is full")
                wait_until_asleep(cluster.pid)
                cluster.send_signal(number)
                assert cluster.wait(LIMIT_S) in (128 + number, -number)
            finally:
                cluster.kill()


@pytest.mark.parametrize(
    ("redirection", "status", "says"),
    [
        (">&-", 0, ""),
        ("<&- >&- 2>/dev/null", 0, ""),
        (">/dev/full", 1, "the output cannot be written: No space left on device. Write it to another place\n"),
    ],
)
def test_commands_whose_stdout_is_closed_or_full(redirection: str, status: int, says: str) -> None:
    command = ["sh", "-c", f'exec "$0" -m rpcdist status {redirection}', sys.executable]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert (ended.returncode, ended.stderr) == (status, says)


CTRL_C_AT_AN_IMPORT = """
import os, signal, sys
from rpcdist.__main__ import main

class PressesCtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "rpcdist.collectives":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, PressesCtrlC())
sys.exit(main(["store", "127.0.0.1:0"]))
"""


def test_ctrl_c_while_the_store_imports_is_not_lost() -> None:
    """torch's C++ code drops the exception of one that comes while it imports, and the store then served for ever."""
    ended = subprocess.run([sys.executable, "-c", CTRL_C_AT_AN_IMPORT], capture_output=True, text=True, timeout=LIMIT_S)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("RPCDIST_STORE=127.0.0.1:")


def test_only_output_that_nobody_reads_is_redirected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    with open(write_end, "w") as unread, open(tmp_path / "output", "w") as file:
        monkeypatch.setattr("sys.stdout", file)
        monkeypatch.setattr("sys.stderr", unread)
        assert not drop_unread_output()
        os.close(read_end)
        named = JobOutput(prefix=True).open("w", 0)
        named.write("stderr", b"the begin of a line")
        named.close()
        worker = JobOutput().open("w", 0)
        with pytest.raises(BrokenPipeError):
            worker.write("stderr", b"seen by nobody")
        assert drop_unread_output()
        assert not drop_unread_output()
        worker.write("stdout", b"seen")
    assert (tmp_path / "output").read_text() == "seen"
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", StringIO())
    assert not drop_unread_output()


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (Raised("BrokenPipeError", "", True, 1.0), True),
        (ProcessEnded(-signal.SIGPIPE, 1.0), True),
        (Raised("ValueError", "", False, 1.0), False),
        (ProcessEnded(-signal.SIGKILL, 1.0), False),
        (Exited(1, 1.0), False),
    ],
)
def test_ranks_that_fail_because_nobody_reads(cause: Raised | ProcessEnded | Exited, expected: bool) -> None:
    assert is_unread_output(cause) is expected
