"""`ElasticDataParallel`: ranks die, are stopped, come late and are replaced while the others train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_ranks import PHASES, Failed, Outcome, Plan, train
from full_sets import FULL_ONLY

from rpcdist.collectives import FileStore
from rpcdist.errors import ConfigError, JobEnded, RendezvousError
from rpcdist.parallel import ElasticDataParallel
from rpcdist.testing import RankPool
from rpcdist.testing.limits import LIMIT_S, UNIT_S
from rpcdist.testing.worker import WorkerEnded

pytestmark = pytest.mark.multiproc


def run(rank_pool: RankPool, num_processes: int, plan: Plan) -> list[Outcome | Exception]:
    return rank_pool.outcomes(rank_pool.begin(num_processes, train, rank_pool.new_file(), plan))


def survivors(outcomes: list[Outcome | Exception], *dead: int) -> list[Outcome]:
    """Those of the processes that did not die, which have the same state."""
    assert all(isinstance(outcomes[number], WorkerEnded) for number in dead), outcomes
    living = [outcome for number, outcome in enumerate(outcomes) if number not in dead]
    found = [outcome for outcome in living if isinstance(outcome, Outcome)]
    assert len(found) == len(living), outcomes
    assert all(outcome.state == found[0].state for outcome in found)
    return found


@pytest.fixture(scope="module")
def undisturbed(rank_pool: RankPool) -> list[float]:
    """The state after the same steps without a loss."""
    outcomes = survivors(run(rank_pool, 3, Plan()))
    assert all(outcome.counted == [(step, 3) for step in range(8)] for outcome in outcomes)
    assert all(outcome.restarts == 0 for outcome in outcomes)
    return outcomes[0].state


@pytest.mark.parametrize(
    ("place", "victim"),
    [("forward", 2), ("backward", 0), ("before the optimizer steps", 1), ("after the optimizer stepped", 0)],
)
def test_a_rank_is_killed_and_replaced(rank_pool: RankPool, undisturbed: list[float], place: str, victim: int) -> None:
    """The numbers are those of a training in which nobody died: no step is lost, done twice or done in part."""
    plan = Plan(victims={victim: place}, waits_for={3: f"gone/{victim}"}, seeds={3: 3})
    *others, newcomer = survivors(run(rank_pool, 4, plan), victim)
    assert all(outcome.counted == [(step, 3) for step in range(8)] for outcome in others)
    assert newcomer.counted == [(step, 3) for step in range(newcomer.counted[0][0], 8)]
    assert newcomer.counted[0][0] in (3, 4)
    assert all(outcome.batches_tracked == 8 for outcome in (*others, newcomer))
    assert newcomer.state == pytest.approx(undisturbed, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=[] if phase == "takes over a state" else FULL_ONLY) for phase in PHASES]
)
def test_a_rank_is_killed_while_the_group_is_formed(rank_pool: RankPool, undisturbed: list[float], phase: str) -> None:
    outcomes = run(rank_pool, 4, Plan(first_to=phase, waits_for={3: "gone/-1"}))
    dead = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, WorkerEnded)]
    assert len(dead) == 1
    for outcome in survivors(outcomes, *dead):
        assert outcome.counted == [(step, 3) for step in range(8)]
        assert outcome.state == pytest.approx(undisturbed, rel=1e-4, abs=1e-6)


def test_two_die_at_once_and_one_goes_on_alone(rank_pool: RankPool) -> None:
    (alone,) = survivors(run(rank_pool, 3, Plan(min_ranks=1, victims={0: "forward", 1: "backward"})), 0, 1)
    assert alone.counted[:3] == [(0, 3), (1, 3), (2, 3)] and alone.counted[4:] == [(step, 1) for step in range(4, 8)]
    assert alone.batches_tracked == 8


def test_who_comes_later_trains_with_the_others(rank_pool: RankPool) -> None:
    """All have other values at first: those of rank 0 count, and later those of the ranks that train."""
    plan = Plan(
        num_ranks=2,
        min_ranks=2,
        waits_for={2: "holds/1", 3: "holds/4"},
        holds=(1, 4),
        seeds={number: number for number in range(4)},
    )
    outcomes = survivors(run(rank_pool, 4, plan))
    sizes = [2, 2, 3, 3, 3, 4, 4, 4]
    for outcome, first in zip(outcomes, (0, 0, 2, 5), strict=True):
        assert outcome.counted == list(enumerate(sizes))[first:]
        assert outcome.batches_tracked == 8


def test_a_failing_rank_leaves_the_others_training(rank_pool: RankPool) -> None:
    first, failed, third = run(rank_pool, 3, Plan(min_ranks=2, victims={1: "raises"}))
    assert isinstance(failed, Failed)
    assert all(outcome.counted[3:] == [(step, 2) for step in range(3, 8)] for outcome in survivors([first, third]))


@pytest.mark.stress  # two time limits pass in it
def test_a_stopped_rank_is_left_behind_and_comes_back(rank_pool: RankPool) -> None:
    path = rank_pool.new_file()
    plan = Plan(min_ranks=2, timeout_s=30 * UNIT_S, victims={1: "stops"}, holds=(5,))
    pending = rank_pool.begin(3, train, path, plan)
    with FileStore(path, timeout=LIMIT_S) as store:
        store.wait(["holds/5"])
        rank_pool[1].resume()
    for outcome in survivors(rank_pool.outcomes(pending)):
        assert outcome.counted[-2:] == [(6, 3), (7, 3)]
        assert outcome.batches_tracked == 8


def test_another_model_is_refused(rank_pool: RankPool) -> None:
    plan = Plan(num_ranks=2, min_ranks=2, waits_for={2: "holds/2"}, holds=(2,), widths={2: 9})
    *others, refused = run(rank_pool, 3, plan)
    assert isinstance(refused, RendezvousError) and "73 elements" in str(refused), refused
    assert all(outcome.counted[-1] == (7, 2) for outcome in survivors(others))


def test_who_comes_after_the_end_is_told(rank_pool: RankPool) -> None:
    *others, late = run(rank_pool, 3, Plan(num_ranks=2, min_ranks=2, waits_for={2: "elastic/ended"}))
    assert isinstance(late, JobEnded)
    assert len(survivors(others)) == 2


MODULE = torch.nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"module": MODULE.parameters()}, "module is a generator: pass an nn.Module"),
        ({"optimizer": torch.optim.SGD}, r"is not an optimizer: pass one, such as torch\.optim\.SGD\(module"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)])}, "has none of the module's parameters"),
        ({"store": "/shared/store"}, r"pass a store, such as .*FileStore\('/shared/store'\)"),
        ({"stateful": torch.optim.SGD([torch.ones(1)])}, r"stateful must be a list .* such as \[scheduler\]"),
        ({"stateful": [3]}, r"stateful must be a list .* such as \[scheduler\]"),
    ],
)
def test_wrong_arguments_are_explained(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    right = {
        "module": MODULE,
        "optimizer": torch.optim.SGD(MODULE.parameters()),
        "store": FileStore(tmp_path / "store"),
    }
    with pytest.raises(ConfigError, match=message):
        ElasticDataParallel(**{**right, **arguments}, num_ranks=1)


def test_a_step_that_is_not_taken_is_no_endless_loop(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(MODULE.parameters())
    with FileStore(tmp_path / "store") as store:
        model = ElasticDataParallel(MODULE, optimizer, store, num_ranks=1)
        with pytest.raises(ConfigError, match="write `with step:` around"):
            for _ in model.steps(2):
                pass
