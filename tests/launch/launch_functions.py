"""Functions for the processes that the tests of `rpcdist.launch` start; they import little, so they start quickly."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from typing import TextIO

__all__ = [
    "be_killed",
    "describe",
    "exit_at_once",
    "exit_with",
    "fail_after_its_peer",
    "fork_and_leave",
    "fork_twice",
    "grandchild_then_exit",
    "hang_deaf",
    "hang_in_a_thread",
    "leave_open",
    "linger",
    "listen_at_the_master_port",
    "make",
    "raise_unpicklable",
    "return_unpicklable",
    "wait_for_ever",
]

LEFT_OPEN: list[TextIO] = []

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")


def describe(rank: int, word: str) -> tuple[int, int, str, str, str | None]:
    return rank, os.getpid(), word, " ".join(os.environ[name] for name in VARIABLES), os.environ.get("EXTRA")


def make(rank: int, size: int) -> bytes:
    return bytes([rank]) * size


def listen_at_the_master_port(rank: int) -> str:
    """Rank 0 listens, and rank 1 connects."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == 0:
        with socket.create_server(address) as server:
            connection, _ = server.accept()
            with connection:
                return connection.recv(100).decode()
    while True:
        try:
            with socket.create_connection(address, timeout=10) as connection:
                connection.sendall(b"hello")
                return ""
        except ConnectionRefusedError:
            continue


def fail_after_its_peer(rank: int) -> None:
    """Rank 0 loses rank 1, which says why only when rank 0 has ended."""
    address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
    if rank == 0:
        with socket.create_server(address) as server:
            server.accept()[0].detach()  # open until this process ends
            raise ConnectionResetError("the peer is gone")
    while True:
        try:
            with socket.create_connection(address, timeout=30) as connection:
                connection.recv(1)
                raise KeyError("the cause")
        except ConnectionRefusedError:
            continue


def be_killed(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_ever(rank)


def exit_at_once(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    wait_for_ever(rank)


def exit_with(rank: int, code: object) -> None:
    if rank == 1:
        sys.exit(code)  # type: ignore[arg-type]  # any object is allowed
    if code:
        wait_for_ever(rank)


def wait_for_ever(rank: int) -> None:
    print(f"rank {rank} runs", flush=True)
    threading.Event().wait()


def hang_deaf(rank: int) -> None:
    """Does not end by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_for_ever(rank)


def hang_in_a_thread(rank: int) -> None:
    threading.Thread(target=threading.Event().wait).start()


def linger(rank: int) -> None:
    """Returns; then its process does not end, and says so."""

    def stay() -> None:
        threading.main_thread().join()
        print("lingers", flush=True)
        threading.Event().wait()

    threading.Thread(target=stay).start()


def grandchild_then_exit(rank: int, path: str) -> None:
    """Leaves two children: one that was forked, and one that runs another program."""
    if rank == 0:
        wait_for_ever(rank)
    forked = os.fork()
    if forked == 0:
        threading.Event().wait()
    other = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    with open(path, "w") as file:
        file.write(f"{forked} {other.pid}")
    os._exit(4)


def fork_twice(rank: int) -> int:
    """Returns 0 if the files that a forked child opens are still open in its own children."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    if pid := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    try:
        for file in files:
            os.fstat(file)
    except OSError:
        os._exit(1)
    os._exit(0)


def fork_and_leave(rank: int, how: str) -> int:
    """Returns the exit code of a forked child that leaves this function by itself."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if how == "raise":
        raise ValueError("said by the child")
    if how == "exit":
        sys.exit(7)
    return 100


def leave_open(rank: int, folder: str) -> None:
    LEFT_OPEN.append(open(f"{folder}/{rank}", "w"))
    LEFT_OPEN[0].write("last words")


def return_unpicklable(rank: int) -> object:
    return threading.Lock()


def raise_unpicklable(rank: int) -> None:
    class Local(Exception):
        def __init__(self) -> None:
            super().__init__("two", threading.Lock())

    raise Local
