"""The tables in the segment, with which ranks compare the sizes of chunks that may differ."""

from __future__ import annotations

from typing import Final

from rpcdist.collectives._operations.operation import Operation
from rpcdist.collectives._transports.base import TransportMismatch
from rpcdist.collectives._transports.shm import chunk_sizes
from rpcdist.collectives._transports.shm.segment_layout import Layout
from rpcdist.collectives._transports.shm.signals import Signals

__all__ = ["Tables"]


class Tables:
    """One rank's view of all tables. They follow the rules of [Note: steps] in `_signals`, like everything there.

    Args:
        rank: of this process.
        layout: of the segment.
        signals: of this group.
    """

    def __init__(self, rank: int, layout: Layout, signals: Signals) -> None:
        self._rank = rank
        self._signals = signals
        self._width: Final = 2 * layout.size
        ranks = range(layout.size)
        self._rows = [[signals.words(layout.table(half, peer), self._width) for peer in ranks] for half in (0, 1)]

    def close(self) -> None:
        """Lets go of the memory."""
        for rows in self._rows:
            for row in rows:
                row.release()

    def publish(self, half: int, operation: Operation) -> None:
        """Before the first meeting of an operation: says the sizes of this rank's chunks."""
        row = self._rows[half][self._rank]
        sizes = [tensor.nbytes for tensor in (*operation.inputs, *operation.outputs)]
        for index in range(self._width):
            row[index] = sizes[index] if index < len(sizes) else 0

    def agree(self, half: int, operation: Operation) -> int:
        """After that meeting: the size in bytes of the longest chunk of all ranks.

        Raises:
            TransportMismatch: the sizes do not fit together; on all ranks.
        """
        rows = [row.tolist() for row in self._rows[half]]
        problems = chunk_sizes.misfits(operation.kind, rows)
        if problems:
            views = self._signals.views(list(problems))
            raise TransportMismatch({rank: f"{views[rank]}, which {text}" for rank, text in problems.items()})
        return chunk_sizes.longest(rows)
