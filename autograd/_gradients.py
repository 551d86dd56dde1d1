"""The gradients that a context has collected on one worker.

A tensor that the engine returns may be shared with another leaf, with a message that is being sent, or with a hook that
kept it. So captured gradients are never changed in place; only sums that were made here are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

__all__ = ["GradientTable", "size_bytes"]


class GradientTable:
    """Gradients by leaf. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._owned: set[torch.Tensor] = set()

    def __len__(self) -> int:
        return len(self._gradients)

    def size_bytes(self) -> int:
        with self._lock:
            return sum(map(size_bytes, self._gradients.values()))

    def snapshot(self) -> dict[torch.Tensor, torch.Tensor]:
        with self._lock:
            self._owned.clear()  # the caller may keep them, so they are not changed in place any more
            return dict(self._gradients)

    def scale(self, leaves: Iterable[torch.Tensor], factor: float) -> None:
        """Multiplies the gradients of some leaves, not in place."""
        with torch.no_grad(), self._lock:
            for leaf in leaves:
                gradient = self._gradients.get(leaf)
                if gradient is not None:
                    self._gradients[leaf] = gradient * factor
                    self._owned.discard(leaf)

    def add(self, captured: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Adds the gradients that one call of the engine has returned."""
        pairs = list(captured)
        users: dict[int, int] = {}
        for _, gradient in pairs:
            address = _address(gradient)
            users[address] = users.get(address, 0) + 1
        with torch.no_grad(), self._lock:
            for leaf, gradient in pairs:
                self._add(leaf, gradient, is_shared=users[_address(gradient)] > 1)

    def _add(self, leaf: torch.Tensor, gradient: torch.Tensor, is_shared: bool) -> None:
        known = self._gradients.get(leaf)
        if known is None:
            if is_shared or not _is_dense(gradient):
                gradient = _copied(gradient)
            self._gradients[leaf] = gradient
        elif leaf in self._owned and not known.is_sparse:
            known.add_(gradient)
        else:
            # torch adds a sparse tensor to a dense one, but not the other way round.
            self._gradients[leaf] = gradient + known if known.is_sparse else known + gradient
            self._owned.add(leaf)


def size_bytes(gradient: torch.Tensor) -> int:
    """Size in memory of a dense or sparse gradient."""
    if gradient.is_sparse:
        return gradient._values().nbytes + gradient._indices().nbytes
    return gradient.numel() * gradient.element_size()


def _address(gradient: torch.Tensor) -> int:
    return gradient._values().data_ptr() if gradient.is_sparse else gradient.data_ptr()


def _is_dense(gradient: torch.Tensor) -> bool:
    """Whether every element has memory of its own, unlike in an expanded gradient."""
    if gradient.is_sparse:
        return gradient._values().is_contiguous() and gradient._indices().is_contiguous()
    return gradient.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(gradient))


def _copied(gradient: torch.Tensor) -> torch.Tensor:
    if not gradient.is_sparse:
        return gradient.clone(memory_format=torch.contiguous_format)
    indices = gradient._indices().clone(memory_format=torch.contiguous_format)
    values = gradient._values().clone(memory_format=torch.contiguous_format)
    return torch.sparse_coo_tensor(
        indices, values, gradient.shape, check_invariants=False, is_coalesced=gradient.is_coalesced()
    )
