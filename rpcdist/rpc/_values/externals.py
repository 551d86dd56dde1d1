"""What a value may hold that belongs to a layer above: remote references."""

from __future__ import annotations

from typing import Protocol


class Externals(Protocol):
    """Sends and receives the objects that are more than data. One instance serves one value in one direction.

    Called on the thread that encodes or decodes. While encoding, `externalize` is called only after everything else of
    the value has been encoded, so that a value which cannot be sent has created no share of a remote reference.
    """

    def is_external(self, obj: object) -> bool:
        """Whether `obj` is one of them. Must be cheap: asked for every object of a type unknown to the codec."""
        ...

    def externalize(self, obj: object) -> int:
        """Appends `obj` to `Value.rrefs` and returns its index there: 0, then 1, and so on."""
        ...

    def internalize(self, index: int) -> object:
        """The object of entry `index` of `Value.rrefs`; may be called more than once for an index."""
        ...
