"""Unary calls prove that they belong to an open session, each once."""

from __future__ import annotations

import pytest

from rpcdist.ids import Identity
from rpcdist.transport.keys import COUNTER_KEY, PROOF_KEY, SESSION_KEY, ProvenSessions, SessionKeys, request_metadata

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
