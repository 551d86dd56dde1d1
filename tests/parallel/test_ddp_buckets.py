"""Buckets: torch assigns the gradients, with our caps and the order in which the gradients became ready."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from rpcdist.errors import ConfigError
from rpcdist.parallel._ddp._buckets import BucketCaps, initial_buckets, rebuilt_buckets
from rpcdist.parallel._ddp._parameters import Trained

MEBIBYTE = 1 << 20


def parameters(sizes: Sequence[int], sparse: Sequence[int] = (), doubles: Sequence[int] = ()) -> list[Trained]:
    """Parameters of these sizes in bytes, without memory."""
    dtypes = [torch.float64 if index in doubles else torch.float32 for index in range(len(sizes))]
    tensors = [
        nn.Parameter(torch.empty(size // dtype.itemsize, dtype=dtype, device="meta"))
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]
    return [Trained(index, f"{index}", tensor, index in sparse) for index, tensor in enumerate(tensors)]


def test_initial_buckets_are_filled_in_the_order_of_the_parameters_and_reduced_in_the_reverse_order() -> None:
    made = parameters([800] * 6, sparse=[1], doubles=[3])
    caps = BucketCaps.of(None, [1600 / MEBIBYTE])
    assert initial_buckets(made, caps, order_is_fixed=True) == [[4, 5], [3], [1], [0, 2]]


def test_rebuilt_buckets_are_filled_in_the_order_of_readiness() -> None:
    made = parameters([800] * 6, sparse=[1], doubles=[3])
    caps = BucketCaps.of(None, [800 / MEBIBYTE, 1600 / MEBIBYTE])
    assert rebuilt_buckets(made, caps, [5, 1, 4, 3, 2, 0]) == [[5], [1], [3], [4, 2], [0]]


def test_rebuilt_buckets_that_are_not_full_come_in_the_order_of_readiness() -> None:
    """torch appends them in the order of a hash table, which may differ between ranks."""
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
    made = [
        Trained(index, f"{index}", nn.Parameter(torch.empty(4, dtype=dtype, device="meta")), False)
        for index, dtype in enumerate(dtypes)
    ]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [3, 1, 4, 0, 2]):
        assert rebuilt_buckets(made, BucketCaps.of(None), order) == [[index] for index in order]


def test_caps() -> None:
    halves = parameters([MEBIBYTE // 2] * 80)
    default = BucketCaps.of(None)
    assert [len(bucket) for bucket in initial_buckets(halves, default, order_is_fixed=False)] == [80]
    assert [len(bucket) for bucket in initial_buckets(halves, default, order_is_fixed=True)] == [28, 50, 2]
    assert [len(bucket) for bucket in rebuilt_buckets(halves, default, range(79, -1, -1))] == [2, 50, 28]
    assert [len(bucket) for bucket in rebuilt_buckets(halves, BucketCaps.of(10), range(80))] == [20] * 4
    listed = BucketCaps.of(None, [1, 2])
    assert [len(bucket) for bucket in rebuilt_buckets(halves[:9], listed, range(9))] == [2, 4, 3]


def test_a_cap_of_nothing_makes_a_bucket_of_each_gradient() -> None:
    made = parameters([4] * 3)
    assert initial_buckets(made, BucketCaps.of(0), order_is_fixed=True) == [[2], [1], [0]]
    assert rebuilt_buckets(made, BucketCaps.of(0), [1, 0, 2]) == [[1], [0], [2]]


@pytest.mark.parametrize("cap", [-0.5, -1])
def test_bad_caps_are_refused(cap: float) -> None:
    with pytest.raises(ConfigError, match="is invalid"):
        BucketCaps.of(cap)
    with pytest.raises(ConfigError, match="is invalid"):
        BucketCaps.of(None, [1, cap])
