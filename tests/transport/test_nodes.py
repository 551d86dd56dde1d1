"""Several nodes in one process, and the one that its parts share."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from transport_nodes import LIMIT_S, Nodes, Recorder, open_link

from rpcdist._proto import rpc_pb2
from rpcdist.errors import AuthenticationFailed, ConfigError, RpcdistError
from rpcdist.testing import eventually
from rpcdist.transport import NodeOptions
from rpcdist.transport import node as node_module
from rpcdist.transport._server import silent_connections
from rpcdist.transport.fork import ForkGuard
from rpcdist.transport.unix_sockets import has_abstract_sockets

TOKENS = ("the token of one job", "the token of another")


def test_each_node_has_a_port_an_identity_and_a_token_of_its_own(nodes: Nodes) -> None:
    jobs = [[nodes.make(f"{side}-{job}", serve=True, token=TOKENS[job]) for side in "ab"] for job in (0, 1)]
    assert len({node.address for job in jobs for node in job}) == 4
    assert len({node.identity for job in jobs for node in job}) == 4
    for client, server in jobs:
        server.handle_role("echo", Recorder(echo=True))
        link = open_link(client, server, handler=Recorder())
        assert link.peer == server.identity
    with pytest.raises(AuthenticationFailed, match="did not prove the job token"):
        open_link(jobs[0][0], jobs[1][1])


def test_another_token_is_named_at_the_side_that_is_asked_too(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    server, friend = (nodes.make(name, serve=True, token=TOKENS[0]) for name in ("server", "friend"))
    server.handle_role("echo", Recorder(echo=True))
    for _ in range(3):
        open_link(friend, server)
    assert server.strangers.silent == 0 and not caplog.records
    stranger = nodes.make("stranger", token=TOKENS[1])
    for _ in range(2):
        with pytest.raises(AuthenticationFailed):
            open_link(stranger, server)
    eventually(lambda: server.strangers.silent == 2)  # counted on its loop, perhaps after the call has failed
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    if has_abstract_sockets():
        assert len(told) == 1 and "'stranger'" in told[0] and "The job tokens differ" in told[0]


def test_another_token_from_another_host_is_noticed_once(
    nodes: Nodes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPCDIST_CHANNELS", "tcp")  # no Unix socket, by which a process of this host would tell
    monkeypatch.setattr(silent_connections, "HANDSHAKE_LIMIT_S", limit_s := 0.3)
    server, friend = (nodes.make(name, serve=True, token=TOKENS[0]) for name in ("server", "friend"))
    server.handle_role("echo", Recorder(echo=True))
    open_link(friend, server)
    stranger = nodes.make("stranger", token=TOKENS[1])

    def has_more_silent(than: int) -> bool:
        return server.strangers.silent > than

    for _ in range(2):
        before = server.strangers.silent
        with pytest.raises(AuthenticationFailed):
            open_link(stranger, server)
        eventually(partial(has_more_silent, before))  # counted on its loop, perhaps after the call has failed
        eventually(lambda: "has another job token" in caplog.text)
    server.run(asyncio.sleep(2 * limit_s), LIMIT_S)  # on the loop that would warn again, after its limit
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1 and "RPCDIST_TOKEN" in told[0]


def test_a_node_ends_and_the_others_go_on(nodes: Nodes) -> None:
    server, client, bystander = (nodes.make(name, serve=True) for name in ("server", "client", "bystander"))
    server.handle_role("echo", Recorder(echo=True))
    answers = Recorder()
    link = open_link(client, server, handler=answers)
    nodes.stop(bystander)
    link.session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=7)))
    assert [message.id for message in answers.wait(1)] == [7]
    with pytest.raises(RpcdistError, match="is closed"):
        bystander.run(bystander.connect("127.0.0.1:1", "echo", LIMIT_S), LIMIT_S)


def test_the_shared_node_lives_until_its_last_user_has_released_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "_shared", None)
    first = node_module.acquire_node(NodeOptions(token=TOKENS[0]))
    assert node_module.acquire_node() is first and node_module.acquire_node(NodeOptions(token=TOKENS[0])) is first
    with pytest.raises(ConfigError, match="another job token"):
        node_module.acquire_node(NodeOptions(token=TOKENS[1]))
    first.release()
    first.release()
    assert first.serve("127.0.0.1", 0)
    first.release()
    with pytest.raises(RpcdistError, match="is closed"):
        first.serve("127.0.0.1", 0)
    second = node_module.acquire_node(NodeOptions(token=TOKENS[1]))  # nobody uses the other token any more
    assert second is not first
    second.release()


def test_children_are_guarded_until_the_last_node_has_ended() -> None:
    guard = ForkGuard()
    guard.mark_running()
    guard.mark_running()
    guard.mark_stopped()
    guard.after_fork_in_child()
    assert guard.in_child
    guard = ForkGuard()
    guard.mark_running()
    guard.mark_stopped()
    guard.after_fork_in_child()
    assert not guard.in_child
