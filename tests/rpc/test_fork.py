"""Forked children use their parent's connections."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator

import pytest

from rpcdist.errors import ForkedProcess
from rpcdist.transport import fork
from rpcdist.transport.fork import ForkGuard, close_inherited_sockets

LIMIT_S = 60.0
SOON_S = 4.0  # the loader's workers look for their parent every 5 s, and would then end by themselves


class Recorder:
    def __init__(self, failing: bool = False) -> None:
        self.calls = 0
        self.failing = failing

    def after_fork_in_child(self) -> None:
        self.calls += 1
        if self.failing:
            raise ValueError("a participant that fails")


def test_without_communication_a_fork_changes_nothing() -> None:
    guard, recorder = ForkGuard(), Recorder()
    guard.register(recorder)
    guard.mark_running()
    guard.mark_stopped()
    guard.after_fork_in_child()
    guard.check_not_forked()
    assert recorder.calls == 0


def test_in_a_child_every_call_raises_and_everybody_is_told_even_if_one_fails() -> None:
    guard = ForkGuard()
    recorders = [Recorder(), Recorder(failing=True), Recorder()]
    for recorder in recorders:
        guard.register(recorder)
    guard.mark_running()
    with pytest.raises(ExceptionGroup) as caught:
        guard.after_fork_in_child()
    assert [type(exc) for exc in caught.value.exceptions] == [ValueError]
    assert [recorder.calls for recorder in recorders] == [1, 1, 1]
    with pytest.raises(ForkedProcess, match="spawn"):
        guard.check_not_forked()


def test_participants_are_held_weakly_in_the_parent_and_strongly_in_the_child() -> None:
    guard = ForkGuard()
    short_lived, long_lived = Recorder(), Recorder()
    guard.register(short_lived)
    guard.register(long_lived)
    guard.mark_running()
    gone, stays = weakref.ref(short_lived), weakref.ref(long_lived)
    del short_lived
    gc.collect()
    assert gone() is None
    guard.after_fork_in_child()
    del long_lived
    gc.collect()
    kept = stays()
    assert kept is not None and kept.calls == 1


def test_this_process_is_not_a_forked_child() -> None:
    fork.check_not_forked()
    assert not fork.in_forked_child()


def test_without_proc_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork, "_DESCRIPTORS", "/no/such/directory")
    assert close_inherited_sockets({1, 2, 3}) == 0


PLAIN = """
    import json, os, socket, sys
    from rpcdist.errors import ForkedProcess
    from rpcdist.transport import fork

    def pair(family, host):
        listener = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
        client = socket.create_connection(("127.0.0.1" if host == "::" else host, listener.getsockname()[1]))
        return listener, client, listener.accept()[0]

    listener, to_self, accepted = pair(*SERVER)        # our server, and a connection to it
    peer, to_peer, at_peer = pair(socket.AF_INET, "127.0.0.1")
    other, to_other, at_other = pair(socket.AF_INET, "127.0.0.1")
    here, there = socket.socketpair()
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    plain = os.open("/dev/zero", os.O_RDONLY)
    fork.note_server_port(listener.getsockname()[1])
    fork.note_peer_port(peer.getsockname()[1], HOST)
    if RUNNING:
        fork.mark_running()
    names = ["listener", "accepted", "to_peer", "peer", "at_peer", "to_other", "here", "datagrams"]
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        report = {name: os.readlink(f"/proc/self/fd/{globals()[name].fileno()}") for name in names}
        report["plain"] = os.readlink(f"/proc/self/fd/{plain}")
        report["inheritable"] = os.get_inheritable(to_peer.fileno())
        try:
            fork.check_not_forked()
        except ForkedProcess:
            report["forked"] = True
        fresh = socket.socket()
        fresh.connect(at_other.getsockname())           # new sockets work
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(7 if fork.in_forked_child() else 8)
        report["grandchild"] = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
        os.write(write_end, json.dumps(report).encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end) as reports:
        report = json.load(reports)
    os.waitpid(child, 0)
    for client, server in [(to_self, accepted), (to_peer, at_peer), (to_other, at_other)]:   # the parent's live on
        client.sendall(b"x")
        assert server.recv(1) == b"x"
    assert not fork.in_forked_child()
    print(json.dumps(report))
"""


def _script(text: str, **values: object) -> str:
    assignments = "".join(f"{name} = {value}\n" for name, value in values.items())
    return "import socket\n" + assignments + textwrap.dedent(text)


def _report(**values: object) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", _script(PLAIN, **values)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert isinstance(report, dict)
    return report


@pytest.mark.multiproc
@pytest.mark.parametrize("host", [None, "127.0.0.1", "localhost", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("server", ["(socket.AF_INET, '127.0.0.1')", "(socket.AF_INET6, '::')"])
def test_a_child_gives_up_our_connections_and_no_others(host: str | None, server: str) -> None:
    if "INET6" in server and not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    report = _report(RUNNING=True, HOST=repr(host), SERVER=server)
    ours = {"listener", "accepted", "to_peer"}
    for name in ("listener", "accepted", "to_peer", "peer", "at_peer", "to_other", "here", "datagrams"):
        assert (report[name] == "/dev/null") is (name in ours), name
    assert (report["plain"], report["inheritable"], report["forked"]) == ("/dev/zero", False, True)
    assert report["grandchild"] == 7


@pytest.mark.multiproc
def test_a_peer_on_another_host_is_not_mistaken() -> None:
    report = _report(RUNNING=True, HOST="'10.1.2.3'", SERVER="(socket.AF_INET, '127.0.0.1')")
    assert str(report["to_peer"]).startswith("socket:") and report["listener"] == "/dev/null"


@pytest.mark.multiproc
def test_a_process_that_does_not_communicate_forks_as_ever() -> None:
    report = _report(RUNNING=False, HOST="None", SERVER="(socket.AF_INET, '127.0.0.1')")
    assert all(str(report[name]).startswith("socket:") for name in ("listener", "accepted", "to_peer"))
    assert "forked" not in report and report["grandchild"] == 8


AFTER_A_STORE = """
    import gc, os, signal
    from rpcdist import collectives as dist

    signal.alarm(50)
    gc.disable()  # what the store leaves is garbage at the fork
    server = dist.TCPStore("127.0.0.1", 0, 1, True)
    client = dist.TCPStore("127.0.0.1", server.port, 1, wait_for_workers=False)
    client.set("key", "value")
    client.close()
    server.close()
    del client, server
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # children inherit no alarm
        gc.collect()
        again = dist.TCPStore("127.0.0.1", 0, 1, True)
        again.set("key", "value")
        os._exit(7 if again.get("key") == b"value" else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.multiproc
def test_a_child_collects_no_garbage_of_ended_nodes() -> None:
    script = _script(AFTER_A_STORE)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.stdout.split() == ["7"], ran.stderr


LOADER = """
    import json, sys
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from rpcdist.transport import fork

    server = socket.create_server(("127.0.0.1", 0))
    connection = socket.create_connection(("127.0.0.1", PORT))
    fork.note_server_port(server.getsockname()[1])
    fork.note_peer_port(PORT, "127.0.0.1")
    if RUNNING:
        fork.mark_running()
    data = TensorDataset(torch.arange(1000.0))
    loader = DataLoader(data, batch_size=1, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    next(batches)
    facts = {"workers": [worker.pid for worker in batches._workers], "port": server.getsockname()[1]}
    connection.sendall(json.dumps(facts).encode() + b"\\n")
    sys.stdin.read()
"""


@contextlib.contextmanager
def _training_process(port: int, running: bool) -> Iterator[subprocess.Popen[bytes]]:
    script = _script(LOADER, PORT=port, RUNNING=running)
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)
        assert process.stdin is not None
        process.stdin.close()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.multiproc
@pytest.mark.parametrize("running", [True, False], ids=["guarded", "control"])
def test_a_killed_parent_is_noticed_although_its_data_loader_workers_live(running: bool) -> None:
    workers: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        with _training_process(listener.getsockname()[1], running) as process:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                connection.settimeout(LIMIT_S)
                facts = json.loads(lines.readline())
                workers = facts["workers"]
                try:
                    assert len(workers) == 2 and all(map(_alive, workers))
                    os.kill(process.pid, signal.SIGKILL)
                    connection.settimeout(SOON_S if running else 1.0)
                    if running:
                        assert lines.read(1) == b""
                        process.wait(LIMIT_S)  # its last socket is closed by then
                        with pytest.raises(ConnectionRefusedError):
                            socket.create_connection(("127.0.0.1", facts["port"]), timeout=1.0).close()
                    else:  # the workers hold the connection open: what this module is for
                        with pytest.raises(TimeoutError):
                            lines.read(1)
                    assert all(map(_alive, workers))
                finally:
                    for pid in workers:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
