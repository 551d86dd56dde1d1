"""Communication hooks of torch, on its own class and on ours: the numbers are those of torch on Gloo."""

from __future__ import annotations

import hook_ranks
import pytest

from rpcdist.parallel import comm_hooks
from rpcdist.testing import RankPool

HOOKS = [
    "allreduce_hook",
    "fp16_compress_hook",
    "bf16_compress_hook",
    "powerSGD_hook",
    "fp16_compress_wrapper",
    "post_localSGD_hook",
]


@pytest.mark.multiproc
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_torch_give_the_same_numbers_everywhere(rank_pool: RankPool, name: str) -> None:
    for worst in rank_pool.run(2, hook_ranks.compare, rank_pool.new_file(), name):
        kinds = {"rpcdist", "ours", "ours without a group"} | ({"our wrapper"} if "wrapper" in name else set())
        assert worst == dict.fromkeys(kinds, 0.0)


@pytest.mark.multiproc
@pytest.mark.parametrize("name", ["quantization_pertensor_hook", "quantization_perchannel_hook"])
def test_quantised_gradients_are_those_of_torch(rank_pool: RankPool, name: str) -> None:
    assert max(rank_pool.run(3, hook_ranks.quantised, rank_pool.new_file(), name)) < 1e-6


@pytest.mark.multiproc
@pytest.mark.parametrize("kind", [kind.name for kind in comm_hooks.DDPCommHookType])
def test_hooks_are_registered_by_their_types(rank_pool: RankPool, kind: str) -> None:
    away = max(rank_pool.run(2, hook_ranks.by_type, rank_pool.new_file(), kind))
    exact = kind == "ALLREDUCE" or "POWER_SGD" in kind  # which begins later
    assert away < 1e-6 if exact else 0 < away < 1


@pytest.mark.multiproc
def test_the_state_of_power_sgd_goes_into_checkpoints(rank_pool: RankPool) -> None:
    for away, (rate, before, after) in rank_pool.run(2, hook_ranks.power_sgd_from_a_checkpoint, rank_pool.new_file()):
        assert away == 0.0
        assert rate == before / after > 4


def test_names_of_hooks_are_found() -> None:
    assert all(callable(getattr(comm_hooks, name)) for name in comm_hooks.__all__)


def test_complex_gradients_keep_their_imaginary_part_or_are_refused_by_name(rank_pool: RankPool) -> None:
    kept = {"allreduce_hook": 1e-6, "fp16_compress_hook": 2e-3, "bf16_compress_hook": 2e-2, "mixed precision": 2e-2}
    kept |= {"wrapper": 2e-3, "wrapped own": 2e-2}
    for found in rank_pool.run(2, hook_ranks.complex_gradients, rank_pool.new_file()):
        for name, rounding in kept.items():
            assert found.pop(name) < rounding
        assert "of float32 on cpu" in found.pop("own")
        assert found.keys() == {
            *("quantization_pertensor_hook", "quantization_perchannel_hook", "powerSGD_hook"),
            *("wrapped powerSGD", "torch", "torch wrapper"),
        }
        for name, error in found.items():
            assert error.startswith("ConfigError: the communication hook "), (name, error)
            assert "does not support complex parameters" in error
