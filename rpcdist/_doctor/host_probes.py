"""Examines this machine and the settings of this process; see `HostFacts`. Changes nothing, and makes no file."""

from __future__ import annotations

import os
import resource
import secrets
import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rpcdist._doctor.doctor_facts import HostFacts
from rpcdist.errors import ConfigError, TransportError, text_of
from rpcdist.own_shortage import check_can_start
from rpcdist.transport._channels.channel import CHANNELS_VARIABLE, allowed_channels
from rpcdist.transport._channels.polling_and_signals import may_poll
from rpcdist.transport._server.diagnosis import library_versions
from rpcdist.transport._tls.tls_policy import TlsPolicy
from rpcdist.transport.addresses import PortRange, host_from_environment
from rpcdist.transport.striping import num_connections
from rpcdist.transport.token import TOKEN_VARIABLE, describe_token_source, job_token, token_path

_SHM: Final = "/dev/shm"
_CGROUPS: Final = Path("/sys/fs/cgroup")


def host_facts() -> HostFacts:
    """Examines this machine. Takes two seconds, most of them for the import of torch."""
    memory = _memory()
    shm = _shm()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_token_missing = TOKEN_VARIABLE not in os.environ and _is_token_file_missing()
    import torch

    shown_gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    can_use_gpu = torch.cuda.is_available()
    return HostFacts(
        setting_error=_error_of(_check_settings),
        token_error=None if is_token_missing else _error_of(job_token),
        token_source=describe_token_source(),
        is_token_missing=is_token_missing,
        channels=os.environ.get(CHANNELS_VARIABLE, "auto"),
        descriptors=None if soft == resource.RLIM_INFINITY else soft,
        most_descriptors=None if hard == resource.RLIM_INFINITY else hard,
        threads_error=_error_of(lambda: check_can_start("a worker")),
        memory_bytes=memory[0],
        free_memory_bytes=memory[1],
        shm_bytes=shm[0],
        free_shm_bytes=shm[1],
        memfd_error=_error_of(_check_memfd),
        abstract_error=_error_of(_check_abstract_socket),
        has_gpu_driver=os.path.exists("/dev/nvidiactl"),
        torch_cuda=torch.version.cuda,
        can_use_gpu=can_use_gpu,
        hides_gpus=shown_gpus is not None and shown_gpus.strip() in ("", "-1", "none", "void", "NoDevFiles"),
        nccl_error=_nccl_error() if can_use_gpu else None,
        versions=library_versions(),
    )


def _error_of(check: Callable[[], object]) -> str | None:
    try:
        check()
    except OSError as exc:
        return exc.strerror or str(exc)
    except (ConfigError, TransportError) as exc:
        return str(exc)
    return None


def _check_settings() -> None:
    """Reads the variables that a worker reads when it starts."""
    allowed_channels()
    may_poll()
    num_connections()
    TlsPolicy.of_environment()
    PortRange.of_environment(None)
    host_from_environment("TP_SOCKET_IFNAME")


def _is_token_file_missing() -> bool:
    try:
        return not token_path().exists()
    except (ConfigError, OSError):
        return False  # `job_token` reports the problem


def _memory() -> tuple[int | None, int | None]:
    """Returns the total and the free memory in bytes, of the container if that has less than the machine."""
    values = _table(Path("/proc/meminfo"))
    total, free = values.get("MemTotal:"), values.get("MemAvailable:")
    if total is None or free is None:
        return None, None
    total, free = total << 10, free << 10
    for folder in _own_cgroups():
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None and limit < total:
            reclaimable = _table(folder / "memory.stat").get("inactive_file", 0)
            total, free = limit, min(free, limit - used + reclaimable)
    return total, free


def _own_cgroups() -> list[Path]:
    """Returns the folder of this process's control group, and those above it (version 2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), None)
    if own is None:
        return []
    folder = _CGROUPS / own
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(_CGROUPS))]


def _table(file: Path) -> dict[str, int]:
    """Returns the numbers in a file of the kernel, by the words before them."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {entry[0]: int(entry[1]) for entry in words if len(entry) > 1 and entry[1].isdecimal()}


def _number(file: Path) -> int | None:
    """Returns the number in a file; None if the file does not exist or contains "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _shm() -> tuple[int, int]:
    try:
        status = os.statvfs(_SHM)
    except OSError:
        return 0, 0
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def _check_memfd() -> None:
    os.close(os.memfd_create("rpcdist doctor"))


def _check_abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.bind(f"\0rpcdist-doctor-{secrets.token_hex(8)}")


def _nccl_error() -> str | None:
    """Returns why CuPy, if it is installed, cannot load its NCCL."""
    if find_spec("cupy") is None:
        return None
    try:
        import cupy.cuda.nccl  # noqa: F401
    except Exception as exc:  # CuPy passes on any error of its loader
        return f"CuPy cannot load NCCL: {text_of(exc)}"
    return None
