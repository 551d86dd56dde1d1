"""NCCL and the GPU behind it, as far as the `nccl` backend uses them: CuPy's NCCL communicator, and torch's streams.

This is the only module that imports CuPy, and it does so when a group is made. `CudaRuntime` is
the seam at which tests put a stand-in that needs no GPU; the methods of `Communicator` are those of `cupy.cuda.nccl`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol

import torch

from rpcdist.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType


OLDEST_CUPY: Final = 14
"""CuPy 14.0.0 has `commSplit`, and unique ids that are `bytes`; 13.6.0, the newest before it, has neither."""

_ADVICE: Final = (
    "install it with `pip install 'rpcdist[cuda]' nvidia-nccl-cu12` (for CUDA 13: cupy-cuda13x, nvidia-nccl-cu13) on "
    'a machine with an NVIDIA GPU, or choose the backend "tcp" for CPU tensors'
)


class Communicator(Protocol):
    """CuPy's `NcclCommunicator`: memory is given by addresses, and `count` counts elements of the datatype."""

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None: ...

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None: ...

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None: ...

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None: ...

    def reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None: ...

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None: ...

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None: ...

    def commSplit(self, color: int, key: int) -> Communicator | None: ...

    def check_async_error(self) -> None: ...

    def abort(self) -> None: ...

    def destroy(self) -> None: ...


class CudaRuntime:
    """One device and its NCCL. Tests put a stand-in for it.

    Attributes:
        device: that the tensors of a group live on.
        version: of NCCL, e.g. 22907 for 2.29.7.
        errors: what calls raise when NCCL or CUDA fail.

    Raises (constructor):
        ConfigError: CuPy, NCCL or a GPU is missing; says what to install.
    """

    def __init__(self, device: torch.device) -> None:
        self._nccl = _load_nccl()
        self.device = device
        self.version = int(self._nccl.get_version())
        # KeyError: CuPy does not know the names of NCCL's newest errors, and fails in looking them up.
        self.errors: tuple[type[Exception], ...] = (self._nccl.NcclError, torch.AcceleratorError, KeyError)

    def unique_id(self) -> bytes:
        """A new name for a group, under which its ranks find one another."""
        return bytes(self._nccl.get_unique_id())

    def connect(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        """Blocks until all ranks have come; other threads run meanwhile. Nothing can end it early."""
        with torch.cuda.device(self.device):  # NCCL takes the thread's current device
            communicator: Communicator = self._nccl.NcclCommunicator(size, unique_id, rank)
        return communicator

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """The calls in this block start together, at its end."""
        with torch.cuda.device(self.device):
            self._nccl.groupStart()
            try:
                yield
            finally:
                self._nccl.groupEnd()

    @contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Work of torch in this block goes to the stream."""
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def is_capturing(self) -> bool:
        """Whether the current stream records a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()


@cache
def nccl_is_usable() -> bool:
    """Whether groups of the backend can be made here; imports CuPy where there is a GPU for it."""
    try:
        _load_nccl()
    except ConfigError:
        return False
    return True


def _load_nccl() -> ModuleType:
    if not torch.cuda.is_available():
        raise ConfigError(f'the backend "nccl" needs a GPU that torch can use, and there is none here; {_ADVICE}')
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns when it finds no NCCL: the error below says that
            cupy = import_module("cupy")
            nccl = import_module("cupy.cuda.nccl")
    except ImportError as exc:
        raise ConfigError(f'the backend "nccl" needs CuPy with NCCL ({exc}); {_ADVICE}') from exc
    if int(str(cupy.__version__).split(".")[0]) < OLDEST_CUPY:
        raise ConfigError(f'the backend "nccl" needs CuPy {OLDEST_CUPY} or newer, not {cupy.__version__}; {_ADVICE}')
    if not getattr(nccl, "available", False):
        raise ConfigError(f'the backend "nccl" found CuPy {cupy.__version__} but no NCCL library; {_ADVICE}')
    return nccl
