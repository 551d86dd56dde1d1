"""The shortage of a process itself, in plain words."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import subprocess
import sys

import pytest
from own_shortages import no_free_descriptor

from rpcdist import own_shortage as module
from rpcdist.errors import ConnectFailed, TransportError
from rpcdist.own_shortage import (
    NO_THREAD,
    check_descriptors_for,
    free_memory,
    own_shortage,
    raise_descriptor_limit,
    try_for_descriptor,
)
from rpcdist.testing import LIMIT_S

MEMORY, PORTS = "no more memory", "no free local port"


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.fixture(autouse=True)
def nothing_is_logged_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_logged", {})


@pytest.mark.parametrize(
    ("exc", "says"),
    [
        (error(errno.EMFILE), "this process has no free file descriptor"),
        (error(errno.ENFILE), "this machine has no free file descriptor"),
        (error(errno.ENOMEM), MEMORY),
        (error(errno.ENOBUFS), MEMORY),
        (MemoryError(), MEMORY),
        (RuntimeError("can't start new thread"), NO_THREAD),
    ],
)
def test_what_the_system_says_counts(exc: BaseException, says: str) -> None:
    for outer in (exc, ConnectFailed("b:1", "it failed").with_traceback(None)):
        outer.__cause__ = exc if outer is not exc else None
        found = own_shortage(outer)
        assert found is not None and says in found


@pytest.mark.parametrize("exc", [None, error(errno.ECONNREFUSED), error(errno.EADDRNOTAVAIL), RuntimeError("no")])
def test_other_errors_are_not_its_own_fault(exc: BaseException | None) -> None:
    """An address that no interface has, as ::1 where IPv6 is off, is no lack of ports."""
    assert own_shortage(exc) is None


@pytest.mark.parametrize("closed", ["<&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_a_process_without_standard_streams_ends_as_another(closed: str) -> None:
    """As started by a daemon. The loop's own descriptors were 0 to 2, and libuv aborted at their end."""
    program = (
        "import asyncio, os\nfrom rpcdist.transport.io_loop import IoLoop\nio = IoLoop()\nio.start_thread()\n"
        f"io.run(asyncio.sleep(0), {LIMIT_S})\nio.close()\nos._exit(7)"
    )
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program]
    assert subprocess.run(command, timeout=LIMIT_S).returncode == 7


def test_causes_in_a_circle_are_looked_at_once() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert own_shortage(first) is None


def test_descriptors_are_tried_for_whatever_the_error_says(caplog: pytest.LogCaptureFixture) -> None:
    with no_free_descriptor():
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        found = [own_shortage(), own_shortage(ConnectFailed("b:1", "connection refused"))]
        with pytest.raises(OSError, match="Too many open files"):
            try_for_descriptor()
    assert (
        found
        == [f"this process has no free file descriptor (ulimit -n is {limit}): close files, or raise the limit"] * 2
    )
    assert own_shortage() is None
    assert caplog.text.count("no free file descriptor") == 1


def test_ports_are_tried_for_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoPorts(socket.socket):
        def bind(self, address: object) -> None:
            raise error(errno.EADDRINUSE)

    monkeypatch.setattr(socket, "socket", NoPorts)
    assert own_shortage() is None
    found = own_shortage(error(errno.EADDRNOTAVAIL))
    assert found is not None and PORTS in found


def test_the_soft_limit_of_descriptors_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_raised", [])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = min(soft, hard, 512)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lower, hard))
        raise_descriptor_limit()
        most = min(hard if hard != resource.RLIM_INFINITY else 1 << 20, 1 << 20)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lower, hard))  # a program that lowers it afterwards is left alone
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (lower, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_world_that_is_too_large_for_the_descriptors_is_told_both_numbers() -> None:
    raise_descriptor_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 600), hard))
        check_descriptors_for(1)
        with pytest.raises(TransportError, match=r"1001 workers needs 4\d\d\d file .* may have only 600: raise"):
            check_descriptors_for(1000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_free_memory_is_that_of_this_process_where_it_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error said that gigabytes were free, where `ulimit -v` left none."""
    assert re.fullmatch(r"\d+ bytes are free", free_memory())
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 1 << 30))
    assert free_memory() == "0 bytes are free in this process (ulimit -v is 1024)"
