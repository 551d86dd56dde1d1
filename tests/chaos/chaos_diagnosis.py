"""The current activity of a worker whose port does not answer, read while another worker waits for it."""

from __future__ import annotations

import os
import socket
import ssl
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from inside_agents import current_agent

__all__ = ["state_of_this_process"]

LOOK_S = 1.0  # for what is counted: processor time
ANSWER_LIMIT_S = 3.0  # for each of those that are asked
LISTENS = "0A"


def state_of_this_process() -> str:
    """The I/O loop, the port seen from outside, the kernel's queues of it, and all threads; takes a few seconds."""
    agent = current_agent()
    parts: dict[str, Callable[[], object]] = {
        "load of the machine": lambda: Path("/proc/loadavg").read_text().strip(),
        "the I/O loop answers": lambda: _loop_answers(agent.network.io.call_soon),
        "TCP and TLS with its own port": lambda: _handshake(str(agent.network.address)),
        "connections that wait to be accepted, by port": _accept_queues,
        "TCP sockets by state": _sockets_by_state,
        "threads of the system": _system_threads,
        "threads of Python": _python_stacks,
    }
    return "\n".join(f"{what}: {_tried(part)}" for what, part in parts.items())


def _tried(part: Callable[[], object]) -> object:
    try:
        return part()
    except Exception as exc:  # the other parts are wanted all the same
        return repr(exc)


def _loop_answers(call_soon: Callable[[Callable[[], object]], object]) -> str:
    answered, began_s = threading.Event(), time.monotonic()
    call_soon(answered.set)
    return f"{answered.wait(ANSWER_LIMIT_S)}, after {time.monotonic() - began_s:.3f} s"


def _handshake(address: str) -> str:
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    began_s = time.monotonic()
    with socket.create_connection((host, int(port)), ANSWER_LIMIT_S) as plain:
        connected_s = time.monotonic() - began_s
        try:
            with context.wrap_socket(plain, do_handshake_on_connect=True) as secured:
                says = f"{secured.version()}"
        except OSError as exc:
            says = repr(exc)
    return f"{address}: connected after {connected_s:.3f} s, {says} after {time.monotonic() - began_s:.3f} s"


def _tcp_rows() -> list[list[str]]:
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").open()]
    return [row for row in rows if row[0] != "sl"]


def _accept_queues() -> dict[int, int]:
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue  # the listing's own
    listening = [row for row in _tcp_rows() if row[3] == LISTENS and f"socket:[{row[9]}]" in own]
    return {int(row[1].rpartition(":")[2], 16): int(row[4].partition(":")[2], 16) for row in listening}


def _sockets_by_state() -> dict[str, int]:
    return dict(Counter(row[3] for row in _tcp_rows()))


def _system_threads() -> str:
    """Name, state, processor time within a second, and where it sleeps in the kernel."""
    before = _processor_ticks()
    time.sleep(LOOK_S)  # what is wanted is what they use in this time
    after = _processor_ticks()
    lines = []
    for task in sorted(after):
        folder = Path("/proc/self/task") / task
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        name, sleeps_in = (folder / "comm").read_text().strip(), (folder / "wchan").read_text()
        lines.append(f"\n  {task} {name} {state} +{after[task] - before.get(task, 0)} ticks in {sleeps_in}")
    return "".join(lines)


def _processor_ticks() -> dict[str, int]:
    found = {}
    for task in os.listdir("/proc/self/task"):
        fields = (Path("/proc/self/task") / task / "stat").read_text().rpartition(")")[2].split()
        found[task] = int(fields[11]) + int(fields[12])
    return found


def _python_stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "".join(
        f"\n--- {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
