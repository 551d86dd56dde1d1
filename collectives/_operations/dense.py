"""Makes tensors dense and contiguous for an operation, and copies results back afterwards.

[Note: no copies] A contiguous tensor is used as it is. Only a tensor that is not contiguous, is lazily conjugated or
negated, or is on a device that the backend does not reach goes through a temporary tensor.

The module also gives access to the memory of dense tensors: as bytes for sockets, and for copies.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from rpcdist.collectives._operations.operation import DTYPES
from rpcdist.errors import ConfigError
from rpcdist.transport.memory_copies import declare

CARRIED: Final = frozenset(DTYPES)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its memory, from its first element on, consists of its values in order.

    With at most one element, torch takes any stride for contiguous; but only with 1 can it be viewed as bytes.
    """
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested  # such a tensor has no strides
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and (tensor.dim() == 0 or tensor.stride(-1) == 1)
        and _has_memory(tensor)
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    """Returns False for subclasses that wrap other tensors, and for functionalized or batched tensors."""
    if isinstance(tensor, FakeTensor):  # the check below would make it warn
        return False
    try:
        return tensor.data_ptr() != 0 or not tensor.numel()
    except RuntimeError:
        return False


def is_ready(tensor: torch.Tensor) -> bool:
    """Whether every backend takes the tensor as it is, so that `Copies` would return it unchanged."""
    return tensor.is_cpu and is_dense(tensor) and not tensor.requires_grad and tensor.dtype in CARRIED


class Copies:
    """Collects the temporary tensors of one operation.

    Args:
        staged: whether tensors of other devices than the CPU go through CPU memory.
        moves_only: whether the operation only moves bytes, so that it accepts dtypes without arithmetic.
    """

    __slots__ = ("_back", "_moves_only", "_staged")

    def __init__(self, staged: bool = False, moves_only: bool = False) -> None:
        self._staged = staged
        self._moves_only = moves_only
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a dense tensor of the same values, which the operation only reads."""
        return self._plain(tensor if self._usable(tensor) else self._copy(tensor))

    def write(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a dense tensor to write to; `finish` copies from it if it is not the tensor itself."""
        if self._usable(tensor):
            return self._plain(tensor)
        _check_layout(tensor)
        temporary = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if self._staged else tensor.device)
        self._back.append((tensor, temporary))
        return self._plain(temporary)

    def update(self, tensor: torch.Tensor, copy_back: bool = True) -> torch.Tensor:
        """Returns a dense tensor of the same values for an operation in place.

        Args:
            tensor: the caller's tensor.
            copy_back: whether this rank gets the result, so that `finish` must copy it back.
        """
        if self._usable(tensor):
            return self._plain(tensor)
        temporary = self._copy(tensor)
        if copy_back:
            self._back.append((tensor, temporary))
        return self._plain(temporary)

    def _usable(self, tensor: torch.Tensor) -> bool:
        return is_dense(tensor) and not (self._staged and tensor.device.type != "cpu")

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        _check_layout(tensor)
        with torch.no_grad():
            source = tensor.detach().resolve_conj().resolve_neg()
            moved = source.cpu() if self._staged else source
            copy = moved.clone(memory_format=torch.contiguous_format) if moved is source else moved.contiguous()
            if not _has_memory(copy):
                copy = torch.empty(copy.shape, dtype=copy.dtype, device=copy.device).copy_(copy)
            return copy

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.dtype not in CARRIED:
            if not self._moves_only or tensor.is_quantized:
                raise ConfigError(f"Invalid scalar type: groups do not carry tensors of {tensor.dtype}")
            tensor = tensor.view(-1).view(torch.uint8)
        return tensor

    def finish(self) -> Callable[[], None] | None:
        """Returns the function that copies results back, for `GroupBackend.submit`; None if no copy is needed."""
        if not self._back:
            return None
        pairs = self._back

        def copy_back() -> None:
            # Inference mode allows writes to leaves that require grad and to inference tensors.
            with torch.inference_mode():
                for target, temporary in pairs:
                    _copy_into(target, temporary)
                    if self._staged and target.is_cuda:  # the stream of another thread may read it
                        torch.cuda.current_stream(target.device).synchronize()

        return copy_back


def _check_layout(tensor: torch.Tensor) -> None:
    if tensor.is_nested:
        raise ConfigError("groups carry dense tensors, but this one is nested; send the parts of unbind() one by one")
    if tensor.layout is not torch.strided:
        raise ConfigError(
            f"groups carry dense tensors, but this one is {tensor.layout}; send its indices and values one by one, "
            "or call to_dense() first"
        )
    if isinstance(tensor, FakeTensor):
        raise ConfigError("groups carry values, but a FakeTensor has none; make the tensor outside FakeTensorMode")
    if tensor.is_quantized:
        raise ConfigError(f"Invalid scalar type: groups do not carry tensors of {tensor.dtype}; send its int_repr()")


def _copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies; the target may be an expanded tensor, of which several elements share memory."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def same_kind(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Makes the dtypes equal if complex tensors are mixed with real ones, by viewing complex ones as real."""
    first = tensors[0].dtype if tensors else None
    if all(tensor.dtype is first for tensor in tensors):
        return tensors
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


def separate(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], mine: tuple[int, int] | None = None
) -> tuple[torch.Tensor, ...]:
    """Copies inputs that share memory with an output, since outputs are written while inputs are still read.

    Args:
        mine: the positions of an input and an output that may share memory.

    Raises:
        ConfigError: outputs share memory with each other, although data in them may be passed on to other ranks.
    """
    spans = sorted((out.data_ptr(), out.data_ptr() + out.nbytes, place) for place, out in enumerate(outputs))
    spans = [span for span in spans if span[0] < span[1]]
    for (_, end, first), (begin, _, second) in pairwise(spans):
        if begin < end:
            one, other = sorted((first, second))
            raise ConfigError(
                f"output tensors {one} and {other} share memory; use separate memory for each rank's tensor "
                "(not [tensor] * world_size)"
            )
    return tuple(
        tensor.clone() if _overlaps(tensor, spans, mine[1] if mine and mine[0] == place else None) else tensor
        for place, tensor in enumerate(inputs)
    )


def _overlaps(tensor: torch.Tensor, spans: list[tuple[int, int, int]], itself: int | None) -> bool:
    begin = tensor.data_ptr()
    end = begin + tensor.nbytes
    if begin == end:
        return False
    at = max(0, bisect_left(spans, (begin, 0, 0)) - 1)
    for other_begin, other_end, place in spans[at:]:
        if other_begin >= end:
            return False
        if other_end > begin and not (place == itself and (other_begin, other_end) == (begin, end)):
            return True
    return False


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns one flat tensor over the memory of all tensors if they are adjacent in order, otherwise None."""
    first = tensors[0]
    place = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != place or not tensor.numel():
            return None
        place += tensor.nbytes
    if place - first.untyped_storage().data_ptr() > first.untyped_storage().nbytes():
        return None  # adjacent by chance, in different storages
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


_QUICK_BYTES: Final = 64 << 10


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a dense tensor, writable and not copied; valid while the tensor lives."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


_copy_in_background: Final = declare("memmove", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy_quickly = ctypes.PyDLL(None).memmove  # keeps the interpreter's lock, since taking it again may last 5 ms
_copy_quickly.restype, _copy_quickly.argtypes = _copy_in_background.restype, _copy_in_background.argtypes


def copy_bytes(target: int, source: int | bytes, num_bytes: int) -> None:
    """Copies to an address from an address or `bytes`. Long copies let other Python threads run."""
    if num_bytes <= _QUICK_BYTES:
        _copy_quickly(target, source, num_bytes)
    else:
        _copy_in_background(target, source, num_bytes)
