"""Proofs of single requests, and the window that lets each counter through once; no socket, no clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rpcdist.transport.keys import ReplayWindow, request_proof, verify_request


def test_request_proofs_bind_method_counter_and_session() -> None:
    key = bytes(range(32))
    proof = request_proof(key, "/rpcdist.Store/Get", 1)
    assert verify_request(key, "/rpcdist.Store/Get", 1, proof)
    for other in [
        (key, "/rpcdist.Store/Set", 1, proof),
        (key, "/rpcdist.Store/Get", 2, proof),
        (bytes(32), "/rpcdist.Store/Get", 1, proof),
        (key, "/rpcdist.Store/Get", 1, proof[:-1] + bytes([proof[-1] ^ 1])),
        (key, "/rpcdist.Store/Get", 1, b""),
        (key, "/rpcdist.Store/Get", 0, request_proof(key, "/rpcdist.Store/Get", 0)),
        (key, "/rpcdist.Store/Get", -1, proof),
        (key, "/rpcdist.Store/Get", 2**64, proof),
    ]:
        assert not verify_request(*other)


def test_the_replay_window_takes_each_counter_once() -> None:
    window = ReplayWindow(size=8)
    table = [
        (0, False), (1, True), (1, False), (3, True), (2, True), (2, False), (3, False),
        (10, True), (3, False), (4, True), (2, False), (10, False),
        (10**15, True), (10, False), (10**15 - 7, True), (10**15 - 8, False), (-5, False),
    ]  # fmt: skip
    assert [(counter, window.accept(counter)) for counter, _ in table] == table


@given(st.lists(st.integers(-2, 60), max_size=80), st.integers(1, 16))
def test_the_replay_window_equals_a_set_and_a_limit(counters: list[int], size: int) -> None:
    window, seen, highest = ReplayWindow(size), {0}, 0
    for counter in counters:
        fresh = counter > 0 and counter not in seen and counter > highest - size
        assert window.accept(counter) is fresh
        if fresh:
            seen.add(counter)
            highest = max(highest, counter)
