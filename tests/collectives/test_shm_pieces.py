"""How tensors are cut into steps: as if they lay one after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpcdist.collectives._transports.shm.routes import Piece, cut

Steps = list[list[tuple[int, int, int, int]]]


@pytest.mark.parametrize(
    ("counts", "limit", "steps"),
    [
        ((), 4, [[]]),
        ((0,), 4, [[]]),
        ((4,), 4, [[(0, 0, 4, 0)]]),
        ((5,), 4, [[(0, 0, 4, 0)], [(0, 4, 5, 0)]]),
        ((1, 3), 4, [[(0, 0, 1, 0), (1, 0, 3, 1)]]),
        ((3, 0, 6), 4, [[(0, 0, 3, 0), (2, 0, 1, 3)], [(2, 1, 5, 0)], [(2, 5, 6, 0)]]),
    ],
    ids=repr,
)
def test_steps(counts: tuple[int, ...], limit: int, steps: Steps) -> None:
    assert cut(counts, limit) == tuple(tuple(Piece(*piece) for piece in step) for step in steps)


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 16))
def test_every_element_is_in_one_step_and_steps_are_full(counts: list[int], limit: int) -> None:
    steps = cut(tuple(counts), limit)
    found = [(piece.tensor, at) for step in steps for piece in step for at in range(piece.start, piece.stop)]
    assert found == [(tensor, at) for tensor, count in enumerate(counts) for at in range(count)]
    assert len(steps) == max(1, -(-sum(counts) // limit))
    for step in steps:
        ends = [piece.offset + piece.stop - piece.start for piece in step]
        assert [piece.offset for piece in step] == [0, *ends][: len(step)]
        assert all(end <= limit for end in ends)


def test_a_piece_of_a_whole_tensor_is_that_tensor() -> None:
    tensor = torch.arange(4)
    assert Piece(0, 0, 4, 7).of(tensor) is tensor
    assert Piece(0, 1, 3, 0).of(tensor).tolist() == [1, 2]
