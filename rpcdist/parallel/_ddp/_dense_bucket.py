"""Buckets of dense gradients: how gradients are packed for their reduction, and delivered after it.

[Note: in place]
    A flat buffer costs memory and two copies of every gradient. Gradients of at least `OWN_BYTES` use the network well
    alone, so they are reduced in place, each in an operation of its own; only the smaller gradients of a bucket are
    packed into the buffer. The choice depends on the sizes of the parameters only, so all ranks agree. A gradient is
    copied if its memory is shared, or if its layout differs from that of its parameter. With `gradient_as_bucket_view`
    the packed gradients become views of the buffer, and are not copied while they are kept. Comm hooks need all
    gradients of a bucket in one buffer (`flat`), and on a GPU they are there too: it copies fast, and an operation of
    NCCL costs more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import nn

from rpcdist.parallel._ddp._gradient_layout import as_run, is_private, view_like
from rpcdist.parallel._ddp._parameters import Named

OWN_BYTES: Final = 1 << 19


class BucketEntry:
    """A parameter in a bucket.

    Attributes:
        index: of the parameter in the reducer.
        name, parameter: as in the module.
    """

    __slots__ = ("index", "name", "parameter")

    def __init__(self, index: int, named: Named) -> None:
        self.index = index
        self.name = named.name
        self.parameter: nn.Parameter = named.tensor

    def __repr__(self) -> str:
        return f"<{self.name} {tuple(self.parameter.shape)}>"


class DenseBucket:
    """Dense gradients of one dtype and device. The reducer's lock guards it.

    Args:
        number: position in the order of communication.
        members: the parameters, in the order of the bucket's buffer.
        flat: whether all gradients are packed, as those on a GPU are always; see [Note: in place].

    Attributes:
        indices: those of the members.
        num_missing: how many members have no gradient yet in this iteration.
        runs: the flat tensors that are reduced; empty between `scatter` and `gather`.
    """

    def __init__(self, number: int, members: Sequence[BucketEntry], flat: bool) -> None:
        self.number = number
        self.members = list(members)
        self.flat = flat = flat or members[0].parameter.is_cuda
        self.indices = frozenset(member.index for member in members)
        self.num_missing = 0
        self.runs: list[torch.Tensor] = []
        self._packed = [member for member in members if flat or member.parameter.nbytes < OWN_BYTES]
        self._own = [member for member in members if not flat and member.parameter.nbytes >= OWN_BYTES]
        self._buffer: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._reduced: list[torch.Tensor] = []  # the runs of the other members, as gradients

    def __repr__(self) -> str:
        return f"<bucket {self.number}: {len(self.members)} gradients, {self.num_bytes} bytes>"

    @property
    def num_bytes(self) -> int:
        return sum(member.parameter.nbytes for member in self.members)

    @property
    def buffer(self) -> torch.Tensor:
        """The flat tensor of the packed gradients; allocated at the first use."""
        if self._buffer is None:
            parameter = self._packed[0].parameter
            numel = sum(member.parameter.numel() for member in self._packed)
            self.use_buffer(torch.zeros(numel, dtype=parameter.dtype, device=parameter.device))
        assert self._buffer is not None
        return self._buffer

    def use_buffer(self, buffer: torch.Tensor) -> None:
        """Sets the flat tensor into which gradients are packed."""
        self._buffer = buffer
        counts = [member.parameter.numel() for member in self._packed]
        parts = zip(buffer.split(counts), self._packed, strict=True)
        self._views = [view_like(part, member.parameter) for part, member in parts]

    @property
    def views(self) -> list[torch.Tensor]:
        """Views of the packed gradients in the shapes of their parameters."""
        if self._buffer is None:
            _ = self.buffer
        return self._views

    @property
    def packed(self) -> list[BucketEntry]:
        """The members whose gradients are packed into the buffer."""
        return self._packed

    # ------------------------------------------------------------ from gradients to runs

    def gather(self, gradient_of: Callable[[BucketEntry], torch.Tensor | None], in_place: bool) -> list[torch.Tensor]:
        """Makes the flat tensors that are reduced.

        Args:
            gradient_of: returns a member's gradient, or None, which counts as zero.
            in_place: whether the reduction may overwrite gradients.
        """
        with torch.no_grad():
            if self._packed:
                self._pack([gradient_of(member) for member in self._packed])
            self._reduced.clear()
            self.runs = [self._own_run(member, gradient_of(member), in_place) for member in self._own]
            if self._packed:
                self.runs.append(self.buffer)
        return self.runs

    def _pack(self, gradients: Sequence[torch.Tensor | None]) -> None:
        targets, sources = [], []
        for view, gradient in zip(self.views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
                targets.append(view)
                sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _own_run(self, member: BucketEntry, gradient: torch.Tensor | None, in_place: bool) -> torch.Tensor:
        parameter = member.parameter
        if gradient is None:
            run = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
            self._reduced.append(view_like(run, parameter))
            return run
        fits = in_place and not gradient.is_sparse and gradient.dtype is parameter.dtype and is_private(gradient)
        if fits and (own := as_run(gradient.detach(), parameter)) is not None:
            self._reduced.append(gradient)
            return own
        run = torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        view = view_like(run, parameter)
        view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        self._reduced.append(view)
        return run

    # ------------------------------------------------------------ from runs to gradients

    def scatter(self, deliver: Callable[[list[BucketEntry], list[torch.Tensor], bool], None]) -> None:
        """Delivers the reduced gradients, and drops the runs.

        Args:
            deliver: gets members, their gradients, and whether these stay valid after the next iteration begins.
        """
        reduced, self._reduced, self.runs = self._reduced, [], []
        if self._own:
            deliver(self._own, reduced, True)
        if self._packed:
            deliver(self._packed, self._views, False)
