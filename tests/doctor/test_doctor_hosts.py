"""The doctor between two hosts, whose network loses, changes or cuts what it carries."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from doctor_functions import diagnose, ports_of_this_worker
from network_cable import HOST_ADDRESSES, Cable, cable_between_hosts, enter_namespace

from rpcdist.testing import Worker, WorkerPool
from rpcdist.testing.worker_pool import join

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(240)]

TCP = 6
SYN, ACK = 0x02, 0x10
PUBLIC_ADDRESS = "10.213.8.99"


class Hosts(NamedTuple):
    """A process on the first host, and a worker on the second, with its two ports."""

    cable: Cable
    doctor: Worker
    worker: Worker
    ports: tuple[int, int]
    url: str

    @property
    def address(self) -> str:
        return f"{HOST_ADDRESSES[1]}:{self.ports[0]}"


@pytest.fixture(scope="module")
def both(module_pool: WorkerPool) -> Iterator[Hosts]:
    with cable_between_hosts("doctor") as (cable, namespaces):
        doctor, worker = module_pool.start("doctor"), module_pool.start("worker0")
        doctor.run(enter_namespace, namespaces[0])
        worker.run(enter_namespace, namespaces[1])
        url = module_pool.new_url()
        worker.run(join, "worker0", 0, None, url, host=HOST_ADDRESSES[1])
        yield Hosts(cable, doctor, worker, worker.run(ports_of_this_worker), url)


@pytest.fixture
def hosts(both: Hosts) -> Iterator[Hosts]:
    yield both
    both.cable.on_packet = None
    both.cable.is_cut = False


class Segment(NamedTuple):
    """The fields of a TCP packet over IPv4 that the tests read."""

    source_port: int
    port: int
    opens: bool  # whether it asks for a new connection


def segment_of(packet: bytes) -> Segment | None:
    if packet[0] >> 4 != 4 or packet[9] != TCP:
        return None
    head = (packet[0] & 15) * 4
    source, port = struct.unpack_from(">HH", packet, head)
    return Segment(source, port, packet[head + 13] & (SYN | ACK) == SYN)


def found(lines: list[str]) -> list[str]:
    return [line for line in lines if line[:1].isdecimal() and line[1:3] == ". "]


def test_two_sound_hosts_have_no_findings(hosts: Hosts) -> None:
    status, lines = hosts.doctor.run(diagnose, hosts.address)
    assert (status, lines[-1]) == (0, "no problems found"), lines
    assert lines[1].startswith(f"{hosts.address}: worker0, which reaches this machine, by the channel tcp")


def test_a_firewall_that_lets_nobody_in_is_named(hosts: Hosts) -> None:
    def firewall(packet: bytes, to: int) -> bytes | None:
        segment = segment_of(packet)
        return None if to == 0 and segment is not None and segment.opens else packet

    hosts.cable.on_packet = firewall
    status, lines = hosts.doctor.run(diagnose, hosts.address)
    assert status == 1 and len(found(lines)) == 1, lines
    assert f"cannot connect to this machine at {HOST_ADDRESSES[0]}:" in lines[-1]


@pytest.mark.parametrize(
    ("which", "words"), [(0, "drops connections to port"), (1, "go over gRPC")], ids=["the only port", "the TCP port"]
)
def test_a_port_that_is_closed_by_a_firewall_is_named(hosts: Hosts, which: int, words: str) -> None:
    def firewall(packet: bytes, to: int) -> bytes | None:
        segment = segment_of(packet)
        return None if to == 1 and segment is not None and segment.port == hosts.ports[which] else packet

    hosts.cable.on_packet = firewall
    status, lines = hosts.doctor.run(diagnose, hosts.address)
    assert status == 1 and len(found(lines)) == 1 and words in lines[-1], lines
    assert str(hosts.ports[which]) in lines[-1]


def test_a_host_that_is_gone_is_named(hosts: Hosts) -> None:
    hosts.cable.is_cut = True
    status, lines = hosts.doctor.run(diagnose, hosts.address)
    assert status == 1 and f"{hosts.address} does not answer" in lines[-1], lines


def test_large_packets_that_get_lost_are_named(hosts: Hosts) -> None:
    hosts.cable.on_packet = lambda packet, _: packet if len(packet) <= 4000 else None
    status, lines = hosts.doctor.run(diagnose, hosts.address)
    assert status == 1 and len(found(lines)) == 1 and "MTU" in lines[-1], lines


def test_translated_addresses_are_named(hosts: Hosts) -> None:
    public, private = (bytes(map(int, host.split("."))) for host in (PUBLIC_ADDRESS, HOST_ADDRESSES[1]))

    def router(packet: bytes, to: int) -> bytes | None:
        return exchanged(packet, 16, public, private) if to == 1 else exchanged(packet, 12, private, public)

    hosts.cable.on_packet = router
    status, lines = hosts.doctor.run(diagnose, f"{PUBLIC_ADDRESS}:{hosts.ports[0]}")
    assert status == 1 and any("(NAT)" in line for line in found(lines)), lines


def exchanged(packet: bytes, at: int, old: bytes, new: bytes) -> bytes:
    """A packet with another address, and sums that fit again; unchanged if it does not have the old one there."""
    if packet[0] >> 4 != 4 or packet[at : at + 4] != old:
        return packet
    changed = bytearray(packet)
    changed[at : at + 4] = new
    head = (packet[0] & 15) * 4
    changed[10:12] = bytes(2)
    changed[10:12] = struct.pack(">H", sum_of(bytes(changed[:head])))
    if packet[9] == TCP:
        changed[head + 16 : head + 18] = bytes(2)
        pseudo = bytes(changed[12:20]) + struct.pack(">BBH", 0, TCP, len(packet) - head)
        changed[head + 16 : head + 18] = struct.pack(">H", sum_of(pseudo + bytes(changed[head:])))
    return bytes(changed)


def sum_of(data: bytes) -> int:
    """The checksum of the internet protocols."""
    data += b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def test_a_worker_that_listens_on_loopback_is_named(hosts: Hosts, module_pool: WorkerPool) -> None:
    """It was told so, or its own name stands for 127.0.1.1 on its host."""
    lost = module_pool.start("lost")
    lost.run(enter_namespace_of, hosts.worker.pid)
    lost.run(join, "lost", 1, None, hosts.url, host="127.0.0.1")
    status, lines = hosts.doctor.run(diagnose, hosts.address)
    assert status == 1 and any("lost says that it listens at 127.0.0.1:" in line for line in found(lines)), lines


def enter_namespace_of(pid: int) -> None:
    """This process, which has one thread so far, is on the host of another one from now on."""
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        assert ctypes.CDLL(None, use_errno=True).setns(descriptor, 0) == 0
    finally:
        os.close(descriptor)
