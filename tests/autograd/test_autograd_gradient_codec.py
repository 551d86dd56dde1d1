"""Gradients on the wire: what is sent arrives, in a table where that is possible, and damage is named."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from rpcdist._proto import autograd_pb2
from rpcdist.autograd._gradient_codec import decode_gradients, encode_gradients
from rpcdist.errors import SerializationError
from rpcdist.rpc._values import INLINE_LIMIT

ONE = torch.rand(2, 3)
LARGE = torch.rand(INLINE_LIMIT // 4 + 1)
SPARSE = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True)


def encoded(gradients: Sequence[Sequence[Tensor | None]]) -> tuple[autograd_pb2.Gradients, list[object]]:
    message = autograd_pb2.Gradients(messages=range(len(gradients)))
    large = encode_gradients(gradients, message)
    return message, [buffer.copy() for buffer in large]


@pytest.mark.parametrize(
    ("gradients", "in_table"),
    [
        ([[ONE]], True),
        ([[ONE, None], [], [None], [LARGE, None, ONE]], True),
        ([[None]], True),
        ([[ONE.sum().expand(5)], [ONE.t(), ONE[:, 1]]], True),
        ([[ONE], [ONE]], True),
        ([[LARGE, LARGE[5:]]], True),
        ([[LARGE.sum().expand(LARGE.shape)]], False),
        ([[ONE, SPARSE]], False),
        ([[torch.ones(2, dtype=torch.complex64)]], False),
    ],
)
def test_gradients_come_back(gradients: list[list[Tensor | None]], in_table: bool) -> None:
    message, large = encoded(gradients)
    assert bool(message.counts) == in_table != message.HasField("value")
    found = decode_gradients(message, large, plain_only=False)  # type: ignore[arg-type]
    assert [len(of_message) for of_message in found] == [len(of_message) for of_message in gradients]
    for arrived, sent in zip(chain.from_iterable(found), chain.from_iterable(gradients), strict=True):
        assert (arrived is None) == (sent is None)
        if arrived is not None and sent is not None:
            assert torch.equal(arrived.to_dense(), sent.to_dense()) and not arrived.requires_grad


def test_damage_is_named() -> None:
    good, large = encoded([[ONE, None], [LARGE]])

    def changed(**fields: Any) -> autograd_pb2.Gradients:
        message = autograd_pb2.Gradients(**fields)
        kept = autograd_pb2.Gradients.FromString(good.SerializeToString())
        for name in fields:
            kept.ClearField(name)
        kept.MergeFrom(message)
        return kept

    for message, says in (
        (changed(counts=[2]), "do not fit"),
        (changed(absent=[7]), "do not fit"),
        (changed(absent=[1, 1]), "do not fit"),
        (changed(counts=[2, 1 << 31]), "tensors arrived; 65535 are allowed"),
        (changed(counts=[2, 3]), "rebuilt"),
        (changed(counts=[1, 1]), "1 large buffers arrived for a value that has 0"),
        (changed(table=good.table + b"x"), "1 bytes that are left over"),
        (changed(table=good.table[:-1]), "rebuilt"),
        (changed(messages=[1]), "do not fit"),
        (autograd_pb2.Gradients(messages=[1]), "1 large buffers arrived"),
    ):
        with pytest.raises(SerializationError, match=says):
            decode_gradients(message, large, plain_only=True)  # type: ignore[arg-type]
