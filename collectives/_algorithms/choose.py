"""Chooses the plan for an operation, by its kind, its size and the number of ranks."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import Final

from rpcdist.collectives._algorithms import plans
from rpcdist.collectives._algorithms.steps import Plan
from rpcdist.collectives._operations.operation import Kind

_DOUBLING_LIMIT_BYTES: Final = 32 << 10
_DOUBLING_LIMIT_OF_PAIR_BYTES: Final = 128 << 10
_TREE_LIMIT_BYTES: Final = 128 << 10
_DIRECT_LIMIT_BYTES: Final = 16 << 10
_DIRECT_LIMIT_RANKS: Final = 16
CHAIN_SLICE_BYTES: Final = 512 << 10
_PART_MULTIPLE: Final = 16
"""Parts of a ring start at multiples of this many elements, so that they are aligned in memory."""


class Algorithm(Enum):
    """The algorithms that plans follow."""

    RING = "ring"
    DOUBLING = "recursive doubling"
    TREE = "binomial tree"
    CHAIN = "chain"
    DIRECT = "direct"
    DISSEMINATION = "dissemination"


def choose(kind: Kind, size: int, size_bytes: int) -> Algorithm:
    """The algorithm for an operation; every rank comes to the same from the same arguments."""
    if kind is Kind.ALL_REDUCE:
        limit = _DOUBLING_LIMIT_OF_PAIR_BYTES if size <= 2 else _DOUBLING_LIMIT_BYTES
        return Algorithm.DOUBLING if size_bytes <= limit else Algorithm.RING
    if kind in (Kind.BROADCAST, Kind.REDUCE):
        return Algorithm.TREE if size <= 2 or size_bytes <= _TREE_LIMIT_BYTES else Algorithm.CHAIN
    if kind is Kind.ALL_GATHER:
        small = size_bytes <= _DIRECT_LIMIT_BYTES and size <= _DIRECT_LIMIT_RANKS
        return Algorithm.DIRECT if small else Algorithm.RING
    if kind is Kind.REDUCE_SCATTER:
        return Algorithm.RING
    return Algorithm.DISSEMINATION if kind is Kind.BARRIER else Algorithm.DIRECT


@lru_cache(maxsize=512)
def plan_for(
    kind: Kind,
    rank: int,
    size: int,
    root: int,
    counts: tuple[int, ...],
    element_bytes: int,
    received: tuple[int, ...] = (),
) -> Plan:
    """The plan of one rank.

    Args:
        counts: elements of the tensor, or of each chunk (of ALL_TO_ALL: that this rank sends).
        received: for ALL_TO_ALL, the elements of each chunk that arrives.
    """
    size_bytes = element_bytes * (counts[0] if kind is Kind.ALL_GATHER else sum(counts))
    algorithm = choose(kind, size, size_bytes)
    slice_elements = max(1, CHAIN_SLICE_BYTES // max(1, element_bytes))
    match kind, algorithm:
        case Kind.ALL_REDUCE, Algorithm.DOUBLING:
            return plans.doubling_all_reduce(rank, size, counts[0])
        case Kind.ALL_REDUCE, _:
            return plans.ring_all_reduce(rank, size, counts[0], _PART_MULTIPLE)
        case Kind.BROADCAST, Algorithm.TREE:
            return plans.tree_broadcast(rank, size, root, counts[0])
        case Kind.BROADCAST, _:
            return plans.chain_broadcast(rank, size, root, counts[0], slice_elements)
        case Kind.REDUCE, Algorithm.TREE:
            return plans.tree_reduce(rank, size, root, counts[0])
        case Kind.REDUCE, _:
            return plans.chain_reduce(rank, size, root, counts[0], slice_elements)
        case Kind.ALL_GATHER, Algorithm.DIRECT:
            return plans.direct_all_gather(rank, size, counts)
        case Kind.ALL_GATHER, _:
            return plans.ring_all_gather(rank, size, counts)
        case Kind.REDUCE_SCATTER, _:
            return plans.ring_reduce_scatter(rank, size, counts)
        case Kind.GATHER, _:
            return plans.gather(rank, size, root, counts)
        case Kind.SCATTER, _:
            return plans.scatter(rank, size, root, counts)
        case Kind.ALL_TO_ALL, _:
            return plans.pairwise_all_to_all(rank, size, counts, received)
        case _:
            assert kind is Kind.BARRIER
            return plans.barrier(rank, size)
