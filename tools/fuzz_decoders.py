"""Feeds the decoders of what peers send, and of what is in stores and files, with bytes.

atheris varies the bytes by the coverage that they reach.

`make fuzz` calls it for each target. Each exception of a decoder must be an error of this package; any other, and an
input that takes longer than `-timeout` or more memory than `-rss_limit_mb`, ends the run, and its bytes are in
`out/fuzz/`. Arguments after the target are those of libFuzzer: `python tools/fuzz_decoders.py values
-max_total_time=600`.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import atheris
import torch

with atheris.instrument_imports(include=["rpcdist"]):
    from google.protobuf.message import DecodeError

    from rpcdist._dashboard.job_history import JobHistory
    from rpcdist._proto import handshake_pb2, membership_pb2, rpc_pb2, rref_pb2, store_pb2, value_pb2
    from rpcdist.autograd._pass_message import PassMessage, read_message
    from rpcdist.collectives._group import agreement, elastic_rounds
    from rpcdist.collectives._group.state import GroupFailure
    from rpcdist.collectives._stores import store_service
    from rpcdist.collectives._stores.file_store import MAGIC, FileStore, FileTable
    from rpcdist.collectives._stores.shared_table import StoreTable
    from rpcdist.collectives._stores.store_operations import Missing
    from rpcdist.collectives._transports.p2p import requests
    from rpcdist.collectives._transports.p2p.peer_sockets import InStream
    from rpcdist.collectives.store import Add, Append, CompareSet, Get, ListKeys, QueuePop, QueuePush, Set
    from rpcdist.errors import RpcdistError
    from rpcdist.ids import Identity
    from rpcdist.inspection import (
        ChannelFacts,
        PoolFacts,
        WorkerFacts,
        describe,
        explain,
        facts_from_json,
        facts_to_json,
    )
    from rpcdist.inspection.facts import JobFacts
    from rpcdist.parallel._published import _hosts, _layout
    from rpcdist.rpc._membership import roster_messages
    from rpcdist.rpc._membership.roster import MembershipTable
    from rpcdist.rpc._peers.directory import Member
    from rpcdist.rpc._rref.messages import decode_messages
    from rpcdist.rpc._values.codec import decode, encode_into
    from rpcdist.rpc._values.compact import read_compact
    from rpcdist.rpc._values.failures import exception_of
    from rpcdist.rpc._values.plain import PlainWriter
    from rpcdist.transport._framing.frames import (
        Chunk,
        ReturnedSegments,
        call_frame,
        chunk_head,
        frame,
        parse,
        pass_frame,
    )
    from rpcdist.transport._framing.incoming import Incoming
    from rpcdist.transport.announced_bytes import AnnouncedBytes
    from rpcdist.transport.credentials import Credentials
    from rpcdist.transport.handshake import ClientHandshake, ServerHandshake
    from rpcdist.transport.hub_connector import HubAddress
    from rpcdist.transport.identities import identity_from_proto
    from rpcdist.transport.wire_messages import CallMessage, CompactPass

OUT = Path("out/fuzz")
MAX_ANNOUNCED_BYTES = 1 << 20
VALUES = (
    None,
    (1, -1, 2**70, 1.5, 2j, "text", b"bytes", bytearray(b"x"), True),
    [{"a": [1, 2]}, {i: i for i in range(40)}, torch.Size([2, 3]), torch.float32, torch.device("cpu")],
    (torch.arange(6).view(2, 3), [torch.ones(3)[1:], torch.zeros(2, 2).t()]),
)


def envelopes(data: bytes) -> None:
    """The messages that arrive on a session."""
    incoming = Incoming(announced=AnnouncedBytes(MAX_ANNOUNCED_BYTES))
    for message in parse(data, ["builtins:len"]):
        if isinstance(message, Chunk):
            incoming.chunk(message)
        elif not isinstance(message, ReturnedSegments):
            incoming.announce(message)


def values(data: bytes) -> None:
    """A value in protobuf, at a worker without pickle."""
    decode(value_pb2.Value.FromString(data), plain_only=True)


def compact_values(data: bytes) -> None:
    """A value in the compact form, after the number of its tensors."""
    read_compact(data[1:], data[0] if data else 0, ())


def passes(data: bytes) -> None:
    """The messages of a worker in a backward pass, about messages of one, two and three tensors."""
    sends: Any = {
        id: SimpleNamespace(to=1, node=SimpleNamespace(next_functions=(None,) * id), devices=None) for id in (1, 2, 3)
    }
    message = read_message(CompactPass(1, 2, data), (), 1, sends)
    message.read_gradients(plain_only=True)
    message.encode(1, 2)


def examples_of_passes() -> list[bytes]:
    message = PassMessage()
    message.begins, message.verdicts = True, {1: None, 2: 0, 3: 5}
    plain = message.encode(1, 2)[0].body
    message.add_gradients(2, [torch.ones(2), None])
    table = message.encode(1, 2)[0].body
    message.add_gradients(1, [torch.ones(2, dtype=torch.complex64)])
    message.follow_up, message.is_done, message.follows = b"work", True, True
    return [plain, table, message.encode(1, 2)[0].body]


def messages(data: bytes) -> None:
    """The messages of references and handshakes."""
    decode_messages(rref_pb2.RRefMessage.FromString(data), lambda rref, fork: True)
    identity_from_proto(handshake_pb2.Handshake.FromString(data).hello.identity)


def parts_of(data: bytes) -> Iterator[bytes]:
    """Several messages in one input, each after its size."""
    while len(data) > 2:
        size = int.from_bytes(data[:2], "little")
        yield data[2 : 2 + size]
        data = data[2 + size :]


def together(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(2, "little") + part for part in parts)


CREDENTIALS = Credentials(b"the token of the fuzzer", "default", Identity("worker0", 0, 7))
CALLER = (b"another token of a peer", "default", "rpc", Identity("worker1", 1, 8))


def handshakes(data: bytes) -> None:
    """Handshakes of both sides with a peer that does not know the token."""
    client = ClientHandshake(CREDENTIALS.token, CREDENTIALS.job, "rpc", CREDENTIALS.identity)
    client.start()
    for side in (client, ServerHandshake(CREDENTIALS)):
        with suppress(RpcdistError):
            for part in parts_of(data):
                side.receive(handshake_pb2.Handshake.FromString(part))
        assert not side.done


def examples_of_handshakes() -> list[bytes]:
    client = ClientHandshake(*CALLER)
    hello = client.start()
    challenge = ServerHandshake(CREDENTIALS).receive(hello)
    proof = handshake_pb2.Handshake(proof=handshake_pb2.Proof(proof=bytes(32)))
    welcome = handshake_pb2.Handshake(welcome=handshake_pb2.Welcome(session_id=bytes(16), proof=bytes(32)))
    assert challenge is not None
    return [together(*(step.SerializeToString() for step in steps)) for steps in ((hello, proof), (challenge, welcome))]


def membership(data: bytes) -> None:
    """Requests to join, the answers to them, and news of the coordinator."""
    with suppress(RpcdistError, DecodeError):
        roster_messages.members_of(membership_pb2.JoinReply.FromString(data), CREDENTIALS.identity, "", 0.0)
    with suppress(RpcdistError, DecodeError):
        roster_messages.news_of(membership_pb2.MembershipMessage.FromString(data))
    request = membership_pb2.JoinRequest.FromString(data)
    table = MembershipTable()
    for member in map(roster_messages.member_from_proto, (request.member, *request.known)):
        table.joins(member.identity)
        table.join(member, request.world_size)
        table.take_back(member, request.world_size, request.known_version)
        table.has_joined(member.identity)
        table.lost(member.identity, "lost")
        table.found(member.identity)


def examples_of_membership() -> list[bytes]:
    member = Member(Identity("worker1", 1, 8), "127.0.0.1:29500", "trainer")
    request = roster_messages.join_request(member, 2, 1.0)
    request.known.append(roster_messages.member_to_proto(member))
    members = roster_messages.members_to_bytes([member])
    messages = (request, membership_pb2.JoinReply(members=members), membership_pb2.MembershipMessage(members=members))
    return [message.SerializeToString() for message in messages]


def failures(data: bytes) -> None:
    """Exceptions of peers whose pickles are not read."""
    str(exception_of(rpc_pb2.Failure.FromString(data)))


def examples_of_failures() -> list[bytes]:
    bases = ["builtins:ValueError", "json.decoder:JSONDecodeError"]
    return [rpc_pb2.Failure(type_name="X", type_module="m", type_bases=bases, text="t").SerializeToString()]


def facts(data: bytes) -> None:
    """Facts that a worker sends to views of the job."""
    found = facts_from_json(data)
    describe(explain([found, facts_from_json(data)]))
    history = JobHistory()
    for time_s in (1.0, 2.0):
        history.add(JobFacts("default", (found,)), time_s)
    json.dumps(history.view(), allow_nan=False)


def examples_of_facts() -> list[bytes]:
    channel = ChannelFacts("aa", "worker1", True, "tcp")
    found = WorkerFacts(
        "worker0", 0, "7", "default/7", "", "host", 1, "127.0.0.1:1", 1, 1.0, "working", channels=(channel,),
        pool=PoolFacts(1, 0, 1, 0, 0, 0, 1),
    )  # fmt: skip
    whole = json.loads(facts_to_json(found))
    whole["threads"] = [{"id": 1, "name": "MainThread", "waits_for": [1], "lock": "l", "lock_holder": 1}]
    whole["calls_made"] = [{"id": 1, "session": "aa", "function": "f", "to": "worker0", "phase": "waiting", "age_s": 9}]
    served = {
        "id": 1,
        "session": "aa",
        "function": "f",
        "caller": "worker0",
        "phase": "running",
        "age_s": 9,
        "thread": 1,
    }
    return [json.dumps({**whole, "calls_served": [served]}).encode()]


def store(data: bytes) -> None:
    """Requests to a store, and its replies."""
    table = StoreTable()
    for part in parts_of(data):
        with suppress(RpcdistError, DecodeError):
            operation = store_service.operation_of(store_pb2.StoreRequest.FromString(part))
            result, _ = table.execute(operation)
            assert isinstance(result, Missing) or store_service.reply_with(operation, result) is not None
        with suppress(RpcdistError, DecodeError):
            store_service.result_of(store_pb2.StoreReply.FromString(part))


def examples_of_store() -> list[bytes]:
    operations = (
        Set(("a", "b"), (b"1", b"2")), Get(("a",)), Add("a", 3), Append("b", b"x"), CompareSet("b", b"2x", b"y"),
        QueuePush("q", b"1"), QueuePop("q"), ListKeys(""),
    )  # fmt: skip
    return [together(*(store_service.request_for(each, 1.0).SerializeToString() for each in operations))]


def store_files(data: bytes) -> None:
    """Whole records in the file of a store."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "store")
        records = [struct.pack("<II", len(part), zlib.crc32(part)) + part for part in parts_of(data)]
        path.touch(0o600)
        path.write_bytes(b"".join((MAGIC, bytes(8), *records)))
        with FileTable(str(path)).locked(writing=False):
            pass


def examples_of_store_files() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "store")
        with FileStore(path) as made:
            made.set("a", "1")
            made.queue_push("q", "1")
            data, parts = path.read_bytes()[16:], []
        while data:
            size, _ = struct.unpack_from("<II", data)
            parts.append(data[8 : 8 + size])
            data = data[8 + size :]
        return [together(*parts)]


def groups(data: bytes) -> None:
    """The texts that ranks write into a store, and send to each other, to make a group."""
    with suppress(RpcdistError):
        agreement._outcome(data)
    with suppress(RpcdistError):
        agreement._request_of(agreement._loaded(data))
    text = data.decode(errors="replace")
    for read in (elastic_rounds.Candidate.from_json, elastic_rounds.ClosedRound.from_json, HubAddress.parse):
        with suppress(ValueError, RecursionError):
            read(text)
    with suppress(ValueError, RecursionError):
        GroupFailure.from_json(json.loads(text)).to_json()


def examples_of_groups() -> list[bytes]:
    candidate = elastic_rounds.Candidate("a1", "127.0.0.1:29500/hub", 3, True, "a model")
    return [
        b'["next",[0,[[0,3]],"d",1],null]', b'[0,[[0,3]],"d",1]', b'["made",[1,2]]', b"127.0.0.1:29500/hub,@name",
        json.dumps(asdict(candidate)).encode(), elastic_rounds.ClosedRound((candidate,), {"b": "x"}).to_json().encode(),
        b'{"kind":"RankLost","reason":"x","ranks":[1]}',
    ]  # fmt: skip


def group_messages(data: bytes) -> None:
    """Messages between two ranks of a group, and their refusals; every other message has a receive."""

    def begin(header: requests.Header) -> Any:
        memory = memoryview(bytearray(min(header.size_bytes, 1 << 16)))
        return SimpleNamespace(memory=memory) if header.tag % 2 and len(memory) == header.size_bytes else None

    stream, at = InStream(begin, lambda target: None), 0
    with suppress(RpcdistError):
        while at < len(data):
            space = stream.space()
            size = min(len(space), len(data) - at, 1 + data[at] % 64)
            space[:size] = data[at : at + size]
            stream.advance(size)
            at += size
    requests.take_refusals(bytearray(data))


def examples_of_group_messages() -> list[bytes]:
    header = requests.Header(requests.MESSAGE, 0, 1, 0, 8)
    message = requests.pack_header(*header) + b"12345678"
    goodbye = requests.pack_header(requests.GOODBYE, 0, 0, 1, 0)
    return [message + goodbye, requests.refusal(header, header)]


def layouts(data: bytes) -> None:
    """Descriptions of published tensors, and selections from them."""
    with suppress(ValueError, RecursionError, RpcdistError):
        parts = json.loads(data)
        if not isinstance(parts, list) or len(parts) != 3:
            return
        plain, selected, description = parts
        with suppress(RpcdistError):
            _hosts.check_description(description)
        layout = _layout.VersionLayout.from_plain(plain)
        selection = _layout.Selection.from_plain(selected, layout)
        if selection.layout_of(layout).size_bytes() <= layout.size_bytes() < 1 << 20:
            memory = torch.zeros(max(1, layout.size_bytes()), dtype=torch.uint8)
            selection.taken_from(layout, layout.views(memory))


def examples_of_layouts() -> list[bytes]:
    plain = [["a", "b"], ["float32", "int8"], [[2, 3], [4]], [[0, [0, 0], [2, 3]]]]
    return [json.dumps([plain, ["", [[0, [0, 0], [1, 1]]]], ["worker0/1", plain, 2, 0, ["a"], 1]]).encode()]


def examples_of_values() -> list[bytes]:
    found = []
    for value in VALUES:
        encoded = value_pb2.Value()
        encode_into(encoded, value, plain_only=True)
        found.append(encoded.SerializeToString())
    return found


def examples_of_compact_values() -> list[bytes]:
    found = []
    for value in VALUES[:3]:
        writer = PlainWriter((), 1000)
        writer.write(value)
        found.append(b"\0" + bytes(writer.body))
    return found


def examples_of_envelopes() -> list[bytes]:
    call = rpc_pb2.Call(id=1, function="builtins:len")
    return [
        frame(rpc_pb2.Message(call=call)),
        frame(rpc_pb2.Message(call=call, transfer=1, large=[5])) + chunk_head(1, 0, 0, 5) + b"12345",
        bytes(call_frame(CallMessage(1, "builtins:len", 9, b"\1", 0), 2, b"builtins:len")),
        pass_frame(CompactPass(1, 2, examples_of_passes()[0])),
    ]


TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "envelopes": (envelopes, examples_of_envelopes),
    "values": (values, examples_of_values),
    "compact_values": (compact_values, examples_of_compact_values),
    "passes": (passes, examples_of_passes),
    "messages": (messages, lambda: [b""]),
    "handshakes": (handshakes, examples_of_handshakes),
    "membership": (membership, examples_of_membership),
    "failures": (failures, examples_of_failures),
    "facts": (facts, examples_of_facts),
    "store": (store, examples_of_store),
    "store_files": (store_files, examples_of_store_files),
    "groups": (groups, examples_of_groups),
    "group_messages": (group_messages, examples_of_group_messages),
    "layouts": (layouts, examples_of_layouts),
}


def main() -> None:
    name, *options = sys.argv[1:] or ["?"]
    if name not in TARGETS:
        raise SystemExit(f"usage: python tools/fuzz_decoders.py {{{','.join(TARGETS)}}} [options of libFuzzer]")
    function, examples = TARGETS[name]

    def one(data: bytes) -> None:
        try:
            function(data)
        except (RpcdistError, DecodeError):
            pass  # how a decoder refuses

    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as corpus:
        for number, example in enumerate(examples()):
            (Path(corpus) / str(number)).write_bytes(example)
        limits = ["-timeout=5", "-rss_limit_mb=2048", "-max_len=4096", f"-artifact_prefix={OUT}/{name}-"]
        atheris.Setup([sys.argv[0], corpus, *limits, *options], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
