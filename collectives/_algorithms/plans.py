"""The plans: each says which chunks a rank sends, receives and adds in each round.

Trees have few rounds, for small tensors: barrier, recursive doubling, binomial trees; and chains for large ones. Around
a ring each rank sends to the next only, which moves the fewest bytes, in many rounds. Direct plans move data from its
source to its destination without a stop between.

Recursive doubling and binomial trees are those of R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective
communication operations in MPICH" (2005); the barrier is D. Hensgen, R. Finkel and U. Manber's (1988); the rings are P.
Patarasuk and X. Yuan's, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rpcdist.collectives._algorithms.steps import (
    NOTHING,
    Plan,
    ReceiveStep,
    Region,
    Round,
    SendStep,
    chain,
    merge,
    split_evenly,
)


def barrier(rank: int, size: int) -> Plan:
    """In round k, a rank tells the rank 2^k ahead that it has heard, directly or not, from the 2^k ranks behind it."""
    rounds = []
    distance = 1
    while distance < size:
        rounds.append(
            Round((SendStep((rank + distance) % size, NOTHING),), (ReceiveStep((rank - distance) % size, NOTHING),))
        )
        distance *= 2
    return tuple(rounds)


def greeting(rank: int, size: int) -> Plan:
    """The barrier's first round: every rank sends an empty message to the next."""
    return barrier(rank, size)[:1]


def doubling_all_reduce(rank: int, size: int, count: int) -> Plan:
    """Pairs exchange everything, then pairs of pairs, and so on; buffer 0 is the tensor, in place.

    Where the size is no power of two, the ranks above one first give their values to partners below, and get the result
    at the end.
    """
    whole = Region(0, 0, count)
    power = 1 << (size.bit_length() - 1)
    extra = size - power
    rounds = []
    if extra:
        rounds.append(_take_extra(rank, power, extra, whole))
    distance = 1
    while distance < power:
        peer = rank ^ distance
        if rank < power:
            rounds.append(Round((SendStep(peer, whole),), (ReceiveStep(peer, whole, operand=whole, deferred=True),)))
        else:
            rounds.append(Round())
        distance *= 2
    if rank < power and rounds:
        rounds[-1] = replace(rounds[-1], final=whole)
    if extra:
        rounds.append(_return_result(rank, power, extra, whole))
    return merge(tuple(rounds), greeting(rank, size))


def _take_extra(rank: int, power: int, extra: int, whole: Region) -> Round:
    if rank >= power:
        return Round((SendStep(rank - power, whole),))
    return Round((), (ReceiveStep(rank + power, whole, operand=whole),)) if rank < extra else Round()


def _return_result(rank: int, power: int, extra: int, whole: Region) -> Round:
    if rank >= power:
        return Round((), (ReceiveStep(rank - power, whole),))
    return Round((SendStep(rank + power, whole),)) if rank < extra else Round()


def tree_broadcast(rank: int, size: int, root: int, count: int) -> Plan:
    """In round k, the first 2^k ranks from the root on send to the next 2^k. Buffer 0 is the tensor."""
    whole = Region(0, 0, count)
    place = (rank - root) % size
    rounds = []
    distance = 1
    while distance < size:
        peer_ahead, peer_behind = (rank + distance) % size, (rank - distance) % size
        sends = (SendStep(peer_ahead, whole),) if place < distance and place + distance < size else ()
        receives = (ReceiveStep(peer_behind, whole),) if distance <= place < 2 * distance else ()
        rounds.append(Round(sends, receives))
        distance *= 2
    return merge(tuple(rounds), barrier(rank, size))


def tree_reduce(rank: int, size: int, root: int, count: int) -> Plan:
    """The tree of the broadcast in the other direction.

    Buffer 0 is this rank's tensor; buffer 1 is where it reduces: at the root the same tensor, elsewhere scratch space.
    """
    place = (rank - root) % size
    mine = Region(0, 0, count)
    reduced = Region(1, 0, count)
    rounds = []
    distance = 1 << max(0, (size - 1).bit_length() - 1)
    while distance >= 1 and size > 1:
        sends: tuple[SendStep, ...] = ()
        receives: tuple[ReceiveStep, ...] = ()
        if distance <= place < 2 * distance:
            sends = (SendStep((rank - distance) % size, mine),)
        elif place < distance and place + distance < size:
            receives = (ReceiveStep((rank + distance) % size, reduced, operand=mine),)
            mine = reduced
        rounds.append(Round(sends, receives))
        distance //= 2
    if rank == root and rounds:
        rounds[-1] = replace(rounds[-1], final=reduced)
    return merge(tuple(rounds), barrier(rank, size))


def chain_broadcast(rank: int, size: int, root: int, count: int, slice_elements: int) -> Plan:
    """Slices go from the root along the ring, one behind the other: each rank sends and receives everything once.

    Args:
        count: elements of the tensor, which is buffer 0.
    """
    place = (rank - root) % size
    slices = [Region(0, start, min(start + slice_elements, count)) for start in range(0, max(count, 1), slice_elements)]
    rounds = []
    for number in range(len(slices) + size - 2):
        leaving, coming = number - place, number - place + 1
        sends = (
            (SendStep((rank + 1) % size, slices[leaving]),) if place < size - 1 and 0 <= leaving < len(slices) else ()
        )
        receives = (ReceiveStep((rank - 1) % size, slices[coming]),) if place and 0 <= coming < len(slices) else ()
        rounds.append(Round(sends, receives))
    return merge(tuple(rounds), barrier(rank, size))


def chain_reduce(rank: int, size: int, root: int, count: int, slice_elements: int) -> Plan:
    """Slices go along the ring to the root, and every rank adds its own.

    Buffer 0 is this rank's tensor. Buffer 1 is where it reduces: at the root the same tensor; elsewhere scratch space
    of two slices, which are used in turn. Other arguments as in `chain_broadcast`.
    """
    place = (rank - root - 1) % size  # the first in the chain is the one behind the root
    starts = range(0, max(count, 1), slice_elements)
    rounds = []
    for number in range(len(starts) + size - 2):
        leaving, coming = number - place, number - place + 1
        sends: tuple[SendStep, ...] = ()
        receives: tuple[ReceiveStep, ...] = ()
        final = None
        if place < size - 1 and 0 <= leaving < len(starts):
            sends = (SendStep((rank + 1) % size, _slice(leaving, starts, count, 0 if place == 0 else 2)),)
        if place and 0 <= coming < len(starts):
            target = _slice(coming, starts, count, 2 if place < size - 1 else 1)
            receives = (ReceiveStep((rank - 1) % size, target, operand=_slice(coming, starts, count, 0)),)
            final = target if place == size - 1 else None
        rounds.append(Round(sends, receives, final))
    return merge(tuple(rounds), barrier(rank, size))


def _slice(index: int, starts: range, count: int, where: int) -> Region:
    """Slice `index` in the tensor (0), in the root's result (1), or in its half of the scratch space (2)."""
    start = starts[index]
    stop = min(start + starts.step, count)
    if where < 2:
        return Region(where, start, stop)
    base = index % 2 * starts.step
    return Region(1, base, base + stop - start)


def ring_all_reduce(rank: int, size: int, count: int, multiple: int = 1) -> Plan:
    """The ranks reduce a part each, and pass the parts around.

    Args:
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
        counts: elements of each rank's chunk. Buffer i is rank i's chunk; this rank's own holds its data already.
    """
    return _gather_parts(rank, size, [Region(index, 0, count) for index, count in enumerate(counts)])


def ring_reduce_scatter(rank: int, size: int, counts: Sequence[int]) -> Plan:
    """Partial reductions go around, and each ends at the rank that it belongs to.

    Args:
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
        sent: elements for each rank. Buffers 0 to size - 1 are these chunks.
        received: elements from each rank. Buffers size to 2 * size - 1 are these chunks.
    """
    rounds = []
    for distance in range(1, size):
        ahead, behind = (rank + distance) % size, (rank - distance) % size
        send = SendStep(ahead, Region(ahead, 0, sent[ahead]))
        rounds.append(Round((send,), (ReceiveStep(behind, Region(size + behind, 0, received[behind])),)))
    return chain(tuple(rounds), barrier(rank, size))
