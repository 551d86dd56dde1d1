"""Unary calls prove that they belong to an open session, each once; and their messages in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from itertools import repeat

import pytest

from rpcdist._proto import store_pb2
from rpcdist.errors import ProtocolViolation
from rpcdist.ids import Identity
from rpcdist.transport.keys import (
    COUNTER_KEY,
    LARGEST_UNCUT_BYTES,
    PROOF_KEY,
    SESSION_KEY,
    ProvenSessions,
    SessionKeys,
    cut,
    joined,
    request_metadata,
)

KEYS = SessionKeys(b"s" * 16, b"k" * 32)
PEER = Identity("peer", 1, 2)
PATH = "/rpcdist.Store/Get"


@pytest.fixture
def proven() -> ProvenSessions:
    proven = ProvenSessions()
    proven.add(KEYS, PEER)
    return proven


def test_each_call_of_a_session_is_accepted_once(proven: ProvenSessions) -> None:
    first, second = request_metadata(KEYS, 1, PATH), request_metadata(KEYS, 2, PATH)
    assert [proven.peer_of(PATH, call) for call in (second, first)] == [PEER, PEER]  # in any order
    assert proven.peer_of(PATH, first) is None


def test_a_call_of_another_method_session_or_key_is_refused(proven: ProvenSessions) -> None:
    assert proven.peer_of("/rpcdist.Store/Set", request_metadata(KEYS, 1, PATH)) is None
    assert proven.peer_of(PATH, request_metadata(KEYS._replace(session_id=b"t" * 16), 1, PATH)) is None
    assert proven.peer_of(PATH, request_metadata(KEYS._replace(key=b"l" * 32), 1, PATH)) is None
    proven.remove(KEYS)
    assert proven.peer_of(PATH, request_metadata(KEYS, 1, PATH)) is None


@pytest.mark.parametrize("counter", ["", "-1", "0", "x", "1.0", "9" * 30, "\N{ARABIC-INDIC DIGIT ONE}"])
def test_a_malformed_counter_is_refused(proven: ProvenSessions, counter: str) -> None:
    metadata = {**dict(request_metadata(KEYS, 1, PATH)), COUNTER_KEY: counter}
    assert proven.peer_of(PATH, metadata.items()) is None


@pytest.mark.parametrize("missing", [SESSION_KEY, COUNTER_KEY, PROOF_KEY])
def test_missing_metadata_is_refused(proven: ProvenSessions, missing: str) -> None:
    metadata = [entry for entry in request_metadata(KEYS, 1, PATH) if entry[0] != missing]
    assert proven.peer_of(PATH, metadata) is None
    assert proven.peer_of(PATH, request_metadata(KEYS, 1, PATH)) == PEER  # an unproven call uses no number up


async def test_pieces_that_are_no_whole_message_are_not_read_on() -> None:
    """Each empty piece took 400 bytes and was not counted: a peer that sent them without end filled the memory."""
    num_read = 0

    async def sent(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
        nonlocal num_read
        for piece in pieces:
            num_read += 1
            yield piece

    whole_bytes = len(store_pb2.Piece.FromString(next(cut(bytes(LARGEST_UNCUT_BYTES), store_pb2.Piece))).data)
    for data in (b"", b"x", bytes(whole_bytes), bytes(2 * whole_bytes + 1)):
        assert await joined(sent(cut(data, store_pb2.Piece)), store_pb2.Piece) == data
    for size in (0, 1, whole_bytes - 1):
        num_read, piece = 0, store_pb2.Piece(data=bytes(size)).SerializeToString()
        with pytest.raises(ProtocolViolation, match=f"a piece of {size} bytes is not the last"):
            await joined(sent(repeat(piece, 100)), store_pb2.Piece)
        assert num_read == 2
