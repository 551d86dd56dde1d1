"""Compares the sizes that the ranks expect their chunks to have. Pure.

Kinds whose chunks may differ in size publish them, as a row for each rank: the bytes of its `size` inputs, then those
of its outputs, and zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

from rpcdist.collectives._operations.operation import Kind

Row = Sequence[int]


def longest(rows: Sequence[Row]) -> int:
    """The size of the longest chunk of all ranks."""
    return max(map(max, rows))


def mismatched_sizes(kind: Kind, rows: Sequence[Row]) -> dict[int, str]:
    """Describes for each rank concerned which sizes differ; empty when all agree. The same on all ranks."""
    return _all_to_all(rows) if kind is Kind.ALL_TO_ALL else _reduce_scatter(rows)


def _all_to_all(rows: Sequence[Row]) -> dict[int, str]:
    size = len(rows)
    for sender in range(size):
        for receiver in range(size):
            sent, taken = rows[sender][receiver], rows[receiver][size + sender]
            if sent != taken and sender == receiver:
                return {sender: f"sends {sent} bytes to itself and takes {taken}"}
            if sent != taken:
                return {
                    sender: f"sends {sent} bytes to rank {receiver}",
                    receiver: f"takes {taken} bytes from rank {sender}",
                }
    return {}


def _reduce_scatter(rows: Sequence[Row]) -> dict[int, str]:
    size = len(rows)
    chunks = [list(row[:size]) for row in rows]
    if all(sizes == chunks[0] for sizes in chunks):
        return {}
    return {rank: f"has chunks of {', '.join(map(str, sizes))} bytes" for rank, sizes in enumerate(chunks)}
