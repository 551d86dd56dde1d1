"""Memory that a message carries beside it."""

from __future__ import annotations

from rpcdist.transport.memory_copies import copy_view


class OutgoingBuffer:
    """Bytes to be sent. They must not change until they are sent; the object keeps them alive.

    Attributes:
        size: size in bytes.
    """

    __slots__ = ("_view", "size")

    def __init__(self, view: memoryview) -> None:
        self.size = view.nbytes
        self._view = view

    @property
    def view(self) -> memoryview:
        """C-contiguous, one byte per item. It is asked for with every chunk, which is read when it is written.

        Raises:
            TransportError: the memory is not there any more; the session ends.
        """
        return self._view

    def copy_to(self, address: int) -> None:
        """Copies the bytes to memory that has room for them, in turns with other copies. Raises what `view` does."""
        copy_view(address, self._view)
