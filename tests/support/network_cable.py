"""Two network namespaces that play two hosts, and a cable between them that delays, loses or cuts.

The kernel's own means for that (`tc netem`) are a module that many machines lack, so the cable is a thread here: it
moves packets between two TUN devices. Its effect on them is drawn from a seed.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

__all__ = ["HOST_ADDRESSES", "Cable", "cable_between_hosts", "enter_namespace"]

HOST_ADDRESSES = ("10.213.8.1", "10.213.8.2")
TUNSETIFF = 0x400454CA
IFF_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
CLONE_NEWNET = 0x40000000
MTU_BYTES = 16_000
MAX_QUEUED = 4096  # packets; further ones are dropped, as a switch does


class Cable(threading.Thread):
    """Moves packets between two devices until it is closed.

    Args:
        ends: the descriptors of both devices. They are closed by `close`.
        seed: of the losses.

    Attributes:
        delay_s: how long each packet is on its way.
        loss: which share of packets gets lost.
        is_cut: whether all packets get lost.
        on_packet: what becomes of a packet to the first (0) or second (1) host, such as of one that a firewall drops
            (None) or changes; None: each passes as it is.
        num_moved, num_delayed, num_lost, num_cut: packets so far, by what was done to them.
    """

    def __init__(self, ends: tuple[int, int], seed: str) -> None:
        super().__init__(name="network cable")
        self.delay_s = 0.0
        self.loss = 0.0
        self.is_cut = False
        self.on_packet: Callable[[bytes, int], bytes | None] | None = None
        self.num_moved = self.num_delayed = self.num_lost = self.num_cut = 0
        self._ends = ends
        self._chance = random.Random(seed)
        self._queue: deque[tuple[float, int, bytes]] = deque()
        self._closing, self._close = os.pipe()

    def run(self) -> None:
        first, second = self._ends
        while True:
            wait_s = max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else None
            readable, _, _ = select.select([first, second, self._closing], [], [], wait_s)
            if self._closing in readable:
                return
            for end in readable:
                self._take(os.read(end, MTU_BYTES + 100), second if end == first else first)
            while self._queue and self._queue[0][0] <= time.monotonic():
                _, to, packet = self._queue.popleft()
                os.write(to, packet)
                self.num_moved += 1

    def close(self) -> None:
        os.close(self._close)
        self.join()
        for descriptor in (*self._ends, self._closing):
            os.close(descriptor)

    def _take(self, packet: bytes, to: int) -> None:
        on_packet = self.on_packet
        changed = packet if on_packet is None else on_packet(packet, self._ends.index(to))
        if changed is None:
            self.num_lost += 1
            return
        packet = changed
        if self.is_cut:
            self.num_cut += 1
        elif self._chance.random() < self.loss or len(self._queue) >= MAX_QUEUED:
            self.num_lost += 1
        else:
            self.num_delayed += self.delay_s > 0
            due_s = time.monotonic() + self.delay_s
            self._queue.append((max(due_s, self._queue[-1][0] if self._queue else 0.0), to, packet))


@contextmanager
def cable_between_hosts(seed: str) -> Iterator[tuple[Cable, tuple[str, str]]]:
    """Makes the namespaces, whose names it also yields; skips the test where that is not possible."""
    namespaces = (f"rc{os.getpid()}a", f"rc{os.getpid()}b")
    ends: list[int] = []
    try:
        try:
            for namespace, address in zip(namespaces, HOST_ADDRESSES, strict=True):
                _ip("netns", "add", namespace)
                ends.append(_device_in(namespace, address))
        except (OSError, subprocess.CalledProcessError) as exc:
            for end in ends:
                os.close(end)
            pytest.skip(
                f"no network between namespaces can be made here (it takes root, iproute2, /dev/net/tun): {exc}"
            )
        cable = Cable((ends[0], ends[1]), seed)
        cable.start()
        try:
            yield cable, namespaces
        finally:
            cable.close()
    finally:
        for namespace in namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True, timeout=10)


def enter_namespace(namespace: str) -> None:
    """This process, which has one thread so far, is on that host from now on."""
    descriptor = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    finally:
        os.close(descriptor)


def _device_in(namespace: str, address: str) -> int:
    """A TUN device of that host; the descriptor has what it sends, and takes what it receives."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        name = f"t{namespace}"
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN_WITHOUT_HEADER))
        _ip("link", "set", name, "netns", namespace)
        _ip("-n", namespace, "address", "add", f"{address}/24", "dev", name)
        _ip("-n", namespace, "link", "set", name, "mtu", str(MTU_BYTES), "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)
