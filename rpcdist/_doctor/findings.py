"""Derives findings from the facts, each a sentence with a remedy. Pure: no socket, no clock, no environment.

A finding is a problem that exists or is certain to occur. A healthy machine has none: settings of the user that only
make it slower, and machines that were not examined, are not findings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rpcdist._doctor.doctor_facts import HostFacts, PortFact, SessionFact, WorkerFact
from rpcdist.transport.addresses import is_loopback, split_address
from rpcdist.transport.handshake import TOKEN_ADVICE, UNTRUSTED_CERTIFICATE

MIN_DESCRIPTORS: Final = 256
MIN_FREE_MEMORY_BYTES: Final = 256 << 20
MIN_FREE_SHM_BYTES: Final = 16 << 20
NCCL_SHM_BYTES: Final = 64 << 20
"""The size of /dev/shm in a container whose creator did not choose one."""

MAX_CLOCK_OFFSET_MINUTES: Final = 10
"""The tolerated difference of clocks. Certificates tolerate a day, but logs of machines can then not be compared."""

_MIN_MTU_BYTES: Final = 1280
_FIRST_OF_VERSION: Final = {"rpcdist": 3, "python": 2, "torch": 3, "cuda": 1, "nccl": 2}
"""The number of parts of a version that must be equal in all processes of a job."""


def _finding(problem: str, remedy: str) -> str:
    return f"{problem}: {remedy}."


# ---------------------------------------------------------------------- this machine


def host_findings(host: HostFacts, *, is_asked_about_workers: bool) -> list[str]:
    """Finds the problems of this machine.

    Args:
        is_asked_about_workers: whether addresses were passed; some facts matter only then.
    """
    return [*_setting_findings(host, is_asked_about_workers), *_limit_findings(host), *_gpu_findings(host)]


def _setting_findings(host: HostFacts, is_asked_about_workers: bool) -> Iterator[str]:
    if host.setting_error is not None:
        yield _finding("the settings of this process cannot be used", _clause(host.setting_error))
    if host.token_error is not None:
        yield _finding("this process has no job token that it can use", _clause(host.token_error))
    elif host.is_token_missing and is_asked_about_workers:
        yield _finding(
            f"no job token is set on this machine, and {host.token_source} does not exist",
            "set RPCDIST_TOKEN to the token of the job, or copy the token file of a worker there, with mode 0600",
        )


def _limit_findings(host: HostFacts) -> Iterator[str]:
    if host.threads_error is not None:
        yield _finding("a worker could not start here", _clause(host.threads_error))
    if host.descriptors is not None and host.descriptors < MIN_DESCRIPTORS:
        can = "" if host.most_descriptors is None else f"; the hard limit is {host.most_descriptors}"
        yield _finding(
            f"a process may open only {host.descriptors} files, and a worker needs several for each peer",
            f"run `ulimit -n 4096`, or set LimitNOFILE or --ulimit nofile where the process is started{can}",
        )
    if host.free_memory_bytes is not None and host.free_memory_bytes < MIN_FREE_MEMORY_BYTES:
        yield _finding(
            f"only {_size(host.free_memory_bytes)} of {_size(host.memory_bytes or 0)} of memory are free here",
            "end other processes, or raise the memory limit of the container: the kernel kills processes at the limit",
        )
    if host.memfd_error is not None:
        yield _finding(
            f"this system has no unnamed shared memory (memfd_create: {host.memfd_error})",
            "allow the system call in the seccomp profile of the container; until then payloads go through sockets",
        )
    if host.abstract_error is not None:
        yield _finding(
            f"this system has no abstract Unix sockets ({host.abstract_error})",
            "allow them in the security profile of the container; until then workers of one machine use TCP",
        )
    if host.shm_bytes and host.free_shm_bytes is not None and host.free_shm_bytes < MIN_FREE_SHM_BYTES:
        yield _finding(
            f"only {_size(host.free_shm_bytes)} of the {_size(host.shm_bytes)} of /dev/shm are free",
            "remove what ended processes left there, or give the container more (--shm-size): NCCL and the workers of "
            "a DataLoader die of SIGBUS where it is full, although rpcdist itself does not use it",
        )


def _gpu_findings(host: HostFacts) -> Iterator[str]:
    if not host.has_gpu_driver or host.hides_gpus:
        return
    if host.torch_cuda is None:
        yield _finding(
            "this machine has an NVIDIA driver, but torch is a build for the CPU",
            "install the build of torch for CUDA, or ignore this if the job uses no GPU",
        )
        return
    if not host.can_use_gpu:
        yield _finding(
            f"torch is built for CUDA {host.torch_cuda}, but cannot use the GPUs of this machine",
            "compare that version with the one that `nvidia-smi` shows, and install the build of torch that fits",
        )
        return
    if host.nccl_error is not None:
        yield _finding(f"the backend 'nccl' cannot be used here ({host.nccl_error})", "pip install 'rpcdist[cuda]'")
    if host.shm_bytes is not None and host.shm_bytes <= NCCL_SHM_BYTES:
        have = "this machine has no /dev/shm" if host.shm_bytes == 0 else f"/dev/shm has {_size(host.shm_bytes)}"
        yield _finding(
            f"{have}, which is too small for NCCL between the GPUs of one machine",
            "start the container with --shm-size=1g or --ipc=host",
        )


# ---------------------------------------------------------------------- a worker


def worker_findings(worker: WorkerFact, host: HostFacts) -> list[str]:
    if worker.name_error is not None:
        name = split_address(worker.address)[0]
        return [
            _finding(
                f"the name {name!r} is unknown on this machine ({worker.name_error})",
                "check its spelling, write the IP address instead, or add the name to DNS or /etc/hosts",
            )
        ]
    if worker.session is None:
        return list(_no_session(worker, host))
    return [*_channel_findings(worker, worker.session, host), *_answer_findings(worker, worker.session, host)]


def _who(worker: WorkerFact) -> str:
    return f"{worker.member} at {worker.address}" if worker.member else worker.address


def _no_session(worker: WorkerFact, host: HostFacts) -> Iterator[str]:
    if not any(port.answer == "open" for port in worker.ports):
        yield from _closed_port(worker)
        return
    found, error = _certificate_finding(worker, host), worker.session_error or ""
    if found is not None:
        yield found
    elif UNTRUSTED_CERTIFICATE in error:
        yield _strange_server(worker)
    elif TOKEN_ADVICE in error:
        yield _other_token(worker, host)
    elif worker.is_refused:
        yield _finding(f"{_who(worker)} and this process do not accept each other", _clause(error))
    elif error:
        yield _finding(
            f"{_who(worker)} accepts connections, but no session can be opened ({_clause(error)})",
            "check that a worker of the job listens there and read its log; if both are in order, packets above some "
            "size may be lost on the way, so try a smaller MTU",
        )


def _closed_port(worker: WorkerFact) -> Iterator[str]:
    """Explains why no connection could be opened, by the address of the worker's name that got furthest."""
    name, number = split_address(worker.address)
    order = ("refused", "silent", "unreachable", "failed")
    port = min(worker.ports, key=lambda port: order.index(port.answer), default=None)
    if port is None:
        return
    if is_loopback(port.host) and worker.member:
        yield _finding(
            f"{worker.member} says that it listens at {worker.address}, which only processes of its machine can reach",
            "correct the line of its host name in /etc/hosts there, or set RPCDIST_HOST there "
            "to the address or interface of the network",
        )
    elif is_loopback(port.host) and not is_loopback(name):
        yield _finding(
            f"the name {name!r} resolves to {port.host} on this machine, where no process listens at port {number}",
            "write the IP address of the worker, or correct the line of that name in /etc/hosts: a name that resolves "
            "to loopback cannot reach a worker that listens at an address of the network",
        )
    elif port.answer == "refused":
        yield _finding(
            f"{_who(worker)} refuses connections",
            f"start the worker, or correct the port: no process listens at port {number} of {port.host}, or a firewall "
            "there rejects it",
        )
    elif port.answer == "silent":
        yield _silence(worker, port, number)
    elif port.answer == "unreachable":
        yield _finding(
            f"there is no route from this machine to {_who(worker)} ({port.detail})",
            "check the address and the routes (`ip route get " + port.host + "`), and whether a firewall rejects it",
        )
    else:
        yield _finding(f"this process could not try to connect to {_who(worker)}", _clause(port.detail))


def _silence(worker: WorkerFact, port: PortFact, number: int) -> str:
    if port.is_host_up:
        return _finding(
            f"the machine {port.host} answers, but silently drops connections to port {number}",
            f"open TCP port {number} in its firewall; RPCDIST_PORTS=29600-29700 restricts workers to a range of ports",
        )
    return _finding(
        f"{_who(worker)} does not answer",
        "check that the address is right and the machine runs; otherwise open the port in the firewalls on the way",
    )


def _certificate_finding(worker: WorkerFact, host: HostFacts) -> str | None:
    shown = worker.shown
    if shown is None:
        return None
    if not shown.speaks_tls:
        return _finding(
            f"the process at {_who(worker)} does not speak TLS, so it is not a worker, or has RPCDIST_TLS=off",
            "correct the port (torchrun's own store listens at MASTER_PORT, and is not a worker), or set "
            "RPCDIST_TLS to the same value in all processes",
        )
    if not shown.is_of_job:
        return None  # the user's own certificates: the error of the session explains the problem
    if not shown.is_ours:
        return _other_token(worker, host)
    if shown.earliest_s is not None and shown.latest_s is not None:
        ahead_s, behind_s = shown.earliest_s - worker.now_s, worker.now_s - shown.latest_s
        if max(ahead_s, behind_s) > 60 * MAX_CLOCK_OFFSET_MINUTES:
            way = (
                f"at least {_duration(ahead_s)} ahead of"
                if ahead_s > behind_s
                else f"{_duration(behind_s)} or more behind"
            )
            return _finding(
                f"the clock of {_who(worker)} is {way} the clock of this machine, and certificates hold for a day",
                "set both clocks by NTP",
            )
    return None


def _strange_server(worker: WorkerFact) -> str:
    """Makes the finding if TLS failed, but the certificate does not show that the tokens differ."""
    if worker.shown is None:
        return _finding(
            f"the process at {_who(worker)} accepts connections, but TLS fails before it shows a certificate",
            "check the address, the port, and whether a proxy is in between; if a worker listens there, its log says "
            "whether the job tokens differ",
        )
    return _finding(
        f"{_who(worker)} and this process do not trust each other's certificates",
        "use certificates of one authority in all processes (RpcOptions(tls=TlsOptions(...))), or those of the job "
        "token in all; if they are the same, check the address: it may be a server of another kind",
    )


def _other_token(worker: WorkerFact, host: HostFacts) -> str:
    return _finding(
        f"the process at {_who(worker)} has another job token than this process, which uses {host.token_source}",
        "set RPCDIST_TOKEN to the same value in all processes of the job, or give all machines the same token file",
    )


def _channel_findings(worker: WorkerFact, session: SessionFact, host: HostFacts) -> Iterator[str]:
    """Explains why the session does not use the best possible channel."""
    channel, passed_over = session.channel, dict(session.passed_over)
    if channel != "grpc" and not (worker.is_this_machine and channel == "tcp"):
        return
    if worker.is_this_machine and host.channels in ("auto", "local") and host.abstract_error is None:
        why = passed_over.get(
            "local", "its Unix socket is not in this network namespace, or RPCDIST_CHANNELS is set there"
        )
        yield _finding(
            f"{_who(worker)} is on this machine, but is reached by {channel} instead of shared memory ({_clause(why)})",
            "run both as one user, and containers with the network of the host (--network host)",
        )
    elif channel == "grpc" and "tcp" in passed_over:
        why = passed_over["tcp"]
        if "translates addresses" in why:
            yield _finding(
                f"addresses are translated between this machine and {_who(worker)} (NAT), so calls go over gRPC, which "
                "takes about twice as long as TCP",
                "connect the machines by a network without NAT, or run containers with the network of the host",
            )
        else:
            yield _finding(
                f"calls to {_who(worker)} go over gRPC, which takes about twice as long as TCP, because its TCP "
                f"channel is not available ({_clause(why)})",
                "open that port in the firewall; RPCDIST_PORTS=29600-29700 restricts workers to a range of ports",
            )


def _answer_findings(worker: WorkerFact, session: SessionFact, host: HostFacts) -> Iterator[str]:
    if worker.listen_error is not None:
        yield _finding(f"a worker here could not listen where {_who(worker)} would look", _clause(worker.listen_error))
    if session.failure_of_question:
        yield _finding(
            f"{_who(worker)} opens a session, but then does not answer ({_clause(session.failure_of_question)})",
            "check what blocks it: a debugger, a stopped process, a machine without memory",
        )
    here = next((port.own_host for port in worker.ports if not is_loopback(port.own_host)), None)
    if session.failure and here is not None and is_loopback(split_address(session.own_address)[0]):
        yield _finding(
            f"a worker here listens at {session.own_address}, where {_who(worker)} cannot reach it",
            f"set RPCDIST_HOST to an address of this machine that it can reach, such as {here}, or unset it: every "
            "worker must be able to connect to every other",
        )
    elif session.failure:
        yield _finding(
            f"{_who(worker)} cannot connect to this machine at {session.own_address}, although this machine can "
            f"connect to it ({_clause(session.failure)})",
            "let connections of that machine in through the firewall here, or set RPCDIST_HOST to an address of this "
            "machine that it can reach: every worker must be able to connect to every other",
        )
    if session.large_failure:
        mtus = [port.mtu_bytes for port in worker.ports if port.mtu_bytes]
        known = f"; here it is {mtus[0]} bytes" if mtus else ""
        yield _finding(
            f"small messages reach {_who(worker)}, but 20 kB do not ({_clause(session.large_failure)})",
            "give the network interfaces on both machines an MTU that the path between them supports" + known,
        )
    yield from _mtu_findings(worker)
    yield from _clock_findings(worker, session)
    yield from _version_findings(worker, session, host)


def _mtu_findings(worker: WorkerFact) -> Iterator[str]:
    for port in worker.ports:
        if port.mtu_bytes is not None and port.mtu_bytes < _MIN_MTU_BYTES:
            yield _finding(
                f"the path to {port.host} supports packets of only {port.mtu_bytes} bytes, so large tensors are slow",
                "set the MTU of the interface or tunnel to 1400 or more",
            )


def _clock_findings(worker: WorkerFact, session: SessionFact) -> Iterator[str]:
    if (
        session.clock_offset_s is None
        or abs(session.clock_offset_s) - session.clock_error_s <= 60 * MAX_CLOCK_OFFSET_MINUTES
    ):
        return
    way = "ahead of" if session.clock_offset_s > 0 else "behind"
    yield _finding(
        f"the clock of {_who(worker)} is {_duration(abs(session.clock_offset_s))} {way} the clock of this machine, and "
        "certificates tolerate a day",
        "set both clocks by NTP",
    )


def _version_findings(worker: WorkerFact, session: SessionFact, host: HostFacts) -> Iterator[str]:
    for name, num_parts in _FIRST_OF_VERSION.items():
        theirs, ours = session.versions.get(name), host.versions.get(name)
        if theirs is None or ours is None:
            continue
        if theirs.split(".")[:num_parts] != ours.split(".")[:num_parts]:
            yield _finding(
                f"{_who(worker)} has {name} {theirs}, but this process has {name} {ours}",
                f"install the same version of {name} for all processes of the job",
            )


# ---------------------------------------------------------------------- words


def summary(worker: WorkerFact) -> str:
    """Returns one line about an examined worker."""
    session = worker.session
    if session is None:
        return f"{_who(worker)}: not reached"
    trip = "" if session.round_trip_s is None else f", a question takes {session.round_trip_s * 1000:.1f} ms"
    back = ", which reaches this machine" if session.own_address and not session.failure else ""
    return f"{worker.address}: {session.name}{back}, by the channel {session.channel}{trip}"


def _clause(text: str) -> str:
    """Converts a text to a clause at the end of a sentence."""
    return " ".join(text.split()).rstrip(". ") or "no reason is known"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.0f} MiB"


def _duration(seconds: float) -> str:
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.0f} hours"
    return f"{seconds / 60:.0f} minutes"
