"""Data parallel training: what users do with it, and what goes wrong."""

from __future__ import annotations

import time

import ddp_ranks
import pytest
from group_pool import GroupPool

pytestmark = pytest.mark.multiproc
ROUNDING = 1e-5  # of float32


@pytest.mark.parametrize(
    ("name", "options", "train"),
    [
        ("wide", {}, True),
        ("wide", {"bucket_cap_mb": 1}, True),
        ("wide", {"find_unused_parameters": True, "bucket_cap_mb": 1}, True),
        ("wide", {"static_graph": True}, True),
        ("wide", {"bucket_cap_mb_list": [1, 3]}, True),
        ("cnn", {"bucket_cap_mb": 0.001}, True),
        ("cnn", {"gradient_as_bucket_view": True}, True),
        ("sparse", {}, True),
        ("shared", {}, True),
    ],
)
def test_same_numbers_and_buckets_as_torch(
    group_pool: GroupPool, name: str, options: dict[str, object], train: bool
) -> None:
    path = group_pool.new_file()
    for worst, theirs, ours in group_pool.run(2, ddp_ranks.compare_with_torch, path, name, options, train):
        assert worst < 1e-12
        assert ours == theirs


@pytest.mark.parametrize("view", [False, True])
def test_no_sync_accumulates(group_pool: GroupPool, view: bool) -> None:
    worst = group_pool.run(3, ddp_ranks.accumulate, group_pool.new_file(), view)
    assert max(max(each) for each in worst) < ROUNDING


LEFT, RIGHT, BOTH, NEITHER = (True, False), (False, True), (True, True), (False, False)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}])
def test_unused_parameters_may_differ(group_pool: GroupPool, options: dict[str, object]) -> None:
    plans = [[LEFT, RIGHT], [LEFT, LEFT], [BOTH, NEITHER], [NEITHER, NEITHER], [RIGHT, BOTH]]
    every = {**options, "find_unused_parameters": True}
    for worst, present in group_pool.run(2, ddp_ranks.use_branches, group_pool.new_file(), every, plans):
        assert worst < ROUNDING
        assert "right.bias" not in present[1]
        assert present[3] == ["out.weight", "out.bias"]


@pytest.mark.parametrize(
    "options", [{"static_graph": True}, {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}]
)
def test_the_same_parameters_unused_everywhere(group_pool: GroupPool, options: dict[str, object]) -> None:
    plans = [[LEFT, LEFT]] * 4
    for worst, present in group_pool.run(2, ddp_ranks.use_branches, group_pool.new_file(), options, plans):
        assert worst < ROUNDING
        assert all("right.bias" not in names for names in present)


def test_unused_on_all_ranks_is_named(group_pool: GroupPool) -> None:
    for rank, error in enumerate(group_pool.run(2, ddp_ranks.forget_a_branch, group_pool.new_file(), [0, 1])):
        assert error.startswith("UnusedParameters: Expected to have finished reduction in the prior iteration")
        assert f"on rank {rank}, these parameters received no gradient: right.weight, right.bias." in error


def test_unused_on_one_rank_is_named_everywhere(group_pool: GroupPool) -> None:
    begin = time.monotonic()
    first, second = group_pool.run(2, ddp_ranks.forget_a_branch, group_pool.new_file(), [1])
    assert "on rank 1, these parameters received no gradient: right.weight, right.bias." in second
    assert "rank 1" in first
    assert "right.weight, right.bias" in first
    assert time.monotonic() - begin < 20


def test_rank_that_leaves_early_is_named(group_pool: GroupPool) -> None:
    first, second = group_pool.run(2, ddp_ranks.leave_early, group_pool.new_file())
    assert second == "left"
    assert first.startswith("RankLost: all_reduce")
    assert "rank 1 left the group" in first
    assert "gradients of" in first
    assert "join()" in first


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "shape",
            "parameter 'weight' is float32 of shape (3, 4) and strides (4, 1) on rank 0 and float32 of shape (4, 4)",
        ),
        ("names", "parameter '1.weight' exists on rank 1 but not on rank 0"),
        ("dtype", "parameter 'bias' is float32 of shape (4,) and strides (1,) on rank 0 and float64"),
        ("strides", "parameter 'weight' is float32 of shape (3, 3, 2, 2) and strides (12, 4, 2, 1) on rank 0"),
        ("options", "the bucket cap is BucketCaps(num_bytes=1048576"),
    ],
)
def test_different_models_are_refused(group_pool: GroupPool, what: str, text: str) -> None:
    for error in group_pool.run(2, ddp_ranks.wrap_different, group_pool.new_file(), what):
        assert error.startswith("ModelsDiffer: ")
        assert text in error


@pytest.mark.parametrize(("mode", "only_first", "num"), [("probes", False, 1), ("all", True, 1), ("never", False, 0)])
def test_nan_on_one_rank_is_named(group_pool: GroupPool, mode: str, only_first: bool, num: int) -> None:
    for warnings in group_pool.run(2, ddp_ranks.poison, group_pool.new_file(), mode, only_first):
        assert len(warnings) == num
        if num:
            assert "iteration 2" in warnings[0]
            assert "rank 1 contributed NaN or infinity to" in warnings[0]
            assert ("to 0.weight." in warnings[0]) is only_first
            assert "rank 0 contributed" not in warnings[0]


@pytest.mark.parametrize("by_initial", [True, False])
@pytest.mark.parametrize("name", ["wide", "sparse", "cnn"])
def test_uneven_inputs(group_pool: GroupPool, name: str, by_initial: bool) -> None:
    results = group_pool.run(3, ddp_ranks.uneven, group_pool.new_file(), by_initial, name)
    assert max(worst for worst, _ in results) < 1e-12
    assert all(sums == results[-1][1] for _, sums in results)  # all have the model of the last one


def test_uneven_inputs_may_raise(group_pool: GroupPool) -> None:
    first, second = group_pool.run(2, ddp_ranks.uneven_throw, group_pool.new_file())
    assert first == "2 UnevenInputs: Rank 0 exhausted all inputs."
    assert second.startswith("2 UnevenInputs: Detected at least one rank that exhausted inputs.")
    assert "It was rank 0" in second


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
def test_communication_hooks(group_pool: GroupPool, hook: str, tolerance: float, view: bool) -> None:
    assert max(group_pool.run(2, ddp_ranks.use_hook, group_pool.new_file(), hook, view)) < tolerance


def test_reductions_overlap_the_backward_pass(group_pool: GroupPool) -> None:
    for num_buckets, num_early, in_order in group_pool.run(2, ddp_ranks.overlap, group_pool.new_file()):
        assert num_buckets == 8
        assert num_early >= 1
        assert in_order


@pytest.mark.parametrize(
    ("reentrant", "options"),
    [(False, {}), (False, {"find_unused_parameters": True}), (True, {"static_graph": True})],
)
def test_checkpointing(group_pool: GroupPool, reentrant: bool, options: dict[str, object]) -> None:
    assert max(group_pool.run(2, ddp_ranks.checkpoint, group_pool.new_file(), reentrant, options)) < ROUNDING


def test_saving_loading_and_wrapping_again(group_pool: GroupPool) -> None:
    for found in group_pool.run(2, ddp_ranks.save_and_load, group_pool.new_file()):
        assert found == [True, "<All keys matched successfully>", "<All keys matched successfully>", 0.0, 0.0, 1]


def test_several_dtypes_and_autocast(group_pool: GroupPool) -> None:
    dtypes = ["torch.bfloat16"] * 2 + ["torch.float32"] * 2
    assert group_pool.run(2, ddp_ranks.autocast_and_mixed, group_pool.new_file()) == [dtypes, dtypes]


def test_ignored_and_delayed_parameters(group_pool: GroupPool) -> None:
    for rank, found in enumerate(group_pool.run(2, ddp_ranks.leave_to_ranks, group_pool.new_file())):
        assert found == [0.0, 4.0 * (1 + rank), float(rank)]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0005}])
def test_inside_a_distributed_context(group_pool: GroupPool, options: dict[str, object]) -> None:
    """The averaged gradients land in the context, and not in `.grad`."""
    worst = group_pool.run(3, ddp_ranks.train_over_rpc, group_pool.new_file(), options)
    assert max(worst) < ROUNDING
