"""The plans of shared memory, without memory: every byte goes where it belongs, exactly once, and nothing overlaps."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import pytest
from full_sets import FULL_ONLY
from hypothesis import given
from hypothesis import strategies as st

from rpcdist.collectives._operations.operation import Kind
from rpcdist.collectives._transports.shm.routes import (
    ALIGNMENT,
    LINE,
    Layout,
    Route,
    num_steps,
    portions,
    route,
    segment_size,
    span,
    two_phase_slice_bytes,
)
from rpcdist.collectives._transports.transport_base import mismatched_sizes

BUFFER = 1024
SIZES = range(1, 10)
KINDS = (
    Kind.BROADCAST,
    Kind.ALL_GATHER,
    Kind.GATHER,
    Kind.SCATTER,
    Kind.ALL_TO_ALL,
    Kind.REDUCE_SCATTER,
)


@pytest.mark.parametrize("size", [*SIZES, 64, 200])
def test_nothing_in_a_segment_overlaps(size: int) -> None:
    layout = Layout(size, 1000)
    parts = [(layout.sleepers, layout.sleepers_bytes), *((layout.wakeup(half), LINE) for half in (0, 1))]
    for half, rank in product((0, 1), range(size)):
        parts.append((layout.header(half, rank), LINE))
        parts.append((layout.table(half, rank), layout.table_bytes))
        parts.append((layout.buffer(half, rank), 1000))
    parts.sort()
    assert all(start + length <= following for (start, length), (following, _) in pairwise(parts))
    assert all(start % LINE == 0 for start, _ in parts)
    assert parts[-1][0] + parts[-1][1] <= layout.total_bytes
    assert segment_size(size) == Layout(size).total_bytes


@given(length=st.integers(0, 5000), piece=st.integers(1, 700))
def test_the_pieces_of_a_tensor_are_all_of_it(length: int, piece: int) -> None:
    spans = [span(step, piece, length) for step in range(num_steps(length, piece))]
    assert [byte for start, stop in spans for byte in range(start, stop)] == list(range(length))
    assert span(len(spans), piece, length) == (length, length)
    assert all(stop - start <= piece for start, stop in spans)


@given(length=st.integers(0, 3000), size=st.integers(1, 9), multiple=st.sampled_from([1, 4, 16, 64]))
def test_portions_are_all_of_a_slice(length: int, size: int, multiple: int) -> None:
    parts = portions(length, size, multiple)
    assert len(parts) == size
    assert [element for start, stop in parts for element in range(start, stop)] == list(range(length))
    assert all(start % multiple == 0 or start == length for start, _ in parts)


@pytest.mark.parametrize("buffer_bytes", [512, 4096, 512 << 10, 1 << 20])
@pytest.mark.parametrize("size", SIZES)
def test_a_slice_and_a_portion_of_it_fit_in_a_buffer(size: int, buffer_bytes: int) -> None:
    chunk = two_phase_slice_bytes(size, buffer_bytes)
    assert chunk > 0 and chunk % ALIGNMENT == 0
    for width in (1, 2, 4, 8, 16):
        longest = max(stop - start for start, stop in portions(chunk // width, size, ALIGNMENT // width))
        assert chunk + longest * width <= buffer_bytes


# ------------------------------------------------------------ routes, played with bytes that know where they come from

Byte = tuple[int, int, int]  # rank, index in its inputs, position


def lengths(kind: Kind, rank: int, size: int, root: int, longest: int) -> tuple[list[int], list[int]]:
    """Of the inputs and the outputs of a rank."""
    if kind is Kind.BROADCAST:
        return [longest], [longest]
    if kind is Kind.ALL_GATHER:
        return [longest], [longest] * size
    if kind is Kind.GATHER:
        return [longest], [longest] * size if rank == root else []
    if kind is Kind.SCATTER:
        return [longest] * size if rank == root else [], [longest]
    if kind is Kind.REDUCE_SCATTER:
        return [max(0, longest - 8 * index) for index in range(size)], []
    uneven = [[max(0, longest - 8 * sender - 16 * receiver) for receiver in range(size)] for sender in range(size)]
    return uneven[rank], [uneven[sender][rank] for sender in range(size)]


def play(kind: Kind, size: int, root: int, longest: int) -> list[dict[tuple[int, int], list[Byte]]]:
    """The data that each rank gets, as (target, position) to all bytes that were written there."""
    routes = [route(kind, rank, size, root, BUFFER) for rank in range(size)]
    got: list[dict[tuple[int, int], list[Byte]]] = [{} for _ in range(size)]
    for step in range(num_steps(longest, routes[0].slice_bytes)):
        buffers = [publish(routes[rank], rank, step, kind, size, root, longest) for rank in range(size)]
        for rank, path in enumerate(routes):
            outputs = lengths(kind, rank, size, root, longest)[1]
            if kind is Kind.REDUCE_SCATTER:  # there is one output, and every peer adds to it
                outputs = [lengths(kind, rank, size, root, longest)[0][rank]] * size
            for peer, offset, target in path.takes:
                start, stop = span(step, path.slice_bytes, outputs[target])
                for position in range(start, stop):
                    byte = buffers[peer][offset + position - start]
                    got[rank].setdefault((target, position), []).append(byte)
    for rank, path in enumerate(routes):
        if path.own is not None:
            source, target = path.own
            for position in range(lengths(kind, rank, size, root, longest)[0][source]):
                got[rank].setdefault((target, position), []).append((rank, source, position))
    return got


def publish(path: Route, rank: int, step: int, kind: Kind, size: int, root: int, longest: int) -> dict[int, Byte]:
    buffer: dict[int, Byte] = {}
    inputs = lengths(kind, rank, size, root, longest)[0]
    for source, offset in path.publishes:
        start, stop = span(step, path.slice_bytes, inputs[source])
        for position in range(start, stop):
            place = offset + position - start
            assert place < BUFFER and place not in buffer, "written twice"
            buffer[place] = (rank, source, position)
    return buffer


def wanted(kind: Kind, rank: int, size: int, root: int, longest: int) -> dict[tuple[int, int], list[Byte]]:
    inputs, outputs = lengths(kind, rank, size, root, longest)
    if kind is Kind.BROADCAST:
        origins = {} if rank == root else {0: (root, 0)}
    elif kind in (Kind.ALL_GATHER, Kind.GATHER):
        origins = {peer: (peer, 0) for peer in range(len(outputs))}
    elif kind is Kind.SCATTER:
        origins = {0: (root, rank)}
    else:
        origins = {peer: (peer, rank) for peer in range(size)}
    if kind is Kind.REDUCE_SCATTER:
        outputs = [inputs[rank]] * size
    return {
        (target, position): [(peer, index, position)]
        for target, (peer, index) in origins.items()
        for position in range(outputs[target])
    }


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, *(pytest.param(size, marks=FULL_ONLY) for size in (6, 7, 9))])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.title)
def test_every_byte_arrives_once_at_its_place(kind: Kind, size: int) -> None:
    roots = range(size) if kind in (Kind.BROADCAST, Kind.GATHER, Kind.SCATTER) else [-1]
    for root in roots:
        for longest in (0, 1, 200, BUFFER + 8):
            got = play(kind, size, root, longest)
            for rank in range(size):
                assert got[rank] == wanted(kind, rank, size, root, longest)


def test_kinds_that_need_no_route_have_none() -> None:
    with pytest.raises(ValueError, match="barrier has no route"):
        route(Kind.BARRIER, 0, 2, -1, BUFFER)


# ------------------------------------------------------------ sizes


def test_sizes_that_fit() -> None:
    assert mismatched_sizes(Kind.ALL_TO_ALL, [[1, 2, 1, 3], [3, 4, 2, 4]]) == {}
    assert mismatched_sizes(Kind.REDUCE_SCATTER, [[8, 4, 8, 0], [8, 4, 4, 0]]) == {}


def test_sizes_that_do_not_fit_name_the_ranks() -> None:
    assert mismatched_sizes(Kind.ALL_TO_ALL, [[1, 2, 1, 3], [3, 4, 9, 4]]) == {
        0: "sends 2 bytes to rank 1",
        1: "takes 9 bytes from rank 0",
    }
    assert mismatched_sizes(Kind.ALL_TO_ALL, [[1, 2, 7, 3], [3, 4, 2, 4]]) == {0: "sends 1 bytes to itself and takes 7"}
    problems = mismatched_sizes(Kind.REDUCE_SCATTER, [[8, 4, 8, 0], [4, 8, 8, 0]])
    assert problems == {0: "has chunks of 8, 4 bytes", 1: "has chunks of 4, 8 bytes"}


def test_counter_of_takes_is_symmetric() -> None:
    """Each rank that publishes for a peer is read by that peer, and no rank reads data that was not written."""
    for kind, size in product((Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER), SIZES):
        routes = [route(kind, rank, size, -1, BUFFER) for rank in range(size)]
        published = Counter((rank, offset) for rank in range(size) for _, offset in routes[rank].publishes)
        taken = Counter((peer, offset) for path in routes for peer, offset, _ in path.takes)
        assert published == taken
