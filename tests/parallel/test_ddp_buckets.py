"""Buckets are torch's: the same assignment for any parameters and caps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rpcdist.errors import ConfigError
from rpcdist.parallel._ddp._buckets import BucketCaps, GradientFacts, assign, initial_buckets, rebuilt_buckets

MEBIBYTE = 1 << 20
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@given(
    tensors=st.lists(
        st.tuples(st.integers(1, 400), st.sampled_from(DTYPES), st.sampled_from([False, False, False, True])),
        min_size=1,
    ),
    limits=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
)
def test_assignment_is_that_of_torch(tensors: list[tuple[int, torch.dtype, bool]], limits: list[int]) -> None:
    facts = [GradientFacts(count * dtype.itemsize, dtype, sparse) for count, dtype, sparse in tensors]
    empty = [torch.empty(count, dtype=dtype) for count, dtype, _ in tensors]
    sparse = [each for _, _, each in tensors]
    theirs, _ = dist._compute_bucket_assignment_by_size(empty, limits, sparse)
    assert assign(facts, limits) == theirs


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1),
    limits=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    data=st.data(),
)
def test_assignment_by_readiness_is_that_of_torch(sizes: list[int], limits: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    facts = [GradientFacts(size * 4, "float32") for size in sizes]
    ready = [torch.empty(sizes[index]) for index in order]
    theirs, _ = dist._compute_bucket_assignment_by_size(ready, limits, [False] * len(sizes), order)
    assert assign(facts, limits, order) == theirs


def test_caps() -> None:
    megabytes = [GradientFacts(MEBIBYTE // 2, "float32")] * 80
    default = BucketCaps.of(None)
    assert [len(bucket) for bucket in initial_buckets(megabytes, default, order_is_fixed=False)] == [80]
    assert [len(bucket) for bucket in initial_buckets(megabytes, default, order_is_fixed=True)] == [28, 50, 2]
    assert [len(bucket) for bucket in rebuilt_buckets(megabytes, default, range(79, -1, -1))] == [2, 50, 28]
    assert [len(bucket) for bucket in rebuilt_buckets(megabytes, BucketCaps.of(10), range(80))] == [20] * 4
    listed = BucketCaps.of(None, [1, 2])
    assert [len(bucket) for bucket in rebuilt_buckets(megabytes[:9], listed, range(9))] == [2, 4, 3]


def test_a_cap_of_nothing_makes_a_bucket_of_each_gradient() -> None:
    facts = [GradientFacts(4, "cpu", False)] * 3
    assert initial_buckets(facts, BucketCaps.of(0), order_is_fixed=True) == [[2], [1], [0]]
    assert rebuilt_buckets(facts, BucketCaps.of(0), [1, 0, 2]) == [[1], [0], [2]]


@pytest.mark.parametrize("cap", [-0.5, -1])
def test_bad_caps_are_refused(cap: float) -> None:
    with pytest.raises(ConfigError, match="is invalid"):
        BucketCaps.of(cap)
    with pytest.raises(ConfigError, match="is invalid"):
        BucketCaps.of(None, [1, cap])
