"""Feeds the decoders of what peers send with bytes that atheris varies by the coverage that they reach.

`make fuzz` calls it for each target. Each exception of a decoder must be an error of this package; any other, and an
input that takes longer than `-timeout` or more memory than `-rss_limit_mb`, ends the run, and its bytes are in
`out/fuzz/`. Arguments after the target are those of libFuzzer: `python tools/fuzz_decoders.py values
-max_total_time=600`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import atheris
import torch

with atheris.instrument_imports(include=["rpcdist"]):
    from google.protobuf.message import DecodeError

    from rpcdist._proto import handshake_pb2, rpc_pb2, rref_pb2, value_pb2
    from rpcdist.autograd._pass_message import PassMessage, read_message
    from rpcdist.errors import RpcdistError
    from rpcdist.rpc._rref.messages import decode_messages
    from rpcdist.rpc._values.codec import decode, encode_into
    from rpcdist.rpc._values.compact import read_compact
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
    sends: Any = {id: SimpleNamespace(to=1, node=SimpleNamespace(next_functions=(None,) * id)) for id in (1, 2, 3)}
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
