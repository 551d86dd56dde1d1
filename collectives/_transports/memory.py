"""Memory by its address: as bytes that a socket reads and writes, and copied from one place to another."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

_QUICK_BYTES: Final = 64 << 10


def memory_at(address: int, size_bytes: int) -> memoryview:
    """The bytes at an address, writable, without copying; valid as long as their owner lives."""
    if not size_bytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense tensor, writable; valid as long as the tensor is."""
    return memory_at(tensor.data_ptr(), tensor.nbytes)


def _memmove(library: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    function = library.memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_void_p
    return function


_copy_quickly = _memmove(ctypes.PyDLL(None))  # keeps the interpreter's lock: getting it back may take 5 ms
_copy_in_background = _memmove(ctypes.CDLL(None))


def copy_bytes(target: int, source: int | bytes, num_bytes: int) -> None:
    """Copies to an address from another or from `bytes`. Long copies let other Python threads run."""
    if num_bytes <= _QUICK_BYTES:
        _copy_quickly(target, source, num_bytes)
    else:
        _copy_in_background(target, source, num_bytes)
