"""The gradients that a context has collected on one worker.

A tensor that the engine returns may be shared with another leaf, with a message that is being sent, or with a hook that
kept it. So captured gradients are never changed in place; only sums that were made here are.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import torch

__all__ = ["GradientTable", "size_bytes"]


class GradientTable:
    """Gradients by leaf. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._owned: set[torch.Tensor] = set()
        self._num_bytes: int | None = 0  # of all gradients; None if it has to be counted again

    def __len__(self) -> int:
        return len(self._gradients)

    def size_bytes(self) -> int:
        with self._lock:
            if self._num_bytes is None:
                self._num_bytes = sum(map(size_bytes, self._gradients.values()))
            return self._num_bytes

    def snapshot(self) -> dict[torch.Tensor, torch.Tensor]:
        with self._lock:
            self._owned.clear()  # the caller may keep them, so they are not changed in place any more
            return dict(self._gradients)

    def scale(self, leaves: Iterable[torch.Tensor], factor: float) -> None:
        """Multiplies the gradients of some leaves, not in place."""
        with torch.no_grad(), self._lock:
            self._num_bytes = None
            for leaf in leaves:
                gradient = self._gradients.get(leaf)
                if gradient is not None:
                    self._gradients[leaf] = gradient * factor
                    self._owned.discard(leaf)

    def add(self, captured: Collection[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Adds the gradients that one run has found."""
        captured = [(leaf, _without_graph(gradient)) for leaf, gradient in captured]
        addresses = [_address(gradient) for _, gradient in captured]
        shared = _repeated(addresses)
        with self._lock:
            self._num_bytes = None
            for (leaf, gradient), address in zip(captured, addresses, strict=True):
                num_before = len(self._gradients)
                known = self._gradients.setdefault(leaf, gradient)  # one look-up: a tensor's hash is a Python function
                if len(self._gradients) == num_before:
                    self._gradients[leaf] = self._sum(leaf, known, gradient)
                elif address in shared or not _is_dense(gradient):
                    self._gradients[leaf] = _copied(gradient)

    def _sum(self, leaf: torch.Tensor, known: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if leaf in self._owned and not known.is_sparse:
            return known.add_(gradient)
        known = _without_graph(known)
        self._owned.add(leaf)
        return gradient + known if known.is_sparse else known + gradient  # torch adds no dense tensor to a sparse one


def size_bytes(gradient: torch.Tensor) -> int:
    """Size in memory of a dense or sparse gradient."""
    if gradient.is_sparse:
        return gradient._values().nbytes + gradient._indices().nbytes
    return gradient.numel() * gradient.element_size()


def _without_graph(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as it is summed up here, without the graph that a hook, or whoever has a `snapshot`, may give it."""
    return gradient.detach() if gradient.requires_grad else gradient


def _address(gradient: torch.Tensor) -> int:
    return gradient._values().data_ptr() if gradient.is_sparse else gradient.data_ptr()


def _repeated(addresses: Sequence[int]) -> Collection[int]:
    """Those that occur more than once."""
    if len(set(addresses)) == len(addresses):
        return ()
    return {address for address, count in Counter(addresses).items() if count > 1}


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
