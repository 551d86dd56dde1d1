"""Small holes: files that others may write, memory that goes away under the sender, deep messages, tables that grow."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
from pathlib import Path

import pytest
import torch
from inside_agents import heard_senders
from values_helpers import encode

from rpcdist import rpc
from rpcdist._launch.job_records import job_record, jobs
from rpcdist._launch.output import JobOutput
from rpcdist._proto import membership_pb2 as pb
from rpcdist._proto import rpc_pb2
from rpcdist.collectives import FileStore
from rpcdist.collectives._group.watch import WatchConnection
from rpcdist.errors import ConfigError, DistStoreError, ProtocolViolation, TransportError
from rpcdist.ids import Identity
from rpcdist.private_files import runtime_folder
from rpcdist.rpc._membership.roster import MembershipTable
from rpcdist.rpc._membership.roster_messages import member_from_proto
from rpcdist.rpc._peers.directory import Member
from rpcdist.testing import InProcessCluster, eventually
from rpcdist.transport._framing.outgoing import Outgoing
from rpcdist.transport.identities import identity_to_proto


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
                return {sender.incarnation for sender in heard_senders(agent) if sender.worker == 2}

        for _ in range(3):
            with cluster.use("c") as agent:
                now = agent.directory.me.incarnation
                rpc.rpc_sync("b", accept, (rpc.remote("b", list),))
            eventually(lambda now=now: incarnations() == {now}, "b keeps something of this c alone")  # type: ignore[misc]
            cluster.kill("c")
            cluster.restart("c")
            assert cluster.run("c", rpc.rpc_sync, "b", max, (1, 2)) == 2
        eventually(lambda: now not in incarnations(), "b has forgotten the last c that was killed")


def test_a_log_is_written_into_no_file_that_others_have_linked_there(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("of the user")
    (tmp_path / "a.0.log").symlink_to(precious)
    os.mkfifo(tmp_path / "b.0.log")
    (tmp_path / "c.0.log").write_text("of an earlier job")
    output = JobOutput(log_dir=tmp_path)
    for name in ("a", "b"):
        with pytest.raises(ConfigError, match="use another log_dir"):
            output.open(name, 0)
    reader = os.open(tmp_path / "b.0.log", os.O_RDONLY | os.O_NONBLOCK)  # without one, a pipe cannot be opened
    with pytest.raises(ConfigError, match="is not a regular file"):
        output.open("b", 0)
    os.close(reader)
    assert precious.read_text() == "of the user"
    log = output.open("c", 0)
    log.write("stdout", b"new\n")
    log.close()
    assert (tmp_path / "c.0.log").read_bytes() == b"new\n"


def test_files_that_are_no_records_of_jobs_stop_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = Path(runtime_folder(create=True))
    os.mkfifo(folder / "1-1.json")
    (folder / "1-2.json").write_text("[" * 100_000)
    (folder / "1-3.json").write_text("3")
    (folder / "note.json.new").write_text("")
    with job_record("training", "127.0.0.1:1", None):
        assert [job.name for job in jobs()] == ["training"]


def test_what_a_newcomer_says_of_itself_is_short() -> None:
    """Every member keeps it, and is sent it again and again."""
    told = pb.Member(identity=identity_to_proto(Identity("a", 0, 1)), address="127.0.0.1:1", role="trainer")
    assert member_from_proto(told).role == "trainer"
    for field in ("role", "address"):
        long = pb.Member()
        long.CopyFrom(told)
        setattr(long, field, "x" * 1000)
        with pytest.raises(ProtocolViolation, match="the role and address of a member are too long"):
            member_from_proto(long)


def test_a_world_has_a_size_that_can_be_counted() -> None:
    """The ranks that are missing were listed, up to any number that a newcomer named."""
    table = MembershipTable()
    verdict = table.join(Member(Identity("a", 0, 1), "127.0.0.1:1"), 1 << 62)
    assert verdict.outcome == pb.JoinReply.Outcome.ID_OUT_OF_RANGE and len(table) == 0 and table.world_size is None


def test_a_full_disk_ends_a_log_and_not_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher ended all ranks, with the words of the system alone."""
    log = JobOutput(log_dir=tmp_path).open("a", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # of all files of this process
    try:
        for number in range(3):
            log.write("stdout", b"line %d\n" % number)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.close()
    assert log.tail(3) == "line 0\nline 1\nline 2\n"
    assert [text.partition(":")[0] for text in caplog.messages] == [f"the log {tmp_path / 'a.0.log'} ends here"]
