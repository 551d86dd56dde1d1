"""The doctor's observations, as data: `host_probes.py` and `worker_probes.py` fill these, `findings.py` judges them.

A field that is None was not looked at, or could not be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class PortAnswer(Enum):
    """The outcome of an attempt to open a TCP connection."""

    OPEN = "open"
    REFUSED = "refused"
    SILENT = "silent"
    UNREACHABLE = "unreachable"
    FAILED = "failed"
    """For a reason of this process, such as no free descriptor."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """The GPUs of this machine, and what torch makes of them.

    Attributes:
        has_driver: whether NVIDIA's kernel driver is loaded.
        torch_cuda: the version of CUDA that torch is built for; None for a CPU build.
        is_available: whether torch can use a GPU.
        is_hidden: whether CUDA_VISIBLE_DEVICES hides all GPUs.
        nccl: the version of the NCCL that the backend "nccl" would take.
        nccl_error: why there is none.
    """

    has_driver: bool = False
    torch_cuda: str | None = None
    is_available: bool = False
    is_hidden: bool = False
    nccl: str | None = None
    nccl_error: str | None = None


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
        threads_error: why no more threads or descriptors can be had.
        memory_bytes: the memory that the process may use: that of its container, or of the machine.
        shm_bytes: the size of /dev/shm; 0 if there is none.
        memfd_error: why no shared memory without a name can be had.
        abstract_error: why no abstract Unix socket can be had.
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
    gpu: GpuFacts = GpuFacts()
    versions: Mapping[str, str] = field(default_factory=dict)


class PortFact(NamedTuple):
    """One address that the name of a worker stands for.

    Attributes:
        answer: what became of the attempt to connect.
        detail: what the system said.
        own_host: the address of this machine that the connection left from.
        is_host_up: whether the machine answers at another port, where this one was silent.
        mtu_bytes: the largest packet on the way there, as far as the kernel knows.
    """

    host: str
    answer: PortAnswer
    detail: str = ""
    own_host: str = ""
    is_host_up: bool | None = None
    mtu_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Shown:
    """The certificate that a worker shows, looked at where no session came about.

    Attributes:
        speaks_tls: whether TLS answered at all.
        is_of_job: whether it is one that processes issue themselves with the job token.
        is_ours: whether it was issued with the token of this process.
        earliest_s, latest_s: between these times, in seconds since 1970, is the clock of the worker, as the certificate
            was issued less than a day ago by that clock.
    """

    speaks_tls: bool
    is_of_job: bool = False
    is_ours: bool = False
    earliest_s: float | None = None
    latest_s: float | None = None


class SessionFact(NamedTuple):
    """A session with a worker.

    Attributes:
        channel: "local", "tcp" or "grpc".
        passed_over: better channels that were tried in vain, and why.
        round_trip_s: of a small question over gRPC.
    """

    name: str
    channel: str
    passed_over: tuple[tuple[str, str], ...] = ()
    round_trip_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """The answers of a worker to the questions of the doctor.

    Attributes:
        failure: why it cannot reach this process; empty if it can.
        failure_of_question: why there is no answer.
        own_address: where it tried to reach this process.
        clock_offset_s: its clock less ours.
        clock_error_s: how much that may be wrong.
        large_failure: why a message of 20 kB did not come through, though small ones did.
    """

    failure: str = ""
    failure_of_question: str = ""
    own_address: str = ""
    clock_offset_s: float | None = None
    clock_error_s: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    large_failure: str = ""


@dataclass(frozen=True, slots=True)
class WorkerFact:
    """One address that was asked for, or that the coordinator named.

    Attributes:
        member: the name of the worker, where the coordinator named the address.
        session_error: why there is no session.
        listen_error: why this process could not listen where that worker would reach it.
        is_refused: whether the two sides did talk, and one refused the other.
        shown: the worker's certificate, where there is no session.
        now_s: this machine's clock when it was looked at.
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
    answer: WorkerAnswer | None = None
    members: tuple[tuple[str, str], ...] = ()
