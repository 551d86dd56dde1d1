"""The gradients that a context has collected on one worker.

A tensor that the engine returns may be shared with another leaf, with a message that is being sent, or with a hook that
kept it. So captured gradients are never changed in place; only sums that were made here are.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from rpcdist.rpc._devices.handler_streams import behind_default_streams, into_default_streams


class GradientTable:
    """Gradients by leaf. Any thread may call any method: gradients on GPUs are ready in its current streams.

    The keys are the `id`s of the leaves, which the table keeps alive: hashing a tensor is a slow Python function.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leaves: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._owned: set[int] = set()
        self._gpus: set[torch.device] = set()
        self._num_bytes: int | None = 0  # of all gradients; None if it has to be counted again

    def __len__(self) -> int:
        return len(self._gradients)

    def size_bytes(self) -> int:
        with self._lock:
            if self._num_bytes is None:
                # Most are dense: as `size_bytes`, without a call for each.
                sizes = [one.nbytes if not one.is_sparse else size_bytes(one) for one in self._gradients.values()]
                self._num_bytes = sum(sizes)
            return self._num_bytes

    def snapshot(self) -> dict[torch.Tensor, torch.Tensor]:
        with self._lock:
            if self._gpus:
                behind_default_streams(self._gpus)
            self._owned.clear()  # the caller may keep the gradients, so they must not change in place any more
            return {self._leaves[key]: gradient for key, gradient in self._gradients.items()}

    def of(self, leaves: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients of some leaves, in their order; None for those without."""
        with self._lock:
            if self._gpus:
                behind_default_streams(self._gpus)
            self._owned.clear()  # as in `snapshot`
            return [self._gradients.get(id(leaf)) for leaf in leaves]

    def scale(self, leaves: Iterable[torch.Tensor], factor: float) -> None:
        """Multiplies the gradients of some leaves, not in place."""
        with torch.no_grad(), self._lock:
            self._num_bytes = None
            if self._gpus:
                behind_default_streams(self._gpus)
            for leaf in leaves:
                gradient = self._gradients.get(id(leaf))
                if gradient is not None:
                    self._gradients[id(leaf)] = gradient * factor
                    self._owned.discard(id(leaf))
            if self._gpus:
                into_default_streams(self._gpus)

    def add(self, captured: Collection[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Adds the gradients that one run has computed."""
        addresses = [one._values().data_ptr() if one.is_sparse else one.data_ptr() for _, one in captured]
        shared = _repeated(addresses)
        gpus = {found.device for _, found in captured if found.is_cuda}
        with self._lock:
            self._num_bytes = None
            if gpus:
                behind_default_streams(gpus)
            for (leaf, found), address in zip(captured, addresses, strict=True):
                gradient = found.detach() if found.requires_grad else found  # a hook may give it a graph
                key = id(leaf)
                known = self._gradients.get(key)
                if known is not None:
                    self._gradients[key] = self._sum(key, known, gradient)
                    continue
                self._leaves[key] = leaf
                is_simple = not gradient.is_sparse and gradient.is_contiguous()
                if address in shared or not (is_simple or _is_dense(gradient)):
                    gradient = _copied(gradient)
                self._gradients[key] = gradient
            if gpus:
                into_default_streams(gpus)
                self._gpus |= gpus

    def _sum(self, key: int, known: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if key in self._owned and not known.is_sparse:
            return known.add_(gradient)
        if known.requires_grad:  # the holder of a `snapshot` may give it a graph
            known = known.detach()
        self._owned.add(key)
        return gradient + known if known.is_sparse else known + gradient  # torch adds no dense tensor to a sparse one


def size_bytes(gradient: torch.Tensor) -> int:
    """Size in memory of a dense or sparse gradient."""
    if gradient.is_sparse:
        return gradient._values().nbytes + gradient._indices().nbytes
    return gradient.numel() * gradient.element_size()


def _repeated(addresses: Sequence[int]) -> Collection[int]:
    """The addresses that occur more than once."""
    if len(set(addresses)) == len(addresses):
        return ()
    return {address for address, count in Counter(addresses).items() if count > 1}


def _is_dense(gradient: torch.Tensor) -> bool:
    """Whether every element has its own memory, unlike in an expanded gradient."""
    if gradient.is_sparse:
        return gradient._values().is_contiguous() and gradient._indices().is_contiguous()
    return bool(torch.ops.aten.is_non_overlapping_and_dense(gradient))


def _copied(gradient: torch.Tensor) -> torch.Tensor:
    if not gradient.is_sparse:
        return gradient.clone(memory_format=torch.contiguous_format)
    indices = gradient._indices().clone(memory_format=torch.contiguous_format)
    values = gradient._values().clone(memory_format=torch.contiguous_format)
    checks: dict[str, Any] = {"check_invariants": False, "is_coalesced": gradient.is_coalesced()}
    return torch.sparse_coo_tensor(indices, values, gradient.shape, device=values.device, **checks)
