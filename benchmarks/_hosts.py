"""Two network namespaces that play two hosts, and the cable between them: a plain one, a slow one, or a long one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _pairs import PairFailed

__all__ = ["ADDRESSES", "NETWORK", "device_of", "enter", "two_hosts"]

ADDRESSES = ("10.213.9.1", "10.213.9.2")
NETWORK = "10.213.9.0/24"
LONG_CABLE = Path(__file__).with_name("long_cable.c")
_CLONE_NEWNET = 0x40000000
LONG_RATE_MBIT = 20_000
_START_LIMIT_S = 10


@contextlib.contextmanager
def two_hosts(
    rate: str | None = None, delay_ms: float = 0.0, congestion_control: str | None = None
) -> Iterator[tuple[str, str]]:
    """The names of two namespaces, each with one address.

    Args:
        rate: of the cable, as `tc` writes it, in each direction; None: as fast as the machine is.
        delay_ms: in each direction. It takes a C compiler and /dev/net/tun, since few kernels have netem.
        congestion_control: of TCP on both, such as "cubic"; None: the system's.

    Raises:
        PairFailed: something is missing for that.
    """
    names = (f"host{os.getpid()}a", f"host{os.getpid()}b")
    with contextlib.ExitStack() as stack:
        for name in names:
            run("ip", "netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True, timeout=10)
            run("ip", "-n", name, "link", "set", "lo", "up")
            if congestion_control is not None:
                setting = f"net.ipv4.tcp_congestion_control={congestion_control}"
                run("ip", "netns", "exec", name, "sysctl", "-w", setting)
        if delay_ms:
            stack.enter_context(_long_cable(names, delay_ms))
        else:
            _cable(names, rate)
        yield names


def device_of(namespace: str) -> str:
    """The end of the cable in a namespace."""
    return namespace[-12:]


def enter(namespace: str) -> None:
    """Moves the calling thread there; call it before there is another one."""
    with open(f"/var/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


def _cable(names: tuple[str, str], rate: str | None) -> None:
    here, there = (("name", device_of(name), "netns", name) for name in names)
    run("ip", "link", "add", *here, "type", "veth", "peer", *there)
    for name, address in zip(names, ADDRESSES, strict=True):
        device = device_of(name)
        run("ip", "-n", name, "address", "add", f"{address}/24", "dev", device)
        run("ip", "-n", name, "link", "set", device, "up")
        if rate is not None:
            limit = ("rate", rate, "burst", "256kb", "latency", "50ms")
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)


@contextlib.contextmanager
def _long_cable(names: tuple[str, str], delay_ms: float) -> Iterator[None]:
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise PairFailed("a long cable is a C program, and there is no compiler (cc, gcc or clang)")
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise PairFailed("a long cable takes /dev/net/tun and root")
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "long_cable")
        run(compiler, "-O2", "-o", program, str(LONG_CABLE))
        ends = [part for pair in zip(names, ADDRESSES, strict=True) for part in pair]
        with subprocess.Popen(
            [program, *ends, str(int(delay_ms * 1000)), str(LONG_RATE_MBIT)], stdout=subprocess.PIPE
        ) as process:
            try:
                assert process.stdout is not None
                if process.stdout.readline() != b"up\n":
                    raise PairFailed("the long cable did not start; its error is above")
                yield
            finally:
                process.kill()


def run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_START_LIMIT_S)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or error
        raise PairFailed(f"{' '.join(command)}: {reason} (it takes root, iproute2, veth and tbf)") from error
