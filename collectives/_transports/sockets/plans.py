"""Plans, which pure functions compute: data that says which rank sends which elements to which rank in which round.

Rules for every plan:

 1. Rounds have the same number on all ranks: a peer receives in round k what a rank sends in round k. A rank without
    steps in a round has an empty round. So plans cannot deadlock when the steps of a round run at once, even if a send
    ends only when it is received; and plans can be merged round by round.
 2. In one round, a rank sends at most one message to each peer, and receives at most one from each.
 3. No step of a round writes what another step of this round reads or writes, except for a `deferred` receive,
    which writes once all sends of the round are done.
 4. In round 0 every rank sends at least an empty message to the next rank, and receives one from the rank before it.
    So ranks that run different operations always notice, because somewhere around the ring two neighbours differ.
 5. A plan ends on a rank only after that rank has heard from all other ranks, directly or through others.

Regions count elements. The docstring of each plan describes its buffers. `plan_for` picks the plan by the kind of the
operation, its size and the number of ranks.

For small tensors, trees have few rounds: barrier, recursive doubling, binomial trees. For large ones, chains and rings:
in a ring each rank sends only to the next, which moves the fewest bytes, in many rounds. Direct plans move data
without intermediate ranks.

Recursive doubling and binomial trees are those of R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective
communication operations in MPICH" (2005); the barrier is D. Hensgen, R. Finkel and U. Manber's (1988); the rings are P.
Patarasuk and X. Yuan's, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import Final

from rpcdist.collectives._operations.operation import Kind

_DOUBLING_LIMIT_BYTES: Final = 32 << 10
_DOUBLING_LIMIT_OF_PAIR_BYTES: Final = 128 << 10
_TREE_LIMIT_BYTES: Final = 128 << 10
_DIRECT_LIMIT_BYTES: Final = 16 << 10
_DIRECT_LIMIT_RANKS: Final = 16
CHAIN_SLICE_BYTES: Final = 512 << 10
_PART_MULTIPLE: Final = 16
"""The parts in a ring start at multiples of this many elements, so that they are aligned in memory."""


@dataclass(frozen=True, slots=True)
class Region:
    """Elements `start` to `stop` of buffer number `buffer`."""

    buffer: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def __repr__(self) -> str:
        return f"{self.buffer}[{self.start}:{self.stop}]"


NOTHING = Region(0, 0, 0)
"""The empty region: the message only tells that its sender has reached this step."""


@dataclass(frozen=True, slots=True)
class SendStep:
    """A send of a region to a peer."""

    peer: int
    region: Region

    def __repr__(self) -> str:
        return f">{self.peer} {self.region if self.region.count else '-'}"


@dataclass(frozen=True, slots=True)
class ReceiveStep:
    """A receive of a region from a peer.

    Attributes:
        operand: if given, the message is reduced with this region, and the result goes to `region`, which may be the
            same. The lower rank's data is the first operand, so that two ranks that exchange data get the same bits.
        deferred: whether to reduce only after this round's sends, because they read the region that is written.
    """

    peer: int
    region: Region
    operand: Region | None = None
    deferred: bool = False

    def __repr__(self) -> str:
        sign = "<" if self.operand is None else "+"
        return f"{sign}{self.peer} {self.region if self.region.count else '-'}"


@dataclass(frozen=True, slots=True)
class Round:
    """Steps that run at the same time.

    Attributes:
        final: the region of a receive with an operand, if that receive completes the reduction over all ranks.
    """

    sends: tuple[SendStep, ...] = ()
    receives: tuple[ReceiveStep, ...] = ()
    final: Region | None = None

    def __repr__(self) -> str:
        return " ".join(map(repr, (*self.sends, *self.receives))) or "."


Plan = tuple[Round, ...]


def merge(main: Plan, other: Plan) -> Plan:
    """Merges two plans: round k has the steps of both, without empty messages where the main plan sends one anyway.

    `other` moves no elements.
    """
    return tuple(_merge_rounds(a or Round(), b or Round()) for a, b in zip_longest(main, other))


def _merge_rounds(main: Round, other: Round) -> Round:
    to = {step.peer for step in main.sends}
    from_ = {step.peer for step in main.receives}
    return Round(
        (*main.sends, *(step for step in other.sends if step.peer not in to)),
        (*main.receives, *(step for step in other.receives if step.peer not in from_)),
        main.final,
    )


def split_evenly(count: int, parts: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Returns start and stop of `parts` adjacent parts of `count` elements, as equal as possible.

    Args:
        parts: number of parts; some are empty if there are too few elements.
        multiple: parts start at multiples of this many elements.
    """
    units = -(-count // multiple)
    bounds = [min(count, multiple * (units * part // parts)) for part in range(parts)] + [count]
    return list(pairwise(bounds))


def barrier(rank: int, size: int) -> Plan:
    """In round k, a rank tells the rank 2^k ahead that it has heard, directly or not, from the 2^k ranks before it."""
    rounds = []
    distance = 1
    while distance < size:
        ahead, behind = (rank + distance) % size, (rank - distance) % size
        rounds.append(Round((SendStep(ahead, NOTHING),), (ReceiveStep(behind, NOTHING),)))
        distance *= 2
    return tuple(rounds)


def doubling_all_reduce(rank: int, size: int, count: int) -> Plan:
    """Pairs exchange everything, then pairs of pairs, and so on; buffer 0 is the tensor, in place.

    If the size is no power of two, the ranks above the largest one below it first give their values to partners, and
    get the result at the end.
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
    return merge(tuple(rounds), barrier(rank, size)[:1])  # every rank sends a message to the next


def _take_extra(rank: int, power: int, extra: int, whole: Region) -> Round:
    if rank >= power:
        return Round((SendStep(rank - power, whole),))
    return Round((), (ReceiveStep(rank + power, whole, operand=whole),)) if rank < extra else Round()


def _return_result(rank: int, power: int, extra: int, whole: Region) -> Round:
    if rank >= power:
        return Round((), (ReceiveStep(rank - power, whole),))
    return Round((SendStep(rank + power, whole),)) if rank < extra else Round()


def tree_broadcast(rank: int, size: int, root: int, count: int) -> Plan:
    """In round k, the first 2^k ranks from the root send to the next 2^k. Buffer 0 is the tensor."""
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

    Buffer 0 is this rank's tensor. The rank reduces into buffer 1: at the root the same tensor, elsewhere scratch.
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
    """Slices go from the root along the ring, one after the other: each rank sends and receives the tensor once.

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

    Buffer 0 is this rank's tensor. The rank reduces into buffer 1: at the root the same tensor; elsewhere scratch space
    of two slices, used in turn. Other arguments as in `chain_broadcast`.
    """
    place = (rank - root - 1) % size  # the chain starts at the rank after the root
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
    """Returns slice `index` in the tensor (0), in the root's result (1), or in its half of the scratch space (2)."""
    start = starts[index]
    stop = min(start + starts.step, count)
    if where < 2:
        return Region(where, start, stop)
    base = index % 2 * starts.step
    return Region(1, base, base + stop - start)


def ring_all_reduce(rank: int, size: int, count: int, multiple: int = 1) -> Plan:
    """Each rank reduces one part, then the ranks pass the parts around.

    Args:
        count: elements of the tensor. Buffer 0 is the tensor, in place.
        multiple: parts start at multiples of this many elements.
    """
    parts = [Region(0, start, stop) for start, stop in split_evenly(count, size, multiple)]
    return _reduce_parts(rank, size, parts) + _gather_parts(rank, size, parts)


def _reduce_parts(rank: int, size: int, parts: Sequence[Region]) -> Plan:
    """Makes part `rank` final. Part p starts at rank p + 1 and ends at rank p."""
    rounds = []
    for step in range(size - 1):
        leaving, coming = parts[(rank - 1 - step) % size], parts[(rank - 2 - step) % size]
        receive = ReceiveStep((rank - 1) % size, coming, operand=coming)
        final = coming if step == size - 2 else None
        rounds.append(Round((SendStep((rank + 1) % size, leaving),), (receive,), final))
    return tuple(rounds)


def _gather_parts(rank: int, size: int, parts: Sequence[Region]) -> Plan:
    """Gives all ranks all parts; at the start each rank has part `rank`."""
    rounds = []
    for step in range(size - 1):
        leaving, coming = parts[(rank - step) % size], parts[(rank - 1 - step) % size]
        rounds.append(Round((SendStep((rank + 1) % size, leaving),), (ReceiveStep((rank - 1) % size, coming),)))
    return tuple(rounds)


def ring_all_gather(rank: int, size: int, counts: Sequence[int]) -> Plan:
    """Chunks go around the ring until every rank has all of them.

    Args:
        counts: elements of each rank's chunk. Buffer i is rank i's chunk; this rank's own holds its data already.
    """
    return _gather_parts(rank, size, [Region(index, 0, count) for index, count in enumerate(counts)])


def ring_reduce_scatter(rank: int, size: int, counts: Sequence[int]) -> Plan:
    """Partial reductions go around the ring, and each ends at the rank to which it belongs.

    Args:
        counts: elements of each chunk. Buffers 0 to size - 1 are the chunks, which are not written; buffer `size` is
            the output; buffers `size` + 1 and `size` + 2 are scratch space, each as large as the largest chunk.
    """
    rounds = []
    leaving = Region((rank - 1) % size, 0, counts[(rank - 1) % size])
    for step in range(size - 1):
        chunk = (rank - 2 - step) % size
        last = step == size - 2
        coming = Region(size if last else size + 1 + step % 2, 0, counts[chunk])
        receive = ReceiveStep((rank - 1) % size, coming, operand=Region(chunk, 0, counts[chunk]))
        rounds.append(Round((SendStep((rank + 1) % size, leaving),), (receive,), coming if last else None))
        leaving = coming
    return tuple(rounds)


def direct_all_gather(rank: int, size: int, counts: Sequence[int]) -> Plan:
    """All ranks send to all others in one round: for small chunks and few ranks. Buffers as in `ring_all_gather`."""
    others = [(rank + distance) % size for distance in range(1, size)]
    sends = tuple(SendStep(peer, Region(rank, 0, counts[rank])) for peer in others)
    receives = tuple(ReceiveStep(peer, Region(peer, 0, counts[peer])) for peer in reversed(others))
    return (Round(sends, receives),) if size > 1 else ()


def gather(rank: int, size: int, root: int, counts: Sequence[int]) -> Plan:
    """All ranks send to the root in parallel. Buffer i is rank i's chunk; another rank has only its own."""
    return _star(rank, size, root, counts, to_root=True)


def scatter(rank: int, size: int, root: int, counts: Sequence[int]) -> Plan:
    """The root sends to all ranks in parallel. Buffers as in `gather`."""
    return _star(rank, size, root, counts, to_root=False)


def _star(rank: int, size: int, root: int, counts: Sequence[int], to_root: bool) -> Plan:
    if size == 1:
        return ()
    moves = [(peer, Region(peer, 0, counts[peer])) for peer in range(size) if peer != root]
    if rank != root:
        moves = [(root, Region(rank, 0, counts[rank]))]
    if to_root == (rank == root):
        round_ = Round((), tuple(ReceiveStep(*move) for move in moves))
    else:
        round_ = Round(tuple(SendStep(*move) for move in moves))
    return merge((round_,), barrier(rank, size))


def pairwise_all_to_all(rank: int, size: int, sent: Sequence[int], received: Sequence[int]) -> Plan:
    """In round k, each rank sends to the rank k + 1 ahead.

    A barrier follows: only the receiver can see that a chunk has an unexpected length, and no rank may return before
    all have checked theirs.

    Args:
        sent: elements for each rank. Buffers 0 to size - 1 are these chunks.
        received: elements from each rank. Buffers size to 2 * size - 1 are these chunks.
    """
    rounds = []
    for distance in range(1, size):
        ahead, behind = (rank + distance) % size, (rank - distance) % size
        send = SendStep(ahead, Region(ahead, 0, sent[ahead]))
        rounds.append(Round((send,), (ReceiveStep(behind, Region(size + behind, 0, received[behind])),)))
    return tuple(rounds) + barrier(rank, size)


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
    """Returns the plan of one rank; all ranks choose the same algorithm from the same arguments.

    Args:
        counts: elements of the tensor, or of each chunk (for ALL_TO_ALL, of each chunk that this rank sends).
        received: for ALL_TO_ALL, the elements of each chunk that arrives.
    """
    size_bytes = element_bytes * (counts[0] if kind is Kind.ALL_GATHER else sum(counts))
    slice_elements = max(1, CHAIN_SLICE_BYTES // max(1, element_bytes))
    if kind is Kind.ALL_REDUCE:
        if size_bytes <= (_DOUBLING_LIMIT_OF_PAIR_BYTES if size <= 2 else _DOUBLING_LIMIT_BYTES):
            return doubling_all_reduce(rank, size, counts[0])
        return ring_all_reduce(rank, size, counts[0], _PART_MULTIPLE)
    if kind in (Kind.BROADCAST, Kind.REDUCE):
        reduces = kind is Kind.REDUCE
        if size <= 2 or size_bytes <= _TREE_LIMIT_BYTES:
            return (tree_reduce if reduces else tree_broadcast)(rank, size, root, counts[0])
        return (chain_reduce if reduces else chain_broadcast)(rank, size, root, counts[0], slice_elements)
    if kind is Kind.ALL_GATHER:
        is_small = size_bytes <= _DIRECT_LIMIT_BYTES and size <= _DIRECT_LIMIT_RANKS
        return (direct_all_gather if is_small else ring_all_gather)(rank, size, counts)
    if kind is Kind.REDUCE_SCATTER:
        return ring_reduce_scatter(rank, size, counts)
    if kind in (Kind.GATHER, Kind.SCATTER):
        return (gather if kind is Kind.GATHER else scatter)(rank, size, root, counts)
    if kind is Kind.ALL_TO_ALL:
        return pairwise_all_to_all(rank, size, counts, received)
    assert kind is Kind.BARRIER
    return barrier(rank, size)
