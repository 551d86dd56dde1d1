"""Inspects a process of this host that cannot answer, because C code holds its interpreter lock, or it is stopped.

A worker calls `allow_inspection`. From then on a signal makes `faulthandler`, which needs neither the interpreter lock
nor memory, write the stacks of all threads into a file in memory. Another process of the same user finds the file among
the descriptors of that process, sends the signal, and reads the file. The signal interrupts a sleep in C, so it is sent
only to a process that has not answered.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from rpcdist.time_limits import CHECK_INTERVAL_S, QUICK_ANSWER_LIMIT_S

MAX_STACKS_BYTES: Final = 256 << 10
_NAME: Final = "rpcdist-stacks"
_LINK: Final = re.compile(rf"/memfd:{_NAME}-(\d+)-(\d+) \(deleted\)")
_NUM_SIGNALS: Final = 8  # real-time ones that are tried, from the last: programs take theirs from the first


@dataclass(frozen=True, slots=True)
class FrozenProcess:
    """A process that does not answer, as others see it.

    Attributes:
        state: "stopped" by a signal, "ended", "in the kernel", "frozen" (it lives, but none of the Python threads that
            would answer can run), or "unknown".
        detail: the same in a sentence, with advice.
        stacks: the stacks of all its threads; empty if they are not available.
        runs: whether one of its threads runs on a processor, or waits for one.
    """

    state: str
    detail: str
    stacks: str = ""
    runs: bool = False


_lock: Final = threading.Lock()  # guards the next two
_num_users = 0
_registered: list[tuple[int, int]] = []
"""The signal that writes the stacks of this process, and the descriptor of their file, as the only entry; or empty."""


def allow_inspection() -> None:
    """Makes a signal write the stacks of this process; pair it with `forbid_inspection`."""
    global _num_users
    with _lock:
        _num_users += 1
        if _registered:
            return
        import faulthandler

        last = signal.SIGRTMAX
        numbers = range(last - 1, last - _NUM_SIGNALS, -1)
        number = next((one for one in numbers if signal.getsignal(one) is signal.SIG_DFL), None)
        if number is None:
            return
        try:
            file = os.memfd_create(f"{_NAME}-{os.getpid()}-{number}")
        except OSError:  # no descriptor is left
            return
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # the reader empties it before
        faulthandler.register(number, file=file, all_threads=True, chain=False)
        _registered.append((number, file))


def forbid_inspection() -> None:
    """Undoes one `allow_inspection`."""
    global _num_users
    with _lock:
        _num_users -= 1
        if _num_users or not _registered:
            return
        import faulthandler

        number, file = _registered.pop()
        faulthandler.unregister(number)
        os.close(file)


def inspect_process(pid: int) -> FrozenProcess:
    """Inspects a process of this user; takes `QUICK_ANSWER_LIMIT_S` at most."""
    state, waits_in = _state_of(pid)
    if state in ("", "Z", "X"):
        return FrozenProcess("ended", f"process {pid} has ended")
    if state in ("T", "t"):
        by = "a debugger" if state == "t" else "SIGSTOP"
        advice = "leave the debugger" if state == "t" else f"resume it with: kill -CONT {pid}"
        return FrozenProcess("stopped", f"process {pid} is stopped by {by}: {advice}")
    runs = _has_running_thread(pid)
    stacks = _stacks_of(pid)
    if state == "D":
        place = waits_in or "for a device"
        return FrozenProcess("in the kernel", f"process {pid} waits in the kernel ({place})", stacks)
    does = (
        "computes, and its other threads cannot get the interpreter's lock: one thread runs code that keeps it, such "
        "as C code, or many threads compute in Python"
        if runs
        else "sleeps in code that keeps the interpreter's lock, so none of its Python threads can run: one thread has "
        "called C code that does not release the lock"
    )
    return FrozenProcess("frozen", f"process {pid} {does}", stacks, runs)


def _state_of(pid: int) -> tuple[str, str]:
    """The kernel's letter for the state of a process, empty if it has ended, and the function in which it waits."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        with open(f"/proc/{pid}/wchan") as file:
            return state, file.read().strip("0")
    except (OSError, IndexError):
        return "", ""


def _has_running_thread(pid: int) -> bool:
    with suppress(OSError, IndexError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "R":
                    return True
    return False


def _stacks_of(pid: int) -> str:
    """The stacks that a process writes after the signal; empty if it writes none."""
    found = _file_of(pid)
    if found is None:
        return ""
    path, number = found
    try:
        with open(path, "r+b", buffering=0) as file:
            file.truncate(0)
            os.kill(pid, number)
            ends_at, size = time.monotonic() + QUICK_ANSWER_LIMIT_S, -1
            while time.monotonic() < ends_at:
                time.sleep(CHECK_INTERVAL_S)  # there is no event for the end of the file
                before, size = size, os.fstat(file.fileno()).st_size
                if size and size == before:
                    break
            file.seek(0)
            return file.read(MAX_STACKS_BYTES).decode(errors="replace")
    except OSError:  # it has ended
        return ""


def _file_of(pid: int) -> tuple[str, int] | None:
    """The file into which a process writes its stacks, and the signal for it."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:  # it belongs to another user, or has ended
        return None
    for name in names:
        try:
            link = _LINK.fullmatch(os.readlink(f"{folder}/{name}"))
        except OSError:
            continue
        if link is not None and int(link[1]) == pid and signal.SIGRTMIN <= int(link[2]) <= signal.SIGRTMAX:
            return f"{folder}/{name}", int(link[2])
    return None
