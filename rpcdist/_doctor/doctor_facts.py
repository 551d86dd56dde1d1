"""The doctor's observations, as data: `host_probes.py` and `worker_probes.py` fill these, `findings.py` judges them.

A field is None if it was not or could not be examined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

PortAnswer = Literal["open", "refused", "silent", "unreachable", "failed"]
"""The outcome of an attempt to open a TCP connection. "failed": for example for lack of a free descriptor here."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """This machine and the settings of this process.

    Attributes:
        setting_error: why settings in the environment cannot be used.
        token_error: why the job token cannot be used.
        is_token_missing: whether no token is set and the token file does not exist yet.
        channels: the value of RPCDIST_CHANNELS.
        descriptors: the soft limit of open files.
        most_descriptors: the hard limit.
        threads_error: why this process cannot get more threads or descriptors.
        memory_bytes: the memory that the process may use: that of its container, or of the machine.
        shm_bytes: the size of /dev/shm; 0 if it does not exist.
        memfd_error: why unnamed shared memory is not available.
        abstract_error: why abstract Unix sockets are not available.
        has_gpu_driver: whether NVIDIA's kernel driver is loaded.
        torch_cuda: the version of CUDA that torch is built for; None for a CPU build.
        can_use_gpu: whether torch can use a GPU.
        hides_gpus: whether CUDA_VISIBLE_DEVICES hides all GPUs.
        nccl_error: why the backend "nccl" cannot be used.
    """

    setting_error: str | None = None
    token_error: str | None = None
    token_source: str = "the token file"
    is_token_missing: bool = False
    channels: str = "auto"
    descriptors: int | None = None
    most_descriptors: int | None = None
    threads_error: str | None = None
    memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    shm_bytes: int | None = None
    free_shm_bytes: int | None = None
    memfd_error: str | None = None
    abstract_error: str | None = None
    has_gpu_driver: bool = False
    torch_cuda: str | None = None
    can_use_gpu: bool = False
    hides_gpus: bool = False
    nccl_error: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


class PortFact(NamedTuple):
    """One address to which the name of a worker resolves.

    Attributes:
        answer: the outcome of the attempt to connect.
        detail: the system's error.
        own_host: this machine's source address of the connection.
        is_host_up: whether the machine answers at another port, if this one was silent.
        mtu_bytes: the largest packet on the path, as far as the kernel knows.
    """

    host: str
    answer: PortAnswer
    detail: str = ""
    own_host: str = ""
    is_host_up: bool | None = None
    mtu_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Shown:
    """The certificate that a worker shows, examined if no session could be opened.

    Attributes:
        speaks_tls: whether the worker answered with TLS.
        is_of_job: whether it is a certificate that a process issued itself with a job token.
        is_ours: whether it was issued with the token of this process.
        earliest_s, latest_s: the range of the worker's clock, in seconds since 1970, as the certificate was issued less
            than a day ago by that clock.
    """

    speaks_tls: bool
    is_of_job: bool = False
    is_ours: bool = False
    earliest_s: float | None = None
    latest_s: float | None = None


@dataclass(frozen=True, slots=True)
class SessionFact:
    """A session with a worker, and the worker's answers to the doctor's questions.

    Attributes:
        channel: "local", "tcp" or "grpc".
        passed_over: better channels that failed, with the reasons.
        round_trip_s: the time of a small question over gRPC.
        failure_of_question: why the worker did not answer.
        own_address: the address at which it tried to reach this process.
        failure: why it cannot reach this process; empty if it can.
        clock_offset_s: its clock minus ours.
        clock_error_s: the possible error of that.
        large_failure: why a message of 20 kB did not arrive, although small messages did.
    """

    name: str
    channel: str
    passed_over: tuple[tuple[str, str], ...] = ()
    round_trip_s: float | None = None
    failure_of_question: str = ""
    own_address: str = ""
    failure: str = ""
    clock_offset_s: float | None = None
    clock_error_s: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    large_failure: str = ""


@dataclass(frozen=True, slots=True)
class WorkerFact:
    """One address from the command line, or from the coordinator.

    Attributes:
        member: the name of the worker, if the coordinator named the address.
        session_error: why no session could be opened.
        listen_error: why this process could not listen at an address that the worker can reach.
        is_refused: whether the two processes communicated, but one refused the other.
        shown: the worker's certificate, if no session could be opened.
        now_s: this machine's clock at the examination.
        members: name and address of the workers that a coordinator there names.
    """

    address: str
    member: str = ""
    name_error: str | None = None
    ports: tuple[PortFact, ...] = ()
    is_this_machine: bool = False
    session: SessionFact | None = None
    session_error: str | None = None
    listen_error: str | None = None
    is_refused: bool = False
    shown: Shown | None = None
    now_s: float = 0.0
    members: tuple[tuple[str, str], ...] = ()
