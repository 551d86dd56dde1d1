"""Plans around a ring: each rank sends to the next only. They move the fewest bytes, in many rounds: for large tensors.

The algorithms are described in P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations" (2009).
"""

from __future__ import annotations

from collections.abc import Sequence

from rpcdist.collectives._algorithms.steps import Plan, ReceiveStep, Region, Round, SendStep, chain, split_evenly


def ring_all_reduce(rank: int, size: int, count: int, multiple: int = 1) -> Plan:
    """The ranks reduce a part each, and pass the parts around.

    Args:
        rank: the rank whose plan it is.
        size: number of ranks.
        count: elements of the tensor. Buffer 0 is the tensor, in place.
        multiple: parts start at multiples of this many elements.
    """
    parts = [Region(0, start, stop) for start, stop in split_evenly(count, size, multiple)]
    return chain(_reduce_parts(rank, size, parts), _gather_parts(rank, size, parts))


def _reduce_parts(rank: int, size: int, parts: Sequence[Region]) -> Plan:
    """Afterwards part `rank` is final. Part p starts at rank p + 1 and ends at rank p."""
    rounds = []
    for step in range(size - 1):
        leaving, coming = parts[(rank - 1 - step) % size], parts[(rank - 2 - step) % size]
        rounds.append(
            Round(
                (SendStep((rank + 1) % size, leaving),),
                (ReceiveStep((rank - 1) % size, coming, operand=coming),),
                coming if step == size - 2 else None,
            )
        )
    return tuple(rounds)


def _gather_parts(rank: int, size: int, parts: Sequence[Region]) -> Plan:
    """Before it each rank has part `rank`, afterwards all parts."""
    return tuple(
        Round(
            (SendStep((rank + 1) % size, parts[(rank - step) % size]),),
            (ReceiveStep((rank - 1) % size, parts[(rank - 1 - step) % size]),),
        )
        for step in range(size - 1)
    )


def ring_all_gather(rank: int, size: int, counts: Sequence[int]) -> Plan:
    """Chunks go around the ring until every rank has all of them.

    Args:
        rank: the rank whose plan it is.
        size: number of ranks.
        counts: elements of each rank's chunk. Buffer i is rank i's chunk; this rank's own holds its data already.
    """
    return _gather_parts(rank, size, [Region(index, 0, count) for index, count in enumerate(counts)])


def ring_reduce_scatter(rank: int, size: int, counts: Sequence[int]) -> Plan:
    """Partial reductions go around, and each ends at the rank that it belongs to.

    Args:
        rank: the rank whose plan it is.
        size: number of ranks.
        counts: elements of each chunk. Buffers 0 to size - 1 are the chunks, which are only read; buffer `size` is
            the output; buffers `size` + 1 and `size` + 2 are scratch space as large as the largest chunk.
    """
    rounds = []
    leaving = Region((rank - 1) % size, 0, counts[(rank - 1) % size])
    for step in range(size - 1):
        chunk = (rank - 2 - step) % size
        last = step == size - 2
        coming = Region(size if last else size + 1 + step % 2, 0, counts[chunk])
        rounds.append(
            Round(
                (SendStep((rank + 1) % size, leaving),),
                (ReceiveStep((rank - 1) % size, coming, operand=Region(chunk, 0, counts[chunk])),),
                coming if last else None,
            )
        )
        leaving = coming
    return tuple(rounds)
