"""Data parallel training: what goes wrong is said by name of rank and parameter, and nobody waits for ever."""

from __future__ import annotations

import time

import ddp_failure_ranks
import pytest

from rpcdist.errors import ConfigError
from rpcdist.parallel import DistributedDataParallel
from rpcdist.testing import RankPool, WorkerEnded

pytestmark = pytest.mark.multiproc
FINISHED = "UnusedParameters: Expected to have finished reduction in the prior iteration"


def test_unused_on_all_ranks_is_named(rank_pool: RankPool) -> None:
    for rank, error in enumerate(rank_pool.run(2, ddp_failure_ranks.forget_a_branch, rank_pool.new_file(), [0, 1])):
        assert error.startswith("UnusedParameters: Expected to have finished reduction in the prior iteration")
        assert f"on rank {rank}, these parameters received no gradient: right.weight, right.bias." in error
        assert f"\nParameter indices which did not receive grad for rank {rank}: 2 3\n" in error


def test_unused_on_one_rank_is_named_everywhere(rank_pool: RankPool) -> None:
    begin = time.monotonic()
    first, second = rank_pool.run(2, ddp_failure_ranks.forget_a_branch, rank_pool.new_file(), [1])
    assert "on rank 1, these parameters received no gradient: right.weight, right.bias." in second
    assert "rank 1" in first
    assert "right.weight, right.bias" in first
    assert time.monotonic() - begin < 20


def test_rank_that_leaves_early_is_named(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, ddp_failure_ranks.leave_early, rank_pool.new_file())
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
def test_different_models_are_refused(rank_pool: RankPool, what: str, text: str) -> None:
    for error in rank_pool.run(2, ddp_failure_ranks.wrap_different, rank_pool.new_file(), what):
        assert error.startswith("ModelsDiffer: ")
        assert text in error


@pytest.mark.parametrize(("mode", "only_first", "num"), [("probes", False, 1), ("all", True, 1), ("never", False, 0)])
def test_nan_on_one_rank_is_named(rank_pool: RankPool, mode: str, only_first: bool, num: int) -> None:
    for warnings in rank_pool.run(2, ddp_failure_ranks.poison, rank_pool.new_file(), mode, only_first):
        assert len(warnings) == num
        if num:
            assert "iteration 2" in warnings[0]
            assert "rank 1 contributed NaN or infinity to" in warnings[0]
            assert ("to 0.weight." in warnings[0]) is only_first
            assert "rank 0 contributed" not in warnings[0]


def test_rank_that_never_comes_is_named(rank_pool: RankPool) -> None:
    """A bucket whose gradient does not arrive: the limit of the group ends the wait."""
    begin = time.monotonic()
    first, second = rank_pool.run(2, ddp_failure_ranks.stall, rank_pool.new_file())
    assert second == "waited"
    assert first.startswith("CollectiveTimeout: all_reduce")
    assert "rank 1" in first
    assert "rank 0 reduced bucket 0 of iteration 2, with the gradients of 4.bias, 4.weight" in first
    assert time.monotonic() - begin < 20


def test_killed_rank_is_named(rank_pool: RankPool) -> None:
    pending = rank_pool.begin(2, ddp_failure_ranks.fail_in_backward, rank_pool.new_file(), True)
    first, second = rank_pool.outcomes(pending)
    assert isinstance(first, str)
    assert isinstance(second, WorkerEnded)
    assert first.startswith("RankLost: all_reduce")
    assert "rank 1" in first
    assert "with the gradients of" in first


def test_failed_backward_pass_is_named_everywhere(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, ddp_failure_ranks.fail_in_backward, rank_pool.new_file(), False)
    assert second.startswith(FINISHED)
    assert "In iteration 2, on rank 1, these parameters received no gradient: 0.weight" in second
    assert "rank 1 has continued without gradients of 0.weight" in first


def test_loss_of_something_else_is_explained(rank_pool: RankPool) -> None:
    for rank, (error, later) in enumerate(rank_pool.run(2, ddp_failure_ranks.never_reach, rank_pool.new_file())):
        assert error.startswith(FINISHED)
        assert f"on rank {rank}, these parameters received no gradient: 2.weight, 2.bias, 4.weight" in error
        assert "not computed from the tensors that the module's forward returned" in error
        assert later == "nothing happened"


def test_a_parameter_that_is_unfrozen_after_wrapping_is_named(rank_pool: RankPool) -> None:
    """Nothing would average it."""
    for frozen, unfrozen in rank_pool.run(2, ddp_failure_ranks.unfreeze, rank_pool.new_file()):
        assert frozen == "nothing happened"
        assert unfrozen.startswith("DataParallelError: parameters that were frozen when the module was wrapped require")
        assert "averaged: 0.weight. Wrap the module again" in unfrozen


def test_second_gradient_in_a_pass_is_named(rank_pool: RankPool) -> None:
    for rank, error in enumerate(rank_pool.run(2, ddp_failure_ranks.use_twice, rank_pool.new_file())):
        assert error.startswith("DataParallelError: Expected to mark a variable ready only once: parameter 'second.")
        assert f"on rank {rank}" in error
        assert "use_reentrant=False" in error


def _brings(hook: str, what: str) -> str:
    wanted = "must return a dense tensor like bucket.buffer(), 484 elements of float32 on cpu; its future has"
    return f"ConfigError: the communication hook {hook} {wanted} {what} (bucket 0, with the gradients of 0.weight, "


def _returns(what: str) -> str:
    return f"ConfigError: the communication hook <lambda> must return a torch.futures.Future, not {what} (bucket 0, "


HOOK_ERRORS = {
    "returns none": _returns("None: its `return` is missing"),
    "returns a tensor": _returns("a Tensor"),
    "returns a work": _returns("a Work"),
    "brings one element": _brings("hook", "1 elements of float32 on cpu"),
    "brings too many": _brings("hook", "968 elements of float32 on cpu"),
    "brings doubles": _brings("hook", "484 elements of float64 on cpu"),
    "brings integers": _brings("hook", "484 elements of int64 on cpu"),
    "brings complex": _brings("hook", "484 elements of complex64 on cpu"),
    "brings sparse": _brings("hook", "484 elements of float32 on cpu and layout torch.sparse_coo"),
    "brings meta": _brings("hook", "484 elements of float32 on meta"),
    "brings two": _brings("hook", "2 values"),
    "brings none": _brings("hook", "a NoneType"),
    "is never done": "ConfigError: the communication hook <lambda> returned a future that was not done within 0.5 s",
    "fails": "ValueError: no future",
    "brings a text": _brings("brings_text", "a str"),
    "fails later": "ValueError: later",
    "is none": "TypeError: Communication hook must be callable.",
    "takes one": (
        "ConfigError: a communication hook must take two arguments, state and bucket, but this one takes ['bucket']"
    ),
    "takes a number": "ConfigError: Communication hook: bucket annotation should be dist.GradBucket, not <class 'int'>",
    "returns a number": (
        "ConfigError: Communication hook: return annotation should be torch.futures.Future[torch.Tensor], not"
    ),
    "returns nothing": "ConfigError: Communication hook: return annotation should be torch.futures.Future",
    "twice": "DataParallelError: register_comm_hook or register_builtin_comm_hook can only be called once.",
}


def test_hooks_that_fail(rank_pool: RankPool) -> None:
    for found in rank_pool.run(2, ddp_failure_ranks.break_hooks, rank_pool.new_file()):
        assert found.keys() == HOOK_ERRORS.keys()
        for name, text in HOOK_ERRORS.items():
            assert found[name].startswith(text), (name, found[name])


ARGUMENT_ERRORS = {
    "nothing to train": "is not needed when a module doesn't have any parameter that requires a gradient",
    "lazy": "parameter 'weight' is not initialized: run a forward pass of the module before wrapping it",
    "two devices": "start one process for each device",
    "cpu device": "device_ids and output_device are for modules on one accelerator; this one is on cpu",
    "mixed precision": "must be an rpcdist.parallel.MixedPrecision of floating-point dtypes",
    "mesh": "that init_device_mesh made",
    "cap": "a bucket cap of -1 MiB is invalid",
    "half delayed": "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.",
    "group": "process_group is a builtins.int; make groups with rpcdist.collectives.new_group",
    "optimizer": "_register_fused_optim is not supported; step the optimizer after backward",
    "optimizer in a hook": "communication hooks that step optimizers are not supported: step after backward",
    "built-in hook": "expected a member of BuiltinCommHookType, ALLREDUCE or FP16_COMPRESS, not 'allreduce'",
    "sample rate": "should be equal or greater than 1",
}


def test_arguments_that_make_no_sense(rank_pool: RankPool) -> None:
    (found,) = rank_pool.run(1, ddp_failure_ranks.wrap_badly, rank_pool.new_file())
    assert found.keys() == ARGUMENT_ERRORS.keys()
    for name, text in ARGUMENT_ERRORS.items():
        assert found[name].startswith("TypeError: " if name == "built-in hook" else "ConfigError: ")
        assert text in found[name]


def test_without_a_group() -> None:
    from torch import nn

    with pytest.raises(ConfigError, match="Default process group has not been initialized"):
        DistributedDataParallel(nn.Linear(2, 2))
