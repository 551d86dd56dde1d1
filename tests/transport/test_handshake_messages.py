"""Messages of the handshake that come out of order, are malformed, or random: nothing of that opens a session."""

from __future__ import annotations

from typing import Any

import pytest
from handshake_sides import ALICE, BOB, client, server, text_of, wire
from hypothesis import given
from hypothesis import strategies as st

from rpcdist._proto import handshake_pb2 as pb
from rpcdist.errors import AuthenticationFailed, ProtocolViolation
from rpcdist.transport.handshake import MAX_PURPOSE_BYTES, ClientHandshake, ServerHandshake
from rpcdist.transport.handshake_side import MAX_HANDSHAKE_BYTES, PROTOCOL_VERSION
from rpcdist.transport.identities import identity_to_proto

Code = pb.Refusal.Code


def _samples() -> dict[str, pb.Handshake]:
    a, b = client(), server()
    hello = a.start()
    challenge = wire(b.receive(hello))
    proof = wire(a.receive(challenge))
    welcome = wire(b.receive(proof))
    refusal = pb.Handshake(refusal=pb.Refusal(reason="no"))
    return {"hello": hello, "challenge": challenge, "proof": proof, "welcome": welcome, "refusal": refusal}


def _client_in(state: str) -> ClientHandshake:
    a, b = client(), server()
    if state == "start":
        return a
    challenge = wire(b.receive(a.start()))
    if state == "hello sent":
        return a
    proof = wire(a.receive(challenge))
    if state == "done":
        a.receive(wire(b.receive(proof)))
    if state == "failed":
        a.receive(_samples()["refusal"])
    return a


def _server_in(state: str) -> ServerHandshake:
    a, b = client(), server()
    if state == "start":
        return b
    proof = wire(a.receive(wire(b.receive(a.start()))))
    if state == "done":
        b.receive(proof)
    if state == "failed":
        b.receive(_samples()["refusal"])
    return b


CLIENT_TAKES = {"hello sent": {"challenge", "refusal"}, "proof sent": {"welcome", "refusal"}}
SERVER_TAKES = {"start": {"hello"}, "challenge sent": {"proof", "refusal"}}


@pytest.mark.parametrize("step", ["hello", "challenge", "proof", "welcome", "refusal"])
@pytest.mark.parametrize("state", ["start", "hello sent", "proof sent", "done", "failed"])
def test_a_client_takes_no_message_out_of_order(state: str, step: str) -> None:
    _check_order(_client_in(state), state, step, CLIENT_TAKES)


@pytest.mark.parametrize("step", ["hello", "challenge", "proof", "welcome", "refusal"])
@pytest.mark.parametrize("state", ["start", "challenge sent", "done", "failed"])
def test_a_server_takes_no_message_out_of_order(state: str, step: str) -> None:
    _check_order(_server_in(state), state, step, SERVER_TAKES)


def _check_order(side: ClientHandshake | ServerHandshake, state: str, step: str, takes: dict[str, set[str]]) -> None:
    done_before = side.done
    if step in takes.get(state, set()):
        side.receive(_samples()[step])  # of another connection: it may fail, but not as a violation
    else:
        with pytest.raises(ProtocolViolation):
            side.receive(_samples()[step])
        with pytest.raises(ProtocolViolation):
            side.receive(_samples()["hello"])  # and it stays closed
    assert side.done is done_before


def test_starting_twice_is_a_violation() -> None:
    a = client()
    a.start()
    with pytest.raises(ProtocolViolation):
        a.start()


def _odd_hello(**fields: Any) -> pb.Handshake:
    good: dict[str, Any] = {"nonce": bytes(32), "role": "rpc", "identity": identity_to_proto(ALICE)}
    return pb.Handshake(hello=pb.Hello(version=PROTOCOL_VERSION, **good | fields))


MALFORMED: dict[str, pb.Handshake] = {
    "empty": pb.Handshake(),
    "nonce of 31": _odd_hello(nonce=bytes(31)),
    "nonce of 33": _odd_hello(nonce=bytes(33)),
    "no role": _odd_hello(role=""),
    "long role": _odd_hello(role="r" * 33),
    "odd role": _odd_hello(role="r\n"),
    "long job": _odd_hello(job="j" * 129),
    "job with control characters": _odd_hello(job="a\x1b[2J"),
    "long purpose": _odd_hello(purpose="p" * (MAX_PURPOSE_BYTES + 1)),
    "purpose with control characters": _odd_hello(purpose="a\n"),
    "long channel": _odd_hello(channel="c" * 301),
    "long name": _odd_hello(identity=pb.Identity(name="n" * 129)),
    "no name": _odd_hello(identity=pb.Identity(id=3)),
    "odd id": _odd_hello(identity=pb.Identity(name="a", id=-2)),
    "too large": _odd_hello(nonce=bytes(MAX_HANDSHAKE_BYTES)),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_hellos_are_violations(kind: str) -> None:
    b = server(job="")
    with pytest.raises(ProtocolViolation):
        b.receive(MALFORMED[kind])
    assert not b.done


@pytest.mark.parametrize(("nonce_bytes", "proof_bytes"), [(31, 32), (32, 0), (32, 33)])
def test_malformed_challenges_are_violations(nonce_bytes: int, proof_bytes: int) -> None:
    a = client()
    a.start()
    challenge = pb.Challenge(nonce=bytes(nonce_bytes), proof=bytes(proof_bytes), identity=identity_to_proto(BOB))
    with pytest.raises(ProtocolViolation):
        a.receive(pb.Handshake(challenge=challenge))


def test_what_a_peer_says_is_shown_without_control_characters_and_bounded() -> None:
    a = client()
    a.start()
    a.receive(pb.Handshake(refusal=pb.Refusal(reason="bad\x1b[2J\nnews " + "x" * 3000, code=Code.POLICY)))
    text = text_of(a)
    assert "bad?[2J?news" in text and len(text) < 700


steps = st.sampled_from(["hello", "challenge", "proof", "welcome", "refusal"])
identities = st.builds(
    pb.Identity, name=st.text(max_size=140), id=st.integers(-3, 2**40), incarnation=st.integers(0, 2**64 - 1)
)
lengths = st.sampled_from([0, 16, 31, 32, 33])


@st.composite
def messages(draw: st.DrawFn) -> pb.Handshake:
    data = draw(st.binary(min_size=33, max_size=33))[: draw(lengths)]
    identity = draw(identities)
    match draw(steps):
        case "hello":
            version = draw(st.sampled_from([0, *[PROTOCOL_VERSION] * 3, PROTOCOL_VERSION + 1]))
            job = draw(st.sampled_from(["digits", "letters", ""]))
            role = draw(st.sampled_from(["rpc", "store", "", "A"]))
            return pb.Handshake(hello=pb.Hello(version=version, nonce=data, job=job, role=role, identity=identity))
        case "challenge":
            return pb.Handshake(
                challenge=pb.Challenge(nonce=data, proof=draw(st.binary(max_size=40)), identity=identity)
            )
        case "proof":
            return pb.Handshake(proof=pb.Proof(proof=data))
        case "welcome":
            return pb.Handshake(welcome=pb.Welcome(session_id=data[:16], proof=data))
        case _:
            return pb.Handshake(refusal=pb.Refusal(reason=draw(st.text()), code=draw(st.sampled_from(Code.keys()))))


@given(st.lists(messages(), max_size=6), st.booleans())
def test_nothing_opens_a_session_without_the_token(arriving: list[pb.Handshake], as_client: bool) -> None:
    side: ClientHandshake | ServerHandshake = client() if as_client else server()
    if isinstance(side, ClientHandshake):
        side.start()
    for message in arriving:
        try:
            side.receive(wire(message))
        except ProtocolViolation:
            pass
        assert not side.done
    with pytest.raises(AuthenticationFailed):
        _ = side.peer


@given(st.binary(max_size=200))
def test_random_bytes_that_parse_do_no_harm(data: bytes) -> None:
    try:
        message = pb.Handshake.FromString(data)
    except Exception:  # not protobuf; the channel reports it
        return
    side = server()
    try:
        side.receive(message)
    except ProtocolViolation:
        pass
    assert not side.done
