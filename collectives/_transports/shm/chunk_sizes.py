"""Whether the sizes that ranks gave for their chunks fit together. Pure.

Kinds whose chunks may differ in size publish them, as a row for each rank: the bytes of its `size` inputs, then those
of its outputs, and zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

from rpcdist.collectives._operations.operation import Kind

__all__ = ["longest", "misfits"]

Row = Sequence[int]


def longest(rows: Sequence[Row]) -> int:
    """Of all chunks of all ranks."""
    return max(map(max, rows))


def misfits(kind: Kind, rows: Sequence[Row]) -> dict[int, str]:
    """What does not fit, in words, by rank; empty when all is well. All ranks get the same from the same rows."""
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
