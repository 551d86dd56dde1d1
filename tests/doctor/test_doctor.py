"""The command against workers of this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from doctor_functions import diagnose
from inside_agents import current_agent

from rpcdist.__main__ import main
from rpcdist.testing import Worker, WorkerPool, free_port

pytestmark = pytest.mark.multiproc

OTHER_TOKEN = "another-token-of-32-characters-xyz"


def own_address() -> str:
    address = current_agent().network.address
    assert address is not None
    return address


@pytest.fixture(scope="module")
def job(module_pool: WorkerPool) -> tuple[str, str, Worker]:
    """The addresses of two workers, and a process beside them."""
    world = module_pool.world("worker0", "worker1")
    first, second = (world[name].run(own_address) for name in ("worker0", "worker1"))
    return first, second, module_pool.start("doctor")


def test_a_sound_job_has_no_findings(job: tuple[str, str, Worker]) -> None:
    first, second, doctor = job
    status, lines = doctor.run(diagnose, first)
    assert (status, lines[-1]) == (0, "no problems found"), lines
    assert any(line.startswith(f"{first}: worker0, which reaches this machine, by the channel local") for line in lines)
    assert any(line.startswith(f"{second}: worker1, which reaches this machine") for line in lines)  # named by worker0


def test_another_channel_is_taken_by_choice(job: tuple[str, str, Worker]) -> None:
    _, second, doctor = job
    status, lines = doctor.run(diagnose, second, RPCDIST_CHANNELS="tcp")
    assert status == 0 and "by the channel tcp" in lines[1], lines


def test_another_token_is_named(job: tuple[str, str, Worker]) -> None:
    _, second, doctor = job
    status, lines = doctor.run(diagnose, second, token=OTHER_TOKEN)
    assert status == 1
    [finding] = [line for line in lines if line.startswith("1. ")]
    assert f"the process at {second} has another job token" in finding and "RPCDIST_TOKEN" in finding
    assert not any(line.startswith("2. ") for line in lines)


def test_another_job_is_named(job: tuple[str, str, Worker]) -> None:
    _, second, doctor = job
    status, lines = doctor.run(diagnose, second, RPCDIST_JOB="other")
    assert status == 1 and "job 'other'" in lines[-1], lines


def test_a_closed_port_is_named(job: tuple[str, str, Worker]) -> None:
    address = f"127.0.0.1:{free_port()}"
    status, lines = job[2].run(diagnose, address)
    assert status == 1 and f"{address} refuses connections" in lines[-1], lines


def test_a_server_of_another_kind_is_named(job: tuple[str, str, Worker]) -> None:
    with web_server() as port:
        status, lines = job[2].run(diagnose, f"127.0.0.1:{port}")
    assert status == 1 and "does not speak TLS" in lines[-1], lines


@contextmanager
def web_server() -> Iterator[int]:
    """Answers everything as a web server does that was spoken to in TLS."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(ConnectionError):
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
                while connection.recv(4096):
                    pass

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def test_a_wrong_setting_is_named_and_addresses_are_left_alone(job: tuple[str, str, Worker]) -> None:
    status, lines = job[2].run(diagnose, job[0], RPCDIST_CHANNELS="udp")
    assert status == 1 and lines[1].startswith("the addresses were not tried"), lines
    assert "RPCDIST_CHANNELS must be 'auto'" in lines[-1]


def test_a_missing_token_file_is_not_made(job: tuple[str, str, Worker], module_pool: WorkerPool) -> None:
    file = module_pool.folder / "no token"
    worker = module_pool.start("stranger", {"RPCDIST_TOKEN": None, "RPCDIST_TOKEN_FILE": str(file)})
    status, lines = worker.run(diagnose, job[0])
    assert status == 1 and "no job token is set" in lines[-1] and str(file) in lines[-1], lines
    assert not file.exists()


def test_what_is_no_address_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "nowhere"])
    assert caught.value.code == 2 and "host:port" in capsys.readouterr().err


def test_the_command_starts_without_torch() -> None:
    """Like the other commands, it is parsed before anything heavy is imported."""
    code = "import sys, rpcdist.__main__ as m; sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
