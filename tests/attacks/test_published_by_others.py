"""A peer with the token describes published tensors of others: the stored data is bounded, and no reader follows a
false description.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from agents_here import agents_here
from inside_agents import Agent
from inside_published import extracts_of, hosts_of, origin_of, pinned_by

from rpcdist import rpc
from rpcdist.errors import CallRefused, ConfigError, TransportError
from rpcdist.parallel import Published, TensorPart
from rpcdist.parallel._published import _hosts, _source
from rpcdist.parallel._published._hosts import MAX_EXTRACTS, MAX_VERSION, HostCopy, Publisher
from rpcdist.parallel._published._layout import VersionLayout
from rpcdist.parallel._published._parts import NEWEST, PAGE_BYTES, READING, VERSION_IN, packed, pieces_of
from rpcdist.parallel._published._reader import VersionReader
from rpcdist.parallel._published._shard_connection import _names, actor_name, follow, known
from rpcdist.parallel._published._source import MAX_SOURCES_OF_WORKER, _AdmittedReader, ask, purpose_of
from rpcdist.rpc._current import use_agent
from rpcdist.testing import InProcessCluster, eventually
from rpcdist.transport import Node
from rpcdist.transport._tls.tls_socket import StreamSocket
from rpcdist.transport.sockets import SocketHub

LIMIT_S = 20.0


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("trainer", "g0", "evil") as cluster:
        yield cluster


def publisher_of(cluster: InProcessCluster) -> Publisher:
    """That of worker trainer, with one version."""
    with cluster.use("trainer"):
        weights = Published("policy")
        weights.publish({"a": torch.ones(4)})
        return origin_of(weights)


def test_a_peer_keeps_a_bounded_number_of_versions_from_being_overwritten(cluster: InProcessCluster) -> None:
    """A million names of sources that nobody has were kept, and the publisher had no room for another version."""
    origin = publisher_of(cluster)
    with cluster.use("evil"):
        with pytest.raises(CallRefused, match="cannot speak for worker 'nobody'"):
            ask(origin.source_name, "begin_fetch", "nobody/1", 1, 1.0, timeout=LIMIT_S).wait()
        for number in range(MAX_SOURCES_OF_WORKER):
            ask(origin.source_name, "begin_fetch", f"evil/{number}", 1, 1.0, timeout=LIMIT_S).wait()
        with pytest.raises(CallRefused, match="'evil' has 16 sources"):
            ask(origin.source_name, "begin_fetch", "evil/x", 1, 1.0, timeout=LIMIT_S).wait()
    assert len(pinned_by(origin)) == MAX_SOURCES_OF_WORKER


def test_a_peer_adds_a_bounded_number_of_hosts_to_the_chain(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = publisher_of(cluster)
    monkeypatch.setattr(origin, "_announce_to", lambda *_: None)  # an attacker would not say that it has no such source
    names = [f"evil/{number}" for number in range(MAX_SOURCES_OF_WORKER)]
    with cluster.use("evil"):
        with pytest.raises(CallRefused, match="cannot speak for worker 'nobody'"):
            ask(origin.source_name, "join", "nobody/1", "", None, [], timeout=LIMIT_S).wait()
        for name in names:
            ask(origin.source_name, "join", name, "", None, names, timeout=LIMIT_S).wait()
        with pytest.raises(CallRefused, match="'evil' has 16 sources"):
            ask(origin.source_name, "join", "evil/x", "", None, names, timeout=LIMIT_S).wait()
    assert len(hosts_of(origin)) == MAX_SOURCES_OF_WORKER


def test_a_peer_makes_a_bounded_number_of_extracts_which_end(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a copy of what was selected, in memory of the publisher."""
    with cluster.use("trainer"):
        weights = Published("policy")
        weights.publish({"a": torch.ones(4096)})
        origin = origin_of(weights)
    with cluster.use("evil"):
        there = rpc.get_actor(actor_name("policy", 0), LIMIT_S)

        def describe(dtype: str, size: int) -> object:
            return there.rpc_sync(timeout=LIMIT_S).describe(0, (dtype, [[[0], [0], [size]]]))

        for size in range(1, MAX_EXTRACTS + 1):
            describe("", size)
        with pytest.raises(CallRefused, match=r"want 64 other selections or dtypes .*; at most 64 are allowed"):
            describe("", MAX_EXTRACTS + 1)
        with monkeypatch.context() as short:
            short.setattr(_hosts, "IDLE_LIMIT_S", 0.0)
            cluster.run("trainer", weights.publish, {"a": torch.ones(4096)})
        assert not extracts_of(origin)
        for size in range(4095, 4091, -1):
            describe("", size)
        with pytest.raises(CallRefused, match="4 times the memory of the versions of 'trainer'"):
            describe("", 100)
        with pytest.raises(TransportError, match=r"an invalid (description|layout|selection)"):
            describe("int8", 1)
    with cluster.use("g0"):  # takes all tensors, and is told of the dtype
        mine, half = Published("policy"), Published("policy", dtype=torch.float16)
        part = TensorPart(torch.zeros(100), (1,), (4096,))
        mine.pull_into({"a": part})
        assert part.tensor.eq(1).all()
        with pytest.raises(ConfigError, match=r"'trainer' does not convert .policy. .*want 4 other selections"):
            half.pull_into({"a": part})
        for each in (mine, half):
            each.close()


def test_a_copy_follows_the_worker_alone_that_has_the_name(cluster: InProcessCluster) -> None:
    """Any worker could have all copies of others fetch from itself, or close them."""
    origin = publisher_of(cluster)
    description = origin.describe(0)
    with cluster.use("g0"):
        copy = HostCopy("policy", origin.layout, 2, origin.source_name)
        known("policy").copies.add(copy)
    false = ("evil/1", *description[1:])
    with cluster.use("evil"):
        with pytest.raises(CallRefused, match="'evil' does not publish 'policy': 'trainer' does"):
            rpc.rpc_sync("g0", follow, ("policy", 0, false), timeout=LIMIT_S)
        assert rpc.rpc_sync("g0", follow, ("another", 0, false), timeout=LIMIT_S) == 0
    assert copy.origin == origin.source_name
    with cluster.use("g0") as agent:
        assert list(_names[agent]) == ["policy"]  # nothing is kept for a name that nobody there uses
    copy.close()


@pytest.mark.parametrize(("segment", "held"), [(0, 4), (7, 5)], ids=["another version", "no such segment"])
def test_a_source_whose_newest_version_is_not_there_is_an_error(segment: int, held: int) -> None:
    """A consumer looked for it for ever, with the interpreter's lock, or failed by an index."""
    tensors = {"a": torch.ones(4)}
    source, own = (memoryview(bytearray(PAGE_BYTES)).cast("q") for _ in range(2))
    source[NEWEST] = packed(5, segment)
    source[VERSION_IN + segment] = held
    with closing(socket.socket()) as connection:
        layout = VersionLayout.of(pieces_of(tensors, "tensors", []))
        reader = VersionReader(layout, source, own, [torch.ones(layout.size_bytes(), dtype=torch.uint8)], connection)
        with pytest.raises(TransportError, match="announced version 5 as its newest"):
            reader.begin()
        assert own[READING] == 0


def test_a_source_is_spoken_for_by_its_worker_alone(cluster: InProcessCluster) -> None:
    """Any member could end the fetch of another host, whose version was overwritten, or take it out of the chain."""
    origin = publisher_of(cluster)
    with cluster.use("g0"):
        copy = HostCopy("policy", origin.layout, 2, origin.source_name)
        copy.join(origin.source_name, None)
        eventually(lambda: copy.newest == 1, "the host has the version")
        ask(origin.source_name, "begin_fetch", copy.source_name, 1, 1.0, timeout=LIMIT_S).wait()
    name = copy.source_name
    with cluster.use("evil"):
        for source, method, arguments in (
            (origin.source_name, "end_fetch", (name,)),
            (origin.source_name, "forget", (name,)),
            (origin.source_name, "join", (name, "", None, [])),
            (origin.source_name, "upstream_of", (name, "")),
            (origin.source_name, "chunk", (name, 1, 0, 1.0)),
            (name, "fetch", (origin.source_name, 99)),
            (name, "fetch", ()),
            (name, "fetch", (3, 99)),
        ):
            with pytest.raises(CallRefused, match="'evil' cannot speak for worker"):
                ask(source, method, *arguments, timeout=LIMIT_S).wait()
    assert hosts_of(origin) == [name] == pinned_by(origin)
    cluster.run("g0", copy.leave)
    eventually(lambda: not hosts_of(origin), "it has left the chain")


def ends_during_admission(*_: object) -> None:
    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def test_a_reader_of_the_host_is_admitted_under_its_own_name_and_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A member said any name, and its publisher waited for a worker that had no part in it; and it said it often."""
    with agents_here("trainer", "g0", "evil") as (trainer, g0, evil):
        with use_agent(trainer):
            weights = Published("policy")
            weights.publish({"a": torch.ones(4)})
        address = origin_of(weights).address
        if not address:
            pytest.skip("versions are not shared between processes here")

        def connect(agent: Agent, name: str) -> StreamSocket:
            assert isinstance(agent.network, Node)
            hub = SocketHub(agent.network)
            try:
                return hub.connect(address, purpose_of(name), LIMIT_S, unix=True)
            finally:
                hub.close()

        with pytest.raises(TransportError, match="worker 'evil' cannot read as worker 'g0': each worker speaks for"):
            connect(evil, "g0").close()
        monkeypatch.setattr(_source, "MAX_READERS_OF_WORKER", 2)
        with monkeypatch.context() as broken:
            broken.setattr(socket, "send_fds", ends_during_admission)
            for _ in range(3):  # none of them takes a place, or stays in the way of the next reader
                connect(evil, "evil").close()
        with connect(evil, "evil"):
            second = connect(evil, "evil")
            with pytest.raises(TransportError, match="worker 'evil' has 2 readers of 'policy' already"):
                connect(evil, "evil").close()
            connect(g0, "g0").close()
            second.close()
            connect(evil, "evil").close()  # one of its places is free again
        with use_agent(g0):
            mine, target = Published("policy"), {"a": torch.zeros(4)}
            assert mine.pull_into(target) == 1 and target["a"].eq(1).all()
            mine.close()
        with use_agent(trainer):
            weights.close()


def test_a_version_that_nobody_can_have_seen_stops_no_publisher(cluster: InProcessCluster) -> None:
    """One that was said to be the last possible number left none for the next version."""
    origin = publisher_of(cluster)
    with cluster.use("evil"):
        there = rpc.get_actor(actor_name("policy", 0), LIMIT_S)
        for number in (MAX_VERSION, 2 * MAX_VERSION, -1, True, 1.5):
            with pytest.raises(TransportError):
                there.rpc_sync(timeout=LIMIT_S).describe(number)
        there.rpc_sync(timeout=LIMIT_S).describe(MAX_VERSION - 1)
    with cluster.use("trainer"):
        assert origin.publish([torch.ones(4)], None, None) == MAX_VERSION + 1
    with cluster.use("g0"):
        mine, target = Published("policy"), {"a": torch.zeros(4)}
        assert mine.pull_into(target) == MAX_VERSION + 1 and target["a"].eq(1).all()
        mine.close()
    assert there.rpc_sync(timeout=LIMIT_S).describe(MAX_VERSION + 1)[0] == origin.source_name


class EndlessBytes:
    """A connection whose other end sends as fast as it is read."""

    def recv(self, size: int) -> bytes:
        return bytes(size)

    def close(self) -> None: ...


def test_a_reader_or_source_that_sends_without_end_is_not_read_without_end() -> None:
    """A publisher, or a consumer, read it for ever, with its lock."""
    connection: Any = EndlessBytes()
    own, source = (memoryview(bytearray(PAGE_BYTES)).cast("q") for _ in range(2))
    assert not _AdmittedReader("evil", own, connection).has_ended()
    layout = VersionLayout.of(pieces_of({"a": torch.ones(4)}, "tensors", []))
    assert not VersionReader(layout, source, own, [], connection).has_ended
