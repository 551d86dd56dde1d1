"""NCCL and its GPU, through CuPy and torch's streams; and operations as calls of an NCCL communicator.

Only this module imports CuPy, when a group is made. Tests replace `CudaRuntime` by a stand-in that needs no GPU; the
methods of `Communicator` are those of `cupy.cuda.nccl`.

The calls only enqueue and never wait for the device. Tensors are moved as bytes. NCCL reduces them if it supports the
dtype and the operation, or another dtype that gives the same bits (complex sums as sums of reals, bool as bytes).
Otherwise (bitwise operations, 16-bit integers, complex products) NCCL moves the tensors to the rank that needs the
result, where torch reduces them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch

from rpcdist.collectives._operations import reduce_kernels
from rpcdist.collectives._operations.dense import joined
from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp, by_kind
from rpcdist.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType


OLDEST_CUPY: Final = 14
"""CuPy 14.0.0 has `commSplit`, and unique ids of type `bytes`; 13.6.0, the version before it, has neither."""

_ADVICE: Final = (
    "install it with `pip install 'rpcdist[cuda]' nvidia-nccl-cu12` (for CUDA 13: cupy-cuda13x, nvidia-nccl-cu13) on "
    'a machine with an NVIDIA GPU, or choose the backend "tcp" for CPU tensors'
)


Communicator = Any
"""CuPy's `NcclCommunicator`, which has no types: pointers are addresses, and counts are elements of the datatype."""


class CudaRuntime:
    """One device and its NCCL. Tests replace it.

    Attributes:
        device: the device of a group's tensors.
        version: NCCL's version, e.g. 22907 for 2.29.7.
        errors: the exceptions of calls when NCCL or CUDA fail.

    Raises (constructor):
        ConfigError: CuPy, NCCL or a GPU is missing; says what to install.
    """

    def __init__(self, device: torch.device) -> None:
        self._nccl = _load_nccl()
        self.device = device
        self.version = int(self._nccl.get_version())
        # KeyError: CuPy fails when it looks up the names of NCCL's newest errors.
        self.errors: tuple[type[Exception], ...] = (self._nccl.NcclError, torch.AcceleratorError, KeyError)

    def unique_id(self) -> bytes:
        return bytes(self._nccl.get_unique_id())

    def connect(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        """Blocks until all ranks have called it; other threads run meanwhile. It cannot be interrupted."""
        with torch.cuda.device(self.device):  # NCCL takes the thread's current device
            return self._nccl.NcclCommunicator(size, unique_id, rank)

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Starts the calls in this block together, at its end."""
        with torch.cuda.device(self.device):
            self._nccl.groupStart()
            try:
                yield
            finally:
                self._nccl.groupEnd()

    @contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


@cache
def nccl_is_usable() -> bool:
    """Whether groups of the backend can be made here; imports CuPy if the machine has a GPU."""
    try:
        _load_nccl()
    except ConfigError:
        return False
    return True


def _load_nccl() -> ModuleType:
    if not torch.cuda.is_available():
        raise ConfigError(f'the backend "nccl" needs a GPU that torch can use, but this machine has none; {_ADVICE}')
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns if it finds no NCCL, which the error below says
            cupy = import_module("cupy")
            nccl = import_module("cupy.cuda.nccl")
    except ImportError as exc:
        raise ConfigError(f'the backend "nccl" needs CuPy with NCCL ({exc}); {_ADVICE}') from exc
    if int(str(cupy.__version__).split(".")[0]) < OLDEST_CUPY:
        raise ConfigError(f'the backend "nccl" needs CuPy {OLDEST_CUPY} or newer, not {cupy.__version__}; {_ADVICE}')
    if not getattr(nccl, "available", False):
        raise ConfigError(f'the backend "nccl" found CuPy {cupy.__version__} but no NCCL library; {_ADVICE}')
    return nccl


# These numbers are NCCL's binary interface.
_UINT8: Final = 1
_DTYPES: Final = (
    torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.float16, torch.float32,
    torch.float64, torch.bfloat16,
)  # fmt: skip
_DATATYPES: Final = {dtype: number for number, dtype in enumerate(_DTYPES)}
_SUM, _PRODUCT, _MAX, _MIN, _AVG = range(5)
_OPS: Final = {
    ReduceOp.SUM: _SUM,
    ReduceOp.AVG: _SUM,
    ReduceOp.PREMUL_SUM: _SUM,
    ReduceOp.PRODUCT: _PRODUCT,
    ReduceOp.MAX: _MAX,
    ReduceOp.MIN: _MIN,
}
_BOOL_OPS: Final = {
    ReduceOp.BOR: _MAX,
    ReduceOp.BAND: _MIN,
    ReduceOp.BXOR: _SUM,  # the last bit of a sum of bits is their exclusive or, even if the byte overflows
}
_AVG_SINCE: Final = 21000
_MOST_BROADCAST_BYTES: Final = 2**31 - 2**12
"""CuPy's `broadcast` takes a C int; other calls take a size_t."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How NCCL reduces tensors of one dtype by one operation: as `dtype`, by `op`, then `finish(tensor, size)`."""

    dtype: torch.dtype
    op: int
    finish: Callable[[torch.Tensor, int], object] | None = None

    def arguments(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        """The number of elements, the data type and the operation, for calls of NCCL."""
        return tensor.nbytes // self.dtype.itemsize, _DATATYPES[self.dtype], self.op


def native_form(op: ReduceOp, dtype: torch.dtype, version: int) -> _Form | None:
    """Returns how NCCL of that version reduces; None if it cannot."""
    reduce_kernels.reducer(op, dtype)
    if dtype is torch.bool:
        finish = _keep_last_bit if op is ReduceOp.BXOR else None
        return _Form(torch.uint8, _BOOL_OPS[reduce_kernels.BOOL_OPS[op]], finish)
    numbers = reduce_kernels.REAL_OF.get(dtype, dtype) if op in reduce_kernels.SUMS else dtype
    if numbers not in _DATATYPES or op not in _OPS:
        return None
    if op is not ReduceOp.AVG:
        return _Form(numbers, _OPS[op])
    if numbers.is_floating_point and version >= _AVG_SINCE:
        return _Form(numbers, _AVG)
    return _Form(numbers, _SUM, lambda tensor, size: reduce_kernels.finish(ReduceOp.AVG, tensor, size))


def _keep_last_bit(tensor: torch.Tensor, size: int) -> None:
    tensor.view(torch.uint8).bitwise_and_(1)


class NcclCalls:
    """Enqueues the operations of one group."""

    def __init__(self, runtime: CudaRuntime, communicator: Communicator, rank: int, size: int) -> None:
        self._runtime = runtime
        self._communicator = communicator
        self._rank = rank
        self._size = size
        self._calls: dict[Kind, Callable[[Operation, int], list[torch.Tensor]]] = by_kind(self)

    def enqueue(self, operation: Operation, stream: torch.cuda.Stream) -> list[torch.Tensor]:
        """Call it with `stream` as torch's current stream. Returns tensors that must live until it is done."""
        return self._calls[operation.kind](operation, stream.cuda_stream)

    def send(self, tensor: torch.Tensor, peer: int, stream: torch.cuda.Stream) -> None:
        if tensor.nbytes:
            self._communicator.send(tensor.data_ptr(), tensor.nbytes, _UINT8, peer, stream.cuda_stream)

    def recv(self, tensor: torch.Tensor, peer: int, stream: torch.cuda.Stream) -> None:
        if tensor.nbytes:
            self._communicator.recv(tensor.data_ptr(), tensor.nbytes, _UINT8, peer, stream.cuda_stream)

    # ------------------------------------------------------------ reductions

    def _form(self, operation: Operation) -> _Form | None:
        dtype, op = operation.dtype, operation.reduce_op
        assert dtype is not None and op is not None
        return native_form(op, dtype, self._runtime.version)

    def _finish(self, form: _Form, tensor: torch.Tensor) -> None:
        if form.finish is not None and tensor.numel():
            form.finish(tensor, self._size)

    def _all_reduce(self, operation: Operation, stream: int) -> list[torch.Tensor]:
        form = self._form(operation)
        source, target = reduce_kernels.premultiplied(operation, operation.inputs[0]), operation.outputs[0]
        if not source.numel():
            return []
        if form is None:
            gathered = source.new_empty(self._size * source.numel())
            self._communicator.allGather(source.data_ptr(), gathered.data_ptr(), source.nbytes, _UINT8, stream)
            self._combine(operation, list(gathered.chunk(self._size)), target)
            return [source, gathered]
        self._communicator.allReduce(source.data_ptr(), target.data_ptr(), *form.arguments(source), stream)
        self._finish(form, target)
        return [source]

    def _reduce(self, operation: Operation, stream: int) -> list[torch.Tensor]:
        form, root = self._form(operation), operation.root
        source = reduce_kernels.premultiplied(operation, operation.inputs[0])
        if not source.numel():
            return []
        if form is None:
            return self._reduce_at_root(operation, source, stream)
        target = operation.outputs[0] if self._rank == root else source  # NCCL does not write on other ranks
        self._communicator.reduce(source.data_ptr(), target.data_ptr(), *form.arguments(source), root, stream)
        if self._rank == root:
            self._finish(form, target)
        return [source]

    def _reduce_at_root(self, operation: Operation, source: torch.Tensor, stream: int) -> list[torch.Tensor]:
        if self._rank != operation.root:
            self._exchange({operation.root: source}, {}, stream)
            return [source]
        gathered = [torch.empty_like(source) for _ in range(self._size)]
        self._exchange({self._rank: source}, dict(enumerate(gathered)), stream)
        self._combine(operation, gathered, operation.outputs[0])
        return [source, *gathered]

    def _reduce_scatter(self, operation: Operation, stream: int) -> list[torch.Tensor]:
        form, target = self._form(operation), operation.outputs[0]
        chunks = [reduce_kernels.premultiplied(operation, chunk) for chunk in operation.inputs]
        if form is None:
            gathered = [torch.empty_like(chunks[self._rank]) for _ in range(self._size)]
            self._exchange(dict(enumerate(chunks)), dict(enumerate(gathered)), stream)
            self._combine(operation, gathered, target)
            return [*chunks, *gathered]
        whole = joined(chunks) if len({chunk.numel() for chunk in chunks}) == 1 else None
        if whole is not None:
            self._communicator.reduceScatter(whole.data_ptr(), target.data_ptr(), *form.arguments(target), stream)
        else:
            self._reduce_each(form, chunks, target, stream)
        self._finish(form, target)
        return chunks

    def _reduce_each(self, form: _Form, chunks: list[torch.Tensor], target: torch.Tensor, stream: int) -> None:
        """Reduces chunks that are not adjacent or differ in length, by one reduction to every rank, all at once."""
        with self._runtime.grouped():
            for root, chunk in enumerate(chunks):
                if chunk.numel():
                    to = (target if root == self._rank else chunk).data_ptr()
                    self._communicator.reduce(chunk.data_ptr(), to, *form.arguments(chunk), root, stream)

    def _combine(self, operation: Operation, parts: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        op = operation.reduce_op
        assert op is not None
        if not target.numel():
            return
        for part in parts[1:]:
            reduce_kernels.reduce_into(op, parts[0], part)
        reduce_kernels.finish(op, parts[0], self._size)
        target.view(-1).copy_(parts[0].view(-1))

    # ------------------------------------------------------------ moves

    def _broadcast(self, operation: Operation, stream: int) -> list[torch.Tensor]:
        source, target = operation.inputs[0], operation.outputs[0]
        for begin in range(0, target.nbytes, _MOST_BROADCAST_BYTES):
            count = min(_MOST_BROADCAST_BYTES, target.nbytes - begin)
            from_, to = source.data_ptr() + begin, target.data_ptr() + begin
            self._communicator.broadcast(from_, to, count, _UINT8, operation.root, stream)
        return []

    def _all_gather(self, operation: Operation, stream: int) -> list[torch.Tensor]:
        source, outputs = operation.inputs[0], operation.outputs
        whole = joined(outputs)
        if not source.numel():
            return []
        if whole is not None:
            self._communicator.allGather(source.data_ptr(), whole.data_ptr(), source.nbytes, _UINT8, stream)
            return []
        self._exchange(dict.fromkeys(range(self._size), source), dict(enumerate(outputs)), stream)
        return []

    def _gather(self, operation: Operation, stream: int) -> list[torch.Tensor]:
        self._exchange({operation.root: operation.inputs[0]}, dict(enumerate(operation.outputs)), stream)
        return []

    def _scatter(self, operation: Operation, stream: int) -> list[torch.Tensor]:
        self._exchange(dict(enumerate(operation.inputs)), {operation.root: operation.outputs[0]}, stream)
        return []

    def _all_to_all(self, operation: Operation, stream: int) -> list[torch.Tensor]:
        self._exchange(dict(enumerate(operation.inputs)), dict(enumerate(operation.outputs)), stream)
        return []

    def _exchange(self, sends: dict[int, torch.Tensor], recvs: dict[int, torch.Tensor], stream: int) -> None:
        """Sends to and receives from many ranks at once; copies the chunk for this rank."""
        me = self._rank
        with self._runtime.grouped():
            for peer, tensor in sends.items():
                if peer != me and tensor.nbytes:
                    self._communicator.send(tensor.data_ptr(), tensor.nbytes, _UINT8, peer, stream)
            for peer, tensor in recvs.items():
                if peer != me and tensor.nbytes:
                    self._communicator.recv(tensor.data_ptr(), tensor.nbytes, _UINT8, peer, stream)
        if me in sends and me in recvs and sends[me].data_ptr() != recvs[me].data_ptr():
            recvs[me].view(-1).copy_(sends[me].view(-1))

    def _barrier(self, operation: Operation, stream: int) -> list[torch.Tensor]:
        token = torch.zeros(1, dtype=torch.int32, device=self._runtime.device)
        address = token.data_ptr()
        self._communicator.allReduce(address, address, 1, _DATATYPES[torch.int32], _SUM, stream)
        return [token]
