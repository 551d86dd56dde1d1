"""How often a rank spins for a message before it sleeps."""

from __future__ import annotations

import pytest

from rpcdist.collectives._transports.sockets import spin_policy
from rpcdist.collectives._transports.sockets.spin_policy import MAX_SPINS, MIN_SPINS, SpinPolicy, message_spin_s
from rpcdist.time_limits import CROWDED_SPIN_S, MESSAGE_SPIN_S

HERE, THERE = "127.0.0.1:1/a", "127.0.0.2:1/a"


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spin_policy, "_num_cores", lambda: 2)


@pytest.mark.parametrize(
    ("addresses", "spins"),
    [([HERE, HERE], MAX_SPINS), ([HERE, HERE, HERE], 0), ([HERE, THERE, HERE, THERE], MAX_SPINS)],
)
def test_more_ranks_than_cores_do_not_spin_at_all(addresses: list[str], spins: int) -> None:
    spin_policy = SpinPolicy(0, addresses)
    assert spin_policy.spins == spins
    spin_policy.message_came()
    spin_policy.slept(1e-6)
    assert spin_policy.spins == spins
    assert message_spin_s(0, addresses) == (MESSAGE_SPIN_S if spins else CROWDED_SPIN_S)


def test_it_gives_up_on_slow_peers_and_learns_when_they_are_fast_again() -> None:
    spin_policy = SpinPolicy(0, [HERE, HERE])
    for _ in range(10):
        spin_policy.slept(0.5)
    assert spin_policy.spins == MIN_SPINS
    spin_policy.slept(20e-6)
    assert spin_policy.spins == 2 * MIN_SPINS
    for _ in range(10):
        spin_policy.message_came()
    assert spin_policy.spins == MAX_SPINS
