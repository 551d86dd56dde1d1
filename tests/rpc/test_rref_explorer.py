"""Every interleaving, duplicate, loss and death of small scenarios: the guarantees hold always, nothing leaks."""

from __future__ import annotations

from typing import Any

import pytest
from full_sets import FULL_ONLY
from rref_world import Step, World, explore

REMOTE = Step("remote", 0, "a", 1)
VALUE = Step("value", 1, "a")

SCENARIOS: dict[str, tuple[Step, ...]] = {
    "remote": (REMOTE,),
    "user to user": (REMOTE, Step("share", 0, "b", 2, "a")),
    "user to owner": (REMOTE, Step("share", 0, "b", 1, "a")),
    "user to itself": (REMOTE, Step("share", 0, "b", 0, "a")),
    "owner to user": (VALUE, Step("share", 1, "b", 2, "a")),
    "owner to itself": (VALUE, Step("share", 1, "b", 1, "a"), Step("share", 1, "c", 2, "b")),
    "owner to user to user": (VALUE, Step("share", 1, "b", 2, "a"), Step("share", 2, "c", 0, "b")),
    "round trip": (VALUE, Step("share", 1, "b", 0, "a"), Step("share", 0, "c", 1, "b")),
    "remote to oneself": (Step("remote", 1, "a", 1), Step("share", 1, "b", 1, "a"), Step("share", 1, "c", 0, "b")),
    "fetch by a child": (REMOTE, Step("share", 0, "b", 2, "a"), Step("fetch", 2, holder="b")),
}
LARGEST = "fetch by a child"
CHAIN = (REMOTE, Step("share", 0, "b", 2, "a"), Step("share", 2, "c", 0, "b"))

FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "two duplicates": {"duplicates": 2},
    "a loss and a duplicate": {"losses": 1, "duplicates": 1},
    "a false report of loss": {"doubts": 1},
    "worker 0 dies": {"deaths": (0,)},
    "worker 1 dies": {"deaths": (1,)},
    "worker 2 dies": {"deaths": (2,)},
    "owner suspects child": {"suspicions": ((1, 2),)},
    "owner suspects creator": {"suspicions": ((1, 0),)},
    "creator suspects owner": {"suspicions": ((0, 1),)},
    "creator suspects child": {"suspicions": ((0, 2),)},
    "child suspects owner": {"suspicions": ((2, 1),)},
}
HARD: dict[str, dict[str, Any]] = {
    "a false report and a duplicate": {"doubts": 1, "duplicates": 1},
    "a death and a duplicate": {"deaths": (0, 1, 2), "duplicates": 1},
    "a suspicion and a duplicate": {"suspicions": ((1, 2),), "duplicates": 1},
    "a suspicion and a return": {"suspicions": ((0, 1),), "returns": True},
    "the owner ends the creator's lease, which returns": {"suspicions": ((1, 0),), "returns": True},
    "the owner ends the child's lease, which returns": {"suspicions": ((1, 2),), "returns": True},
    "a suspicion and a return at the child": {"suspicions": ((2, 1),), "returns": True},
    "both suspect each other": {"suspicions": ((1, 2), (2, 1))},
    "a suspicion and a false report": {"suspicions": ((1, 2),), "doubts": 1},
    "a suspicion, a return and a false report": {"suspicions": ((1, 2),), "returns": True, "doubts": 1},
}


@pytest.fixture
def only_on_demand(request: pytest.FixtureRequest) -> None:
    """For what takes minutes, and is not needed in every run."""
    if "stress" not in request.config.getoption("markexpr"):
        pytest.skip("runs with -m stress")


# In every run each scenario meets a third of the faults, and each fault a third of the scenarios.
@pytest.mark.parametrize(
    ("scenario", "faults"),
    [
        pytest.param(scenario, faults, marks=FULL_ONLY if (row + column) % 3 else [], id=f"{scenario}-{faults}")
        for row, scenario in enumerate(name for name in SCENARIOS if name != LARGEST)
        for column, faults in enumerate(FAULTS)
    ],
)
def test_every_state(scenario: str, faults: str) -> None:
    assert explore(World(SCENARIOS[scenario], **FAULTS[faults])) > 5


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(faults, marks=[] if faults in ("none", "a loss and a duplicate", "worker 0 dies") else FULL_ONLY)
        for faults in FAULTS
    ],
)
def test_every_state_of_the_largest_scenario(faults: str) -> None:
    assert explore(World(SCENARIOS[LARGEST], **FAULTS[faults])) > 5


@pytest.mark.parametrize(
    "faults",
    [pytest.param("none", marks=FULL_ONLY), "worker 1 dies", pytest.param("owner suspects child", marks=FULL_ONLY)],
)
def test_chain_of_users(faults: str) -> None:
    assert explore(World(CHAIN, **FAULTS[faults])) > 1000


@pytest.mark.parametrize("scenario", ["remote", "user to owner"])
def test_who_was_suspected_may_own_again(scenario: str) -> None:
    assert explore(World(SCENARIOS[scenario], **HARD["a suspicion and a return"])) > 5


@pytest.mark.parametrize("scenario", ["remote", "owner to itself", "round trip"])
def test_whose_lease_ended_may_hold_again(scenario: str) -> None:
    for whose in ("creator", "child"):
        assert explore(World(SCENARIOS[scenario], **HARD[f"the owner ends the {whose}'s lease, which returns"])) > 5


@pytest.mark.parametrize("faults", ["a suspicion and a false report", "a suspicion, a return and a false report"])
def test_a_share_that_seems_lost_reaches_one_that_seems_dead(faults: str) -> None:
    assert explore(World(SCENARIOS["owner to user"], **HARD[faults])) > 5


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("only_on_demand")
@pytest.mark.parametrize("faults", [*FAULTS, "a false report and a duplicate"])
def test_chain_of_users_with_all_faults(faults: str) -> None:
    assert explore(World(CHAIN, **{**FAULTS, **HARD}[faults]), limit=5_000_000) > 1000


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("only_on_demand")
@pytest.mark.parametrize("faults", HARD, ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_two_kinds_of_faults(scenario: str, faults: str) -> None:
    assert explore(World(SCENARIOS[scenario], **HARD[faults]), limit=5_000_000) > 5
