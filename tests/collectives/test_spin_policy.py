"""How long a rank spins before it sleeps."""

from __future__ import annotations

import pytest

from rpcdist.collectives._transports import transport_base
from rpcdist.collectives._transports.transport_base import SpinPolicy, ranks_here
from rpcdist.errors import ConfigError
from rpcdist.time_limits import SPIN_LIMIT_S

HERE, THERE = "127.0.0.1:1/a", "127.0.0.2:1/a"


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_base, "num_cores", lambda: 2)


@pytest.mark.parametrize(
    ("addresses", "ranks"), [([], 0), ([HERE, HERE], 2), ([HERE, HERE, HERE], 3), ([HERE, THERE, HERE, THERE], 2)]
)
def test_ranks_on_other_hosts_do_not_count(addresses: list[str], ranks: int) -> None:
    assert ranks_here(0, addresses) == ranks


@pytest.mark.parametrize(("ranks", "spin_s"), [(0, SPIN_LIMIT_S), (2, SPIN_LIMIT_S), (3, 0.0)])
def test_more_ranks_than_cores_do_not_spin_at_all(ranks: int, spin_s: float) -> None:
    policy = SpinPolicy(ranks)
    assert policy.spin_s == spin_s
    policy.spin_succeeded()
    policy.slept(1e-6)
    assert policy.spin_s == spin_s


def test_it_gives_up_on_slow_peers_and_learns_when_they_are_fast_again() -> None:
    policy = SpinPolicy(2)
    for _ in range(10):
        policy.slept(0.5)
    assert policy.spin_s == SPIN_LIMIT_S / 32
    policy.slept(20e-6)
    assert policy.spin_s == SPIN_LIMIT_S / 16
    for _ in range(10):
        policy.spin_succeeded()
    assert policy.spin_s == SPIN_LIMIT_S


def test_no_rank_spins_if_polling_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_POLLING", "off")
    policy = SpinPolicy(2)
    policy.spin_succeeded()
    assert policy.spin_s == 0.0
    policy.slept(1e-6)
    assert policy.spin_s == 0.0
    monkeypatch.setenv("RPCDIST_POLLING", "never")
    with pytest.raises(ConfigError, match="RPCDIST_POLLING"):
        SpinPolicy(2)
