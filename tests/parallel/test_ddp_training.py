"""Data parallel training: what users do with it."""

from __future__ import annotations

from typing import Any

import ddp_ranks
import finalize_ranks
import profile_ranks
import pytest

from rpcdist.testing import RankPool

pytestmark = pytest.mark.multiproc
ROUNDING = 1e-5  # of float32
STATIC = {"static_graph": True}


@pytest.mark.parametrize("backend", ["gloo", "rpcdist"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("wide", {}),
        ("wide", {"bucket_cap_mb": 1}),
        ("wide", {"find_unused_parameters": True, "bucket_cap_mb": 1}),
        ("wide", {"static_graph": True}),
        ("wide", {"bucket_cap_mb_list": [1, 3]}),
        ("cnn", {"bucket_cap_mb": 0.001}),
        ("cnn", {"gradient_as_bucket_view": True}),
        ("sparse", {}),
        ("shared", {}),
    ],
)
def test_same_numbers_and_buckets_as_torch(
    rank_pool: RankPool, name: str, options: dict[str, object], backend: str
) -> None:
    """torch's own class, on Gloo and on our groups, and ours."""
    path = rank_pool.new_file()
    for worst, theirs, ours in rank_pool.run(2, ddp_ranks.compare_with_torch, path, name, options, backend):
        assert worst < 1e-12
        assert ours == theirs


def test_mixed_precision(rank_pool: RankPool) -> None:
    """torch's own cannot run on CPU: what it does is done by hand beside it."""
    same = [True] * 4
    assert rank_pool.run(2, ddp_ranks.mixed_precision, rank_pool.new_file()) == [same, same]


@pytest.mark.parametrize("view", [False, True])
def test_no_sync_accumulates(rank_pool: RankPool, view: bool) -> None:
    worst = rank_pool.run(3, ddp_ranks.accumulate, rank_pool.new_file(), view)
    assert max(max(each) for each in worst) < ROUNDING


@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"static_graph": True}]
)
def test_a_pass_averages_that_was_prepared_after_its_forward_pass(
    rank_pool: RankPool, options: dict[str, object]
) -> None:
    worst = rank_pool.run(2, ddp_ranks.prepare_late, rank_pool.new_file(), options)
    assert max(max(each) for each in worst) < ROUNDING


LEFT, RIGHT, BOTH, NEITHER = (True, False), (False, True), (True, True), (False, False)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}])
def test_unused_parameters_may_differ(rank_pool: RankPool, options: dict[str, object]) -> None:
    plans = [[LEFT, RIGHT], [LEFT, LEFT], [BOTH, NEITHER], [NEITHER, NEITHER], [RIGHT, BOTH]]
    every = {**options, "find_unused_parameters": True}
    for worst, present in rank_pool.run(2, ddp_ranks.use_branches, rank_pool.new_file(), every, plans):
        assert worst < ROUNDING
        assert "right.bias" not in present[1]
        assert present[3] == ["out.weight", "out.bias"]


@pytest.mark.parametrize(
    "options", [{"static_graph": True}, {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}]
)
def test_the_same_parameters_unused_everywhere(rank_pool: RankPool, options: dict[str, object]) -> None:
    plans = [[LEFT, LEFT]] * 4
    for worst, present in rank_pool.run(2, ddp_ranks.use_branches, rank_pool.new_file(), options, plans):
        assert worst < ROUNDING
        assert all("right.bias" not in names for names in present)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [
        ("allreduce_hook", ROUNDING),
        ("fp16_compress_hook", 1e-2),
        ("bf16_compress_hook", 5e-2),
        ("fp16_compress_wrapper", 1e-2),
        ("bf16_compress_wrapper", 5e-2),
        ("noop_hook", ROUNDING),
    ],
)
def test_communication_hooks(rank_pool: RankPool, hook: str, tolerance: float, view: bool) -> None:
    assert max(rank_pool.run(2, ddp_ranks.use_hook, rank_pool.new_file(), hook, view)) < tolerance


def test_reductions_overlap_the_backward_pass(rank_pool: RankPool) -> None:
    for num_buckets, num_early, in_order in rank_pool.run(2, ddp_ranks.overlap, rank_pool.new_file()):
        assert num_buckets == 8
        assert num_early >= 1
        assert in_order


@pytest.mark.parametrize(
    ("reentrant", "options"),
    [(False, {}), (False, {"find_unused_parameters": True}), (True, {"static_graph": True})],
)
def test_checkpointing(rank_pool: RankPool, reentrant: bool, options: dict[str, object]) -> None:
    assert max(rank_pool.run(2, ddp_ranks.checkpoint, rank_pool.new_file(), reentrant, options)) < ROUNDING


def test_saving_loading_and_wrapping_again(rank_pool: RankPool) -> None:
    for found in rank_pool.run(2, ddp_ranks.save_and_load, rank_pool.new_file()):
        assert found == [True, "<All keys matched successfully>", True, 0.0, 0.0, 1]


def test_several_dtypes_and_autocast(rank_pool: RankPool) -> None:
    dtypes = ["torch.bfloat16"] * 2 + ["torch.float32"] * 2
    assert rank_pool.run(2, ddp_ranks.autocast_and_mixed, rank_pool.new_file()) == [dtypes, dtypes]


def test_ignored_and_delayed_parameters(rank_pool: RankPool) -> None:
    for rank, found in enumerate(rank_pool.run(2, ddp_ranks.leave_to_ranks, rank_pool.new_file())):
        assert found == [0.0, 4.0 * (1 + rank), float(rank)]


def test_delayed_gradients_that_come_too_late_are_an_error(rank_pool: RankPool) -> None:
    for found in rank_pool.run(2, ddp_ranks.delay_for_too_short, rank_pool.new_file()):
        assert found.startswith("the gradients of 0.weight were not averaged")


def test_buckets_and_reductions_are_in_a_profile(rank_pool: RankPool) -> None:
    for buckets, num_reductions in rank_pool.run(2, profile_ranks.profile_step, rank_pool.new_file()):
        num_buckets = len(buckets) // 2
        assert num_buckets > 1
        assert buckets == sorted(f"DDP bucket {n} {what}" for n in range(num_buckets) for what in ("starts", "ends"))
        assert num_reductions == num_buckets + 1  # and one of its own


@pytest.mark.parametrize("hook", ["", "allreduce_hook"])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}])
def test_optimizers_in_backward_step_with_the_average(rank_pool: RankPool, options: dict[str, bool], hook: str) -> None:
    for found in rank_pool.run(2, ddp_ranks.step_in_backward, rank_pool.new_file(), options, hook):
        assert max(found) < 1e-12


@pytest.mark.parametrize("hook", ["", "allreduce_hook"])
@pytest.mark.parametrize(
    "options", [{"bucket_cap_mb": 0.0001}, {"find_unused_parameters": True, "gradient_as_bucket_view": True}, STATIC]
)
def test_the_program_may_end_iterations_itself(rank_pool: RankPool, options: dict[str, Any], hook: str) -> None:
    for found in rank_pool.run(2, finalize_ranks.end_by_hand, rank_pool.new_file(), options, hook):
        assert found["worst"] < 1e-12
        assert found["local until then"] == [True] * 3
        assert found["late"] == [options == STATIC, False, False, False, False, False]


def test_ends_by_the_program_that_are_missing_early_or_late_are_errors(rank_pool: RankPool) -> None:
    missing = (
        "Expected to have finalized the prior backward pass before starting a new one: finalize_backward() was not "
        "called for iteration 1 on rank {rank}."
    )
    wanted = {
        "not asked for": "finalize_backward() called but manual backward finalization is not required",
        "twice": "finalize_backward() called but no gradient reduction requires finalization on rank {rank}",
        "under no_sync": "finalize_backward() called but no gradient reduction requires finalization on rank {rank}",
        "before the gradients": "finalize_backward() was called on rank {rank} before all gradients of iteration 2",
        **dict.fromkeys(("forward", "forward under no_sync", "backward", "comm hook", "setting", "check"), missing),
        "penalty": missing.replace("iteration 1", "iteration 2"),
        **dict.fromkeys(("clipped", "cleared"), "gradients were changed between backward and finalize_backward()"),
        "stepped": "parameters were changed during the backward pass of iteration 1 on rank {rank}",
    }
    for rank, found in enumerate(rank_pool.run(2, finalize_ranks.end_by_hand_wrongly, rank_pool.new_file())):
        assert found.keys() == wanted.keys()
        for name, text in wanted.items():
            assert found[name].startswith(text.format(rank=rank)), (name, found[name])


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_a_pass_that_failed_is_not_finalized(rank_pool: RankPool, options: dict[str, bool]) -> None:
    for found in rank_pool.run(2, finalize_ranks.end_after_failures, rank_pool.new_file(), options):
        assert len(found) == 2
        for error in found:
            assert error.startswith(("2 GroupAborted: ", "2 DataParallelError: bucket ")), error


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_hooks_of_the_user_come_before_the_average_and_must_not_step(
    rank_pool: RankPool, options: dict[str, bool]
) -> None:
    for rank, found in enumerate(rank_pool.run(2, ddp_ranks.user_hooks, rank_pool.new_file(), options)):
        assert max(found.pop("clip before"), found.pop("clip after")) < 1e-12
        assert len(found) == 6
        for name, error in found.items():
            assert error.startswith("DataParallelError: parameters were changed during the backward pass of"), name
            assert f"on rank {rank}, before their gradients were averaged: 0.weight, 0.bias, 1.weight" in error


def test_logging_data_and_the_errors_of_a_static_graph(rank_pool: RankPool) -> None:
    for rank, found in enumerate(rank_pool.run(2, ddp_ranks.logging_data, rank_pool.new_file())):
        reduced, skipping, has_error, logged, changed, unused = found
        assert (reduced - skipping, has_error, logged) == (1, 1, changed)
        assert (
            "training graph has changed" in changed and "parameter 'right." in changed and f"on rank {rank}" in changed
        )
        assert "these parameters received no gradient: left.weight, left.bias" in unused
        for error in (changed, unused):
            assert "static_graph=True does not allow" in error
            assert "find_unused_parameters" not in error
