"""The findings of the doctor from facts, as tables, and what it reads from certificates."""

from __future__ import annotations

import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from rpcdist._doctor.doctor_facts import (
    HostFacts,
    PortAnswer,
    PortFact,
    SessionFact,
    Shown,
    WorkerFact,
)
from rpcdist._doctor.findings import host_findings, summary, worker_findings
from rpcdist._doctor.worker_probes import _judged, _shown
from rpcdist.ids import Identity
from rpcdist.transport._tls.job_authority import JobAuthority
from rpcdist.transport.handshake import TOKEN_ADVICE, UNTRUSTED_CERTIFICATE

GIB = 1 << 30
SOUND = HostFacts(
    descriptors=1024,
    most_descriptors=4096,
    memory_bytes=8 * GIB,
    free_memory_bytes=4 * GIB,
    shm_bytes=4 * GIB,
    free_shm_bytes=4 * GIB,
    versions={"rpcdist": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu"},
)
GPU = replace(SOUND, has_gpu_driver=True, torch_cuda="12.8", can_use_gpu=True)
NOW = 1_800_000_000.0
ADDRESS = "10.0.0.2:29500"
OPEN = PortFact("10.0.0.2", "open", "", "10.0.0.1", None, 1500)
SESSION = SessionFact(
    "worker1", "tcp", (), 0.001, own_address="10.0.0.1:4000", clock_offset_s=0.1, clock_error_s=0.01,
    versions=SOUND.versions,
)  # fmt: skip
REACHED = WorkerFact(ADDRESS, ports=(OPEN,), session=SESSION, now_s=NOW)
CLOSED = replace(REACHED, session=None, session_error="no answer")


def closed(answer: PortAnswer, host: str = "10.0.0.2", detail: str = "", is_host_up: bool | None = None) -> WorkerFact:
    return replace(CLOSED, ports=(PortFact(host, answer, detail, "10.0.0.1", is_host_up),))


def only(found: list[str]) -> str:
    assert len(found) == 1, found
    text = found[0]
    assert text.endswith(".") and ": " in text
    return text


# ---------------------------------------------------------------------- sound


@pytest.mark.parametrize(
    "host",
    [
        SOUND,
        replace(SOUND, descriptors=None, memory_bytes=None, free_memory_bytes=None),
        replace(SOUND, shm_bytes=64 << 20, free_shm_bytes=64 << 20),  # a container without GPUs
        replace(SOUND, shm_bytes=0, free_shm_bytes=0),
        GPU,
        replace(SOUND, has_gpu_driver=True, hides_gpus=True),
        replace(SOUND, is_token_missing=True),  # nobody asked about other machines, and the file will be made
    ],
)
def test_a_sound_machine_has_no_findings(host: HostFacts) -> None:
    assert host_findings(host, is_asked_about_workers=False) == []


SAME_MACHINE = replace(REACHED, is_this_machine=True)


@pytest.mark.parametrize(
    ("worker", "host"),
    [
        (REACHED, SOUND),
        (replace(SAME_MACHINE, session=SessionFact("worker1", "local")), SOUND),
        (replace(SAME_MACHINE, session=SessionFact("worker1", "tcp")), replace(SOUND, channels="tcp")),
        (replace(REACHED, session=SessionFact("worker1", "grpc")), replace(SOUND, channels="grpc")),
        (replace(REACHED, session=SessionFact("worker1", "grpc")), SOUND),  # its own choice: it offers no port
        (replace(REACHED, session=replace(SESSION, clock_offset_s=610.0, clock_error_s=20.0)), SOUND),  # a slow link
        (replace(REACHED, session=replace(SESSION, versions={"python": "3.11.2", "torch": "2.13.0+cpu"})), SOUND),
        (replace(REACHED, session=replace(SESSION, versions={"nccl": "2.27.3"})), SOUND),
    ],
)
def test_a_sound_worker_has_no_findings(worker: WorkerFact, host: HostFacts) -> None:
    assert worker_findings(worker, host) == []


def test_the_line_about_a_worker() -> None:
    expected = "10.0.0.2:29500: worker1, which reaches this machine, by the channel tcp, a question takes 1.0 ms"
    assert summary(REACHED) == expected
    one_way = replace(REACHED, session=replace(SESSION, failure="no answer"))
    assert summary(one_way) == "10.0.0.2:29500: worker1, by the channel tcp, a question takes 1.0 ms"
    assert summary(replace(CLOSED, member="worker1")) == "worker1 at 10.0.0.2:29500: not reached"


# ---------------------------------------------------------------------- this machine


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (replace(SOUND, setting_error="RPCDIST_TLS is 'auto', not 'on'"), "RPCDIST_TLS is 'auto', not 'on'."),
        (replace(SOUND, token_error="the token file has mode 0644. Run chmod."), "Run chmod."),
        (replace(SOUND, is_token_missing=True, token_source="the token file /t"), "the token file /t does not exist"),
        (replace(SOUND, descriptors=64), "may open only 64 files"),
        (replace(SOUND, threads_error="no thread"), "no thread"),
        (replace(SOUND, free_memory_bytes=100 << 20), "only 100 MiB of 8.0 GiB of memory"),
        (replace(SOUND, free_shm_bytes=1 << 20), "only 1 MiB of the 4.0 GiB of /dev/shm"),
        (replace(SOUND, memfd_error="Operation not permitted"), "memfd_create: Operation not permitted"),
        (replace(SOUND, abstract_error="Operation not permitted"), "abstract Unix sockets"),
        (replace(SOUND, has_gpu_driver=True), "a build for the CPU"),
        (replace(SOUND, has_gpu_driver=True, torch_cuda="13.0"), "cannot use the GPUs"),
        (replace(GPU, nccl_error="libnccl.so.2 is missing"), "libnccl.so.2 is missing"),
        (replace(GPU, shm_bytes=64 << 20, free_shm_bytes=64 << 20), "--shm-size"),
    ],
)
def test_what_is_wrong_with_a_machine(host: HostFacts, words: str) -> None:
    assert words in only(host_findings(host, is_asked_about_workers=True))


# ---------------------------------------------------------------------- no session


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (replace(CLOSED, name_error="Name or service not known"), "'10.0.0.2' is unknown on this machine"),
        (closed("refused"), "no process listens at port 29500 of 10.0.0.2"),
        (closed("silent", is_host_up=True), "open TCP port 29500 in its firewall"),
        (closed("silent", is_host_up=False), "does not answer"),
        (closed("unreachable", detail="No route to host"), "No route to host"),
        (closed("failed", detail="Too many open files"), "Too many open files"),
        (
            replace(closed("refused", "127.0.1.1"), address="node7:29500"),
            "'node7' resolves to 127.0.1.1 on this machine",
        ),
        (replace(closed("refused", "127.0.0.1"), address="localhost:29500"), "no process listens"),
        (
            replace(closed("refused", "127.0.0.1"), address="127.0.0.1:4000", member="worker1"),
            "which only processes of its machine can reach",
        ),
        (replace(CLOSED, shown=Shown(speaks_tls=False)), "does not speak TLS"),
        (replace(CLOSED, shown=Shown(True, is_of_job=True)), "another job token"),
        (replace(CLOSED, session_error=TOKEN_ADVICE, is_refused=True), "another job token"),
        (
            replace(CLOSED, session_error=f"the server {UNTRUSTED_CERTIFICATE}", is_refused=True),
            "before it shows a certificate",
        ),
        (
            replace(CLOSED, session_error=UNTRUSTED_CERTIFICATE, is_refused=True, shown=Shown(speaks_tls=True)),
            "do not trust each other's certificates",
        ),
        (replace(CLOSED, session_error="The server belongs to job 'a'. Use b.", is_refused=True), "job 'a'. Use b."),
        (replace(CLOSED, shown=Shown(speaks_tls=True), session_error="expired", is_refused=True), "expired"),
        (CLOSED, "no session can be opened (no answer)"),
        (replace(CLOSED, shown=Shown(True, True, True, NOW + 90_000, NOW + 99_000)), "25 hours ahead of"),
        (replace(CLOSED, shown=Shown(True, True, True, NOW - 99_000, NOW - 72_000)), "20 hours or more behind"),
        (replace(CLOSED, shown=Shown(True, True, True, NOW - 100, NOW + 80_000)), "no session can be opened"),
    ],
)
def test_why_there_is_no_session(worker: WorkerFact, words: str) -> None:
    assert words in only(worker_findings(worker, SOUND))


# ---------------------------------------------------------------------- a session with flaws


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (replace(SAME_MACHINE, session=SessionFact("worker1", "tcp")), "instead of shared memory (its Unix socket"),
        (
            replace(SAME_MACHINE, session=SessionFact("worker1", "grpc", (("local", "belongs to user 7"),))),
            "belongs to user 7",
        ),
        (
            replace(REACHED, session=SessionFact("worker1", "grpc", (("tcp", "port 5: no answer in time"),))),
            "its TCP channel is not available (port 5: no answer in time)",
        ),
        (
            replace(REACHED, session=SessionFact("worker1", "grpc", (("tcp", "relays it or translates addresses"),))),
            "(NAT)",
        ),
        (replace(REACHED, listen_error="cannot listen on 10.9.9.9"), "cannot listen on 10.9.9.9"),
        (
            replace(REACHED, session=replace(SESSION, failure="no answer")),
            "cannot connect to this machine at 10.0.0.1:4",
        ),
        (
            replace(REACHED, session=replace(SESSION, own_address="127.0.0.1:4000", failure="refused")),
            "a worker here listens at 127.0.0.1:4000, where",
        ),
        (
            replace(REACHED, session=SessionFact("worker1", "tcp", failure_of_question="late")),
            "then does not answer (late)",
        ),
        (replace(REACHED, session=replace(SESSION, large_failure="late")), "MTU"),
        (replace(REACHED, ports=(OPEN._replace(mtu_bytes=576),)), "packets of only 576 bytes"),
        (replace(REACHED, session=replace(SESSION, clock_offset_s=-7300.0)), "2 hours behind the clock"),
        (replace(REACHED, session=replace(SESSION, clock_offset_s=700.0)), "12 minutes ahead of the clock"),
        (replace(REACHED, session=replace(SESSION, versions={"torch": "2.12.1"})), "torch 2.12.1"),
        (replace(REACHED, session=replace(SESSION, versions={"python": "3.12.7"})), "python 3.12.7"),
    ],
)
def test_what_is_wrong_with_a_session(worker: WorkerFact, words: str) -> None:
    assert words in only(worker_findings(worker, SOUND))


# ---------------------------------------------------------------------- certificates


def shown(issued_with: bytes, age: timedelta) -> Shown:
    issued = JobAuthority(issued_with).issue(Identity("worker1", 1, 7), "default", datetime.now(UTC) - age)
    return _judged(x509.load_pem_x509_certificate(issued.chain), b"the token of this process")


def test_a_certificate_tells_the_token_and_the_clock() -> None:
    ours = shown(b"the token of this process", timedelta(hours=5))
    now_s = datetime.now(UTC).timestamp()
    assert ours.is_ours and ours.earliest_s is not None and ours.latest_s is not None
    assert ours.earliest_s == pytest.approx(now_s - 5 * 3600, abs=60)
    assert ours.latest_s == pytest.approx(now_s + 19 * 3600, abs=60)
    other = shown(b"another token", timedelta(hours=5))
    assert other.is_of_job and not other.is_ours


def test_a_certificate_that_no_library_reads_belongs_to_another_program(tmp_path: Path) -> None:
    """OpenSSL takes version 10 of X.509; the command ended with the error of the library that does not."""
    issued = JobAuthority(b"another token").issue(Identity("worker1", 1, 7), "default", datetime.now(UTC))
    first = x509.load_pem_x509_certificates(issued.chain)[0].public_bytes(Encoding.DER)
    odd = first.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x09", 1)
    assert odd != first
    (tmp_path / "odd.pem").write_text(ssl.DER_cert_to_PEM_cert(odd))
    (tmp_path / "odd.key").write_bytes(issued.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "odd.pem", tmp_path / "odd.key")
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:

        def greet() -> None:
            with listener.accept()[0] as raw, context.wrap_socket(raw, server_side=True) as connection:
                connection.recv(1)

        greeting = thread.submit(greet)
        assert _shown("127.0.0.1", listener.getsockname()[1], b"the token of this process") == Shown(speaks_tls=True)
        with suppress(OSError):
            greeting.result(20)
