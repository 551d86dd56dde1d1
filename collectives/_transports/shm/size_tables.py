"""The tables in the segment, with which ranks compare the sizes of chunks that may differ.

Kinds whose chunks may differ in size publish them, as a row for each rank: the bytes of its `size` inputs, then those
of its outputs, and zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rpcdist.collectives._operations.operation import Kind, Operation
from rpcdist.collectives._transports.shm.segment_layout import Layout
from rpcdist.collectives._transports.shm.signals import Signals
from rpcdist.collectives._transports.transport_base import TransportMismatch

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


class SizeTables:
    """One rank's view of all tables. The rules of [Note: steps] in `signals` hold for them as well."""

    def __init__(self, rank: int, layout: Layout, signals: Signals) -> None:
        self._rank = rank
        self._signals = signals
        self._width: Final = 2 * layout.size
        ranks = range(layout.size)
        self._rows = [[signals.words(layout.table(half, peer), self._width) for peer in ranks] for half in (0, 1)]

    def close(self) -> None:
        """Releases the memory."""
        for rows in self._rows:
            for row in rows:
                row.release()

    def publish(self, half: int, operation: Operation) -> None:
        """Writes the sizes of this rank's chunks, before the ranks synchronise in the first step of an operation."""
        row = self._rows[half][self._rank]
        sizes = [tensor.nbytes for tensor in (*operation.inputs, *operation.outputs)]
        for index in range(self._width):
            row[index] = sizes[index] if index < len(sizes) else 0

    def compare(self, half: int, operation: Operation) -> int:
        """Returns the size in bytes of the longest chunk of all ranks, after they have synchronised in that step.

        Raises:
            TransportMismatch: the sizes differ; on all ranks.
        """
        rows = [row.tolist() for row in self._rows[half]]
        problems = mismatched_sizes(operation.kind, rows)
        if problems:
            views = self._signals.views(list(problems))
            raise TransportMismatch({rank: f"{views[rank]}, which {text}" for rank, text in problems.items()})
        return longest(rows)
