"""Finds NaN and infinity in gradients, and names ranks and parameters: a NaN loss on one rank spoils all models.

[Note: probes]
    Examining every element costs a pass over all gradients. A NaN loss makes nearly all gradients NaN, so by default
    only the first elements of each bucket are examined, before and after the reduction. All ranks get the same reduced
    bits, so if a probe of the result is not finite, all ranks know it. They then exchange the names of the parameters
    whose gradients were not finite before the reduction. A rank looks for these names only if its own probe was not
    finite.

    To examine values on a GPU, the host must wait for the GPU. After a reduction the host has waited anyway. Before a
    reduction the rest of the backward pass is not enqueued yet, so that probe stays on the GPU until a result is not
    finite. By then the gradients no longer exist, so the names are all names of the bucket.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

import torch

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup
from rpcdist.parallel._ddp._ddp_errors import NonFiniteGradients, list_names

CheckFinite = Literal["probes", "all", "never"]
PROBE_ELEMENTS: Final = 1024


class FiniteCheck:
    """Examines the gradients of one iteration at a time. The reducer's lock guards the object.

    Args:
        mode: "probes", "all" (every element), or "never".
        results_are_equal: whether all ranks get the same reduced bits.
    """

    def __init__(self, group: ProcessGroup, mode: CheckFinite, results_are_equal: bool) -> None:
        self._group = group
        self._mode = mode
        self._mine: list[str] = []
        self._on_gpu: list[tuple[torch.Tensor, list[str]]] = []  # whether probes are finite, and their parameters
        self._found = False
        self._num_found = 0
        self._results_are_equal = results_are_equal

    def before(self, runs: Sequence[torch.Tensor], named: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        """Examines this rank's contribution to a bucket; `named` returns its gradients by name."""
        if self._mode == "never":
            return
        if runs[0].is_cuda:
            examined = runs if self._mode == "all" else [run[:PROBE_ELEMENTS] for run in runs]
            flags = [torch.isfinite(part).all() for part in examined]
            self._on_gpu.append((torch.stack(flags).all(), [name for name, _ in named()]))
        elif not self._are_fine(runs):
            names = (name for name, gradient in named() if not bool(torch.isfinite(_values(gradient)).all()))
            self._mine += names

    def after(self, runs: Sequence[torch.Tensor]) -> None:
        """Examines a reduced bucket."""
        if self._mode != "never" and not self._found:
            self._found = not self._are_fine(runs)

    def _are_fine(self, runs: Sequence[torch.Tensor]) -> bool:
        if self._mode == "all":
            return all(map(self._is_fine, runs))
        probes = [run[:PROBE_ELEMENTS] for run in runs]  # all at once: reading from a GPU costs more than a copy
        return self._is_fine(probes[0] if len(probes) == 1 else torch.cat(probes))

    @staticmethod
    def _is_fine(probe: torch.Tensor) -> bool:
        if not probe.is_floating_point():
            return bool(torch.isfinite(probe).all())
        # The sum takes one pass, and is not finite if an element is not. It may also overflow, hence the second check.
        return math.isfinite(probe.sum().item()) or bool(torch.isfinite(probe).all())

    def conclude(self, iteration: int) -> None:
        """Warns on every rank if a reduced gradient was not finite, the 1st, 2nd, 4th, 8th ... time.

        All ranks have the same reduced bits, so all of them communicate here or none does.
        """
        found, mine, on_gpu = self._found, self._mine, self._on_gpu
        self._found, self._mine, self._on_gpu = False, [], []
        if not found:
            return
        for is_fine, names in on_gpu:
            if not is_fine.item():
                mine += names
        self._num_found += 1
        if self._num_found & (self._num_found - 1):
            return
        everyone: list[Any] = [[] for _ in range(self._group.size())]
        if self._results_are_equal:
            collectives.all_gather_object(everyone, mine, group=self._group)
        else:
            everyone[self._group.rank()] = mine
        culprits = "; ".join(
            f"rank {self._group.world_rank(rank)} contributed NaN or infinity to {list_names(names)}"
            for rank, names in enumerate(everyone)
            if names
        )
        warnings.warn(
            f"the gradients of iteration {iteration} are not finite after the reduction, so all ranks are affected: "
            f"{culprits or 'each contribution was finite, so their sum has overflowed'}. Check the loss on that rank.",
            NonFiniteGradients,
            stacklevel=2,
        )


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
