"""Small holes: files that others may write, memory that goes away under the sender, deep messages, tables that grow."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path

import pytest
import torch
from values_helpers import encode

from rpcdist import rpc
from rpcdist._proto import rpc_pb2
from rpcdist.collectives import FileStore
from rpcdist.collectives._group.watch import WatchConnection
from rpcdist.errors import DistStoreError, ProtocolViolation, TransportError
from rpcdist.testing import InProcessCluster, eventually
from rpcdist.transport._framing.outgoing import Outgoing


@pytest.mark.parametrize("mode", [0o660, 0o606, 0o622])
def test_a_file_of_a_store_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "store"
    FileStore(str(path)).close()
    path.chmod(mode)
    with pytest.raises(DistStoreError, match=rf"can be written by others \(mode 0{mode:o}\).*chmod 600"):
        FileStore(str(path))


def test_an_empty_file_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.touch()
    path.chmod(0o666)
    with FileStore(str(path)) as store:
        store.set("key", "value")
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.touch()
    os.chown(path, 12345, 12345)
    with pytest.raises(DistStoreError, match="belongs to user id 12345, and this process runs as 0"):
        FileStore(str(path))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DistStoreError, match="is not a regular file"):
        FileStore(str(tmp_path / "pipe"))
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DistStoreError):
        FileStore(str(tmp_path / "link"))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("how", ["shrunk", "grown", "a view", "in a pickle"])
def test_memory_that_goes_away_while_it_is_sent_ends_the_session_and_not_the_process(how: str) -> None:
    """On gRPC the sender crashed."""
    tensor = torch.ones(1 << 20)
    values = {"a view": tensor[:-1], "in a pickle": {"tensor": tensor, "set": {1}}}
    encoded = encode(values.get(how, tensor))
    outgoing = Outgoing()
    outgoing.add(rpc_pb2.Message(call=rpc_pb2.Call(arguments=encoded.value)), encoded.large)
    assert outgoing.next_envelope() is not None and outgoing.next_envelope() is not None
    tensor.untyped_storage().resize_(8 << 20 if how == "grown" else 0)
    with pytest.raises(TransportError, match="freed or resized while it was being sent"):
        outgoing.next_envelope()


def test_memory_of_a_tensor_that_gets_another_storage_stays() -> None:
    tensor = torch.arange(1 << 18)
    encoded = encode(tensor)
    tensor.set_(torch.zeros(4, dtype=torch.int64).untyped_storage())
    view = encoded.large[0].view
    assert len(view) == 8 << 18 and view[8] == 1


async def test_brackets_in_brackets_end_a_watch_by_name() -> None:
    ours, theirs = socket.socketpair()
    try:
        connection = WatchConnection(3, ours)
        deep = b"[" * 60_000
        await asyncio.get_running_loop().sock_sendall(theirs, len(deep).to_bytes(4, "big") + deep)
        with pytest.raises(ProtocolViolation, match="rank 3 sent a watch message that is not JSON"):
            await connection.receive()
        fine = json.dumps({"say": "hello"}).encode()
        await asyncio.get_running_loop().sock_sendall(theirs, len(fine).to_bytes(4, "big") + fine)
        assert await connection.receive() == {"say": "hello"}
    finally:
        ours.close()
        theirs.close()


def accept(value: object) -> None:
    """Takes a reference, whose share the owner is told about."""


def test_what_is_kept_of_a_worker_goes_with_its_replacement() -> None:
    """Of every process that ever sent a control message something was kept."""
    with InProcessCluster("a", "b", "c") as cluster:

        def incarnations() -> set[int]:
            """Of worker c, as far as b keeps something of them."""
            with cluster.use("b") as agent:
                return {number for id, number in agent._control._inboxes if id == 2}

        for _ in range(3):
            with cluster.use("c") as agent:
                now = agent.directory.me.incarnation
                rpc.rpc_sync("b", accept, (rpc.remote("b", list),))
            eventually(lambda now=now: incarnations() == {now}, "b keeps something of this c alone")  # type: ignore[misc]
            cluster.kill("c")
            cluster.restart("c")
            assert cluster.run("c", rpc.rpc_sync, "b", max, (1, 2)) == 2
        eventually(lambda: now not in incarnations(), "b has forgotten the last c that was killed")
