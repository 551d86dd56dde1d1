"""Plans in which data goes from its source to its destination without a stop between."""

from __future__ import annotations

from collections.abc import Sequence

from rpcdist.collectives._algorithms.steps import Plan, ReceiveStep, Region, Round, SendStep, chain, merge
from rpcdist.collectives._algorithms.tree import barrier


def direct_all_gather(rank: int, size: int, counts: Sequence[int]) -> Plan:
    """Every rank sends to every other in one round: for small chunks and few ranks. Buffers as in `ring_all_gather`."""
    others = [(rank + distance) % size for distance in range(1, size)]
    sends = tuple(SendStep(peer, Region(rank, 0, counts[rank])) for peer in others)
    receives = tuple(ReceiveStep(peer, Region(peer, 0, counts[peer])) for peer in reversed(others))
    return (Round(sends, receives),) if size > 1 else ()


def gather(rank: int, size: int, root: int, counts: Sequence[int]) -> Plan:
    """All send to the root at once. Buffer i is rank i's chunk; other ranks have only their own."""
    if rank == root:
        others = [peer for peer in range(size) if peer != root]
        moves = Round((), tuple(ReceiveStep(peer, Region(peer, 0, counts[peer])) for peer in others))
    else:
        moves = Round((SendStep(root, Region(rank, 0, counts[rank])),))
    return merge((moves,), barrier(rank, size)) if size > 1 else ()


def scatter(rank: int, size: int, root: int, counts: Sequence[int]) -> Plan:
    """The root sends to all at once. Buffers as in `gather`."""
    if rank == root:
        others = [peer for peer in range(size) if peer != root]
        moves = Round(tuple(SendStep(peer, Region(peer, 0, counts[peer])) for peer in others))
    else:
        moves = Round((), (ReceiveStep(root, Region(rank, 0, counts[rank])),))
    return merge((moves,), barrier(rank, size)) if size > 1 else ()


def pairwise_all_to_all(rank: int, size: int, sent: Sequence[int], received: Sequence[int]) -> Plan:
    """In round k, each rank sends to the one k + 1 ahead.

    A barrier follows: only the receiver can see that a chunk has another length than expected, and no rank may return
    before all have checked theirs.

    Args:
        rank: the rank whose plan it is.
        size: number of ranks.
        sent: elements for each rank. Buffers 0 to size - 1 are these chunks.
        received: elements from each rank. Buffers size to 2 * size - 1 are these chunks.
    """
    rounds = []
    for distance in range(1, size):
        ahead, behind = (rank + distance) % size, (rank - distance) % size
        send = SendStep(ahead, Region(ahead, 0, sent[ahead]))
        rounds.append(Round((send,), (ReceiveStep(behind, Region(size + behind, 0, received[behind])),)))
    return chain(tuple(rounds), barrier(rank, size))
