"""Schedules are complete, can be executed, and are those of torch; the simulation says what they cost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from rpcdist.errors import ConfigError
from rpcdist.parallel.pipeline import (
    Action,
    Slot,
    bubble,
    format_grid,
    max_live_microbatches,
    parse_action,
    schedule,
    simulate,
    validate,
)
from rpcdist.parallel.pipeline._step_driver import make_schedule, restrict

Texts = list[list[str]]


def texts(actions: list[list[Action]]) -> Texts:
    return [[str(action) for action in row] for row in actions]


@pytest.mark.parametrize(
    ("name", "numbers", "expected"),
    [
        ("gpipe", (2, 2, 1), ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]),
        ("gpipe", (2, 1, 2), ["0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0"]),
        ("1f1b", (1, 2, 1), ["0F0 0B0 0F1 0B1"]),
        ("1f1b", (2, 3, 1), ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
        ("1f1b", (3, 1, 1), ["0F0 0B0", "1F0 1B0", "2F0 2B0"]),
        (
            "interleaved",
            (2, 2, 2),
            ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"],
        ),
    ],
)
def test_orders(name: str, numbers: tuple[int, int, int], expected: list[str]) -> None:
    assert texts(schedule(name, *numbers)) == [row.split() for row in expected]


def torch_order(kind: type, num_workers: int, num_microbatches: int, stages_per_worker: int) -> Texts:
    """The actions of torch's schedule; its constructor needs process groups, its order does not."""
    made: Any = object.__new__(kind)
    made._num_stages, made._n_microbatches = num_workers, num_microbatches
    made.pp_group_size, made.n_local_stages = num_workers, stages_per_worker
    made.microbatches_per_round = num_microbatches // max(1, num_microbatches // num_workers)
    if kind is torch_schedules.ScheduleInterleaved1F1B:
        rows = {rank: made._calculate_single_rank_operations(rank) for rank in range(num_workers)}
    else:
        rows = made._get_pipeline_order()
    shown = [[str(action) for action in rows[rank] if action is not None] for rank in range(num_workers)]
    return [[text for text in row if "REDUCE_GRAD" not in text] for row in shown]


@pytest.mark.parametrize(("num_workers", "num_microbatches"), [(1, 1), (2, 2), (2, 5), (3, 3), (4, 4), (4, 9)])
@pytest.mark.parametrize(
    ("name", "kind"), [("gpipe", torch_schedules.ScheduleGPipe), ("1f1b", torch_schedules.Schedule1F1B)]
)
def test_order_is_that_of_torch(name: str, kind: type, num_workers: int, num_microbatches: int) -> None:
    ours = texts(schedule(name, num_workers, num_microbatches))
    theirs = torch_order(kind, num_workers, num_microbatches, 1)
    if name == "1f1b":  # torch 2.13 lists the last worker's forwards one too high (it executes the right ones)
        theirs[-1] = [text if "B" in text else f"{text[:2]}{int(text[2:]) - 1}" for text in theirs[-1]]
    assert ours == theirs


@pytest.mark.parametrize(
    ("num_workers", "num_microbatches", "stages_per_worker"),
    [(1, 3, 2), (2, 2, 2), (2, 6, 3), (3, 2, 2), (4, 4, 2), (4, 10, 2), (4, 8, 4)],
)
def test_interleaved_order_is_that_of_torch(num_workers: int, num_microbatches: int, stages_per_worker: int) -> None:
    numbers = num_workers, num_microbatches, stages_per_worker
    kind = torch_schedules.ScheduleInterleaved1F1B
    assert texts(schedule("interleaved", *numbers)) == torch_order(kind, *numbers)


sizes = st.tuples(st.integers(1, 6), st.integers(1, 12), st.integers(1, 4))


def try_schedule(name: str, numbers: tuple[int, int, int]) -> list[list[Action]] | None:
    try:
        return schedule(name, *numbers)
    except ConfigError:
        return None


@given(name=st.sampled_from(["gpipe", "1f1b", "interleaved"]), numbers=sizes, fewer=st.integers(1, 12))
def test_every_schedule_is_valid(name: str, numbers: tuple[int, int, int], fewer: int) -> None:
    num_workers, num_microbatches, stages_per_worker = numbers
    actions = try_schedule(name, numbers)
    if actions is None:
        assert (name == "1f1b" and stages_per_worker > 1) or (name == "interleaved" and num_microbatches > num_workers)
        return
    num_stages = num_workers * stages_per_worker
    validate(actions, num_stages, num_microbatches)
    validate(restrict(actions, fewer, with_backward=True), num_stages, min(fewer, num_microbatches))
    assert len(simulate(restrict(actions, fewer, with_backward=False))) == num_stages * min(fewer, num_microbatches)
    live = max_live_microbatches(actions)
    if name == "gpipe":
        assert live == [num_microbatches * stages_per_worker] * num_workers
    if name == "1f1b":
        assert live == [min(num_microbatches, num_workers - worker) for worker in range(num_workers)]


@given(numbers=sizes, forward_s=st.floats(0.1, 10), backward_s=st.floats(0.1, 10))
def test_bubbles_are_those_of_the_papers(numbers: tuple[int, int, int], forward_s: float, backward_s: float) -> None:
    """(p - 1) / (m + p - 1) for GPipe and 1F1B; with v stages per worker p - 1 becomes (p - 1) / v."""
    num_workers, num_microbatches, stages_per_worker = numbers
    ahead = num_workers - 1
    for name in ("gpipe", "1f1b"):
        slots = simulate(schedule(name, num_workers, num_microbatches), forward_s, backward_s)
        assert bubble(slots, num_workers) == pytest.approx(ahead / (num_microbatches + ahead))
    if num_microbatches % num_workers == 0:
        slots = simulate(schedule("interleaved", *numbers), forward_s, backward_s)
        expected = (ahead / stages_per_worker) / (num_microbatches + ahead / stages_per_worker)
        assert bubble(slots, num_workers) == pytest.approx(expected)


@given(numbers=sizes, data=st.data())
def test_a_shuffled_schedule_runs_or_says_who_waits(numbers: tuple[int, int, int], data: st.DataObject) -> None:
    num_workers, num_microbatches, stages_per_worker = numbers
    actions = [data.draw(st.permutations(row)) for row in schedule("gpipe", *numbers)]
    try:
        validate(actions, num_workers * stages_per_worker, num_microbatches)
    except ConfigError as error:
        assert "cannot be executed" in str(error) and "which needs" in str(error)
        assert all(f"worker {worker}: " in str(error) for worker in range(num_workers))
    else:
        slots = simulate(actions)
        start = {slot.action: slot.start_s for slot in slots}
        assert len(slots) == sum(map(len, actions))
        assert all(start[action] < start[after] for row in actions for action, after in pairwise(row))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0F0 0B0", "1F0"], "1B0 is missing"),
        (["0F0 0B0", "1F0 1F0 1B0"], "1F0 occurs twice"),
        (["0F0 0B0 1F0", "1B0"], "1F0 is on worker 0, but its stage is on 1"),
        (["0F0 0B0", "1F0 1B0 1F1"], "1F1 is not among 2 stages and 1 micro-batches"),
        (["0B0 0F0", "1F0 1B0"], "worker 0 stops before 0B0, which needs 0F0 and 1B0"),
        (["0F0 0B0", "1F0 1X0"], "'1X0' is not an action"),
        (["0F0 0B0"], "2 workers"),
    ],
)
def test_wrong_schedules_are_explained_with_their_grid(rows: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_schedule([row.split() for row in rows], 2, 2, 1)
    assert message in str(caught.value)
    if "X" not in rows[-1] and len(rows) == 2:
        assert f"\nworker 0: {rows[0]}\n" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zigzag", 2, 2), "unknown schedule 'zigzag'; choose one of gpipe, 1f1b, interleaved"),
        (("1f1b", 2, 2, 2), "one stage per worker"),
        (("interleaved", 2, 5, 2), "take a multiple of 2"),
        (("gpipe", 0, 1), "num_workers=0"),
        (("gpipe", 1, 0), "num_microbatches=0"),
        (("gpipe", 1, 1, 0), "stages_per_worker=0"),
    ],
)
def test_wrong_numbers_are_explained(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule(*arguments)


def test_stages_must_spread_evenly() -> None:
    with pytest.raises(ConfigError, match="3 stages cannot be spread evenly over 2 workers"):
        make_schedule("gpipe", 2, 3, 4)


@given(st.builds(Action, st.integers(0, 99), st.sampled_from(["F", "B"]), st.integers(0, 99)))
def test_actions_print_as_they_are_read(action: Action) -> None:
    assert parse_action(str(action)) == action


def test_grid() -> None:
    assert format_grid(schedule("1f1b", 2, 2)).splitlines() == [
        "worker 0: 0F0 0F1     0B0     0B1",
        "worker 1:     1F0 1B0 1F1 1B1",
    ]


def test_simulation_counts_transfers_and_times_of_stages() -> None:
    slots = simulate(schedule("gpipe", 2, 1), forward_s=[1.0, 2.0], backward_s=[3.0, 4.0], transfer_s=0.5)
    assert [(slot.action, slot.start_s, slot.end_s) for slot in slots] == [
        (Action(0, "F", 0), 0.0, 1.0),
        (Action(1, "F", 0), 1.5, 3.5),
        (Action(1, "B", 0), 3.5, 7.5),
        (Action(0, "B", 0), 8.0, 11.0),
    ]
    assert bubble(slots, 2) == pytest.approx(1 - 10 / 22)
    assert bubble([], 2) == 0.0
    assert bubble([Slot(0, Action(0, "F", 0), 1.0, 1.0)], 1) == 0.0
