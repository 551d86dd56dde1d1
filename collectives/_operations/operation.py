"""An operation of a group as data: the API functions make it, and every backend runs it.

An `Operation` is checked and normalised: its tensors are dense, contiguous and of one dtype, and are used as flat
sequences of elements. Chunk i of a list of `size` tensors belongs to rank i of the group. In the table, m is this rank
and r the root; `=` means that `inputs` and `outputs` are the same tensors (the operation works in place):

    kind            inputs                          outputs                          afterwards
    ALL_REDUCE      1 tensor              =         1 tensor                         out = reduction of all ranks' in
    REDUCE          1 tensor              =         1 tensor                         the same at r; elsewhere untouched
    BROADCAST       1 tensor              =         1 tensor                         out = r's in
    ALL_GATHER      1 tensor                        size chunks of that many         out[i] = rank i's in
    GATHER          1 tensor                        size chunks at r, else none      out[i] = rank i's in
    SCATTER         size chunks at r, else none     1 tensor                         out = r's in[m]
    REDUCE_SCATTER  size chunks                     1 tensor, as many as in[m]       out = reduction of all ranks' in[m]
    ALL_TO_ALL      size chunks                     size chunks                      out[i] = rank i's in[m]
    BARRIER         none                            none                             every rank has arrived

If the backend has `reduces_many`, ALL_REDUCE takes several tensors that share no memory: the ranks reduce their
concatenation, whose size must be equal on all ranks. The chunks of REDUCE_SCATTER and ALL_TO_ALL may differ in length.
An input that is not also an output is never written to. It shares no memory with an output, with two exceptions: the
input of ALL_GATHER may be out[m], and the output of REDUCE_SCATTER may be in[m]. Tensors may be empty.
"""

from __future__ import annotations

import operator
import struct
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, IntEnum
from typing import Any, Final, SupportsIndex, TypeGuard, cast

import torch

from rpcdist.errors import ConfigError


class Kind(IntEnum):
    """The kinds of operation; their numbers are part of the fingerprint."""

    ALL_REDUCE = 1
    REDUCE = 2
    BROADCAST = 3
    ALL_GATHER = 4
    GATHER = 5
    SCATTER = 6
    REDUCE_SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9

    @property
    def title(self) -> str:
        """The name of the user's function, e.g. "all_reduce"."""
        return _TITLES[self]


class ReduceOp(Enum):
    """How the tensors of the ranks are reduced to one, element by element.

    AVG is the sum divided by the number of ranks (of integers: towards zero). BAND, BOR and BXOR need integers or bool.
    With bool, SUM, MAX and BOR are "any", and PRODUCT, MIN and BAND are "all". PREMUL_SUM multiplies each rank's tensor
    by a factor before the sum.
    """

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8

    def __int__(self) -> int:
        return self.value

    @property
    def op(self) -> ReduceOp:
        """This member: torch's ReduceOp is an object whose `op` is a member of this type."""
        return self


ReduceOp.__name__ = "RedOpType"  # members print as torch's do, which programs parse
ReduceOp.RedOpType = ReduceOp  # type: ignore[attr-defined]  # torch's name of the type of its members

DTYPES: Final = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.bool, torch.complex64, torch.complex128, torch.complex32, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES)}
_NO_CODE: Final = 255
_IN_PLACE: Final = frozenset((Kind.ALL_REDUCE, Kind.REDUCE, Kind.BROADCAST))
_TITLES: Final = {kind: kind.name.lower() for kind in Kind}
_FINGERPRINT: Final = struct.Struct("<QQqBBBx")
FINGERPRINT_BYTES: Final = _FINGERPRINT.size


def by_kind(owner: object, prefix: str = "_") -> dict[Kind, Any]:
    """Returns the methods of an object that are named after the kinds."""
    return {kind: getattr(owner, f"{prefix}{kind.title}") for kind in Kind}


dtype_code: Final[Callable[[torch.dtype], int]] = _CODES.__getitem__
"""Returns the number of a dtype in messages. Raises KeyError for a dtype that groups do not carry."""


@dataclass(slots=True, eq=False)
class Operation:
    """One operation on one rank; see the table above.

    Attributes:
        reduce_op: the reduction, for the kinds that reduce.
        root: the root's rank in the group, for the kinds that have a root; otherwise -1.
        factor: this rank's factor, for PREMUL_SUM.
    """

    kind: Kind
    inputs: tuple[torch.Tensor, ...] = ()
    outputs: tuple[torch.Tensor, ...] = ()
    reduce_op: ReduceOp | None = None
    root: int = -1
    factor: float | torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of all tensors; None without tensors."""
        tensors = self.inputs or self.outputs
        return tensors[0].dtype if tensors else None

    @property
    def size_bytes(self) -> int:
        """The size that must be equal on all ranks; 0 for ALL_TO_ALL, where it may differ between ranks."""
        kind = self.kind
        if kind in (Kind.ALL_TO_ALL, Kind.BARRIER):
            return 0
        if kind is Kind.REDUCE_SCATTER or kind is Kind.ALL_REDUCE:
            return sum(tensor.nbytes for tensor in self.inputs)
        return self.outputs[0].nbytes if kind is Kind.SCATTER else self.inputs[0].nbytes

    def fingerprint(self, sequence: int) -> bytes:
        """Returns, in `FINGERPRINT_BYTES` bytes, the properties that must be equal on all ranks."""
        kind, tensors = self.kind, self.inputs or self.outputs
        if kind in _IN_PLACE and len(tensors) == 1:
            size_bytes, code = tensors[0].nbytes, _CODES[tensors[0].dtype]
        else:
            size_bytes, code = self.size_bytes, _CODES[tensors[0].dtype] if tensors else _NO_CODE
        reduce_code = _NO_CODE if self.reduce_op is None else self.reduce_op._value_
        return _FINGERPRINT.pack(sequence, size_bytes, self.root, kind, code, reduce_code)


def describe_fingerprint(data: bytes) -> str:
    """Describes a fingerprint for errors, e.g. "all_reduce #41 (SUM, 256 elements of float32)", or shows its bytes."""
    try:
        sequence, size_bytes, root, kind, code, reduce_code = _FINGERPRINT.unpack(data)
        details = [] if reduce_code == _NO_CODE else [ReduceOp(reduce_code).name]
        if root >= 0:
            details.append(f"root {root}")
        if code != _NO_CODE:
            dtype = str(DTYPES[code]).removeprefix("torch.")
            num_elements = size_bytes // DTYPES[code].itemsize
            details.append(f"{num_elements} elements of {dtype}" if kind != Kind.ALL_TO_ALL else dtype)
        text = f"{Kind(kind).title} #{sequence}"
    except (struct.error, ValueError, IndexError):
        return f"unreadable bytes {bytes(data[:FINGERPRINT_BYTES]).hex()}"
    return f"{text} ({', '.join(details)})" if details else text


def check_tensor(value: object, name: str) -> TypeGuard[torch.Tensor]:
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type torch.Tensor "
            f"but got {type(value)} instead."
        )
    return True


def check_tensor_list(value: object, name: str) -> TypeGuard[list[torch.Tensor]]:
    """Raises TypeError unless it is a list, not another sequence, of tensors."""
    if not isinstance(value, list) or not all(isinstance(each, torch.Tensor) for each in value):
        got = f"{type(value)}"
        if isinstance(value, list):
            got += f" with elements of type {[type(each) for each in value]}"
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type List[torch.Tensor] but got {got} instead."
        )
    return True


def check_same_dtype(tensors: Iterable[torch.Tensor]) -> None:
    """Raises unless all dtypes are equal; a complex dtype may be mixed with the real one of the same width."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 and len({dtype.to_real() for dtype in dtypes}) > 1:
        text = f"Invalid usage of tensors with different dtypes. Found {', '.join(sorted(map(str, dtypes)))}"
        raise ConfigError(text)


def check_num_tensors(tensors: Sequence[torch.Tensor], size: int, what: str, name: str) -> None:
    if len(tensors) != size:
        text = f"{what}: `{name}` has {len(tensors)} tensors, but the group has {size} ranks; pass one for each rank"
        raise ConfigError(text)


def check_same_count(tensor: torch.Tensor, count: int, what: str, name: str, other: str) -> None:
    if tensor.numel() != count:
        raise ConfigError(
            f"{what}: `{name}` has {tensor.numel()} elements (shape {tuple(tensor.shape)}), "
            f"but {other} has {count}; the numbers must be equal"
        )


def checked_root(root: int, size: int, what: str) -> int:
    if type(root) is not int:
        root = whole_number(root, "root")
    if not 0 <= root < size:
        raise ConfigError(f"{what}: invalid root rank: {root}; the group's ranks are 0 to {size - 1}")
    return root


def whole_number(value: object, name: str) -> int:
    """Returns the value as an int; accepts numpy's integers and integer tensors of one element."""
    try:
        return operator.index(cast(SupportsIndex, value))
    except TypeError:
        raise TypeError(f"`{name}` must be a whole number, not {value!r}") from None


def check_timeout(timeout: object) -> timedelta:
    if not isinstance(timeout, timedelta):
        raise TypeError(f"Expected timeout argument to be of type datetime.timedelta, got {timeout}")
    return timeout


def barrier_timeout(timeout: object, stacklevel: int = 3) -> timedelta | None:
    """Returns the timeout of a monitored barrier; like torch, accepts seconds with a warning at that level."""
    if timeout is None:
        return None
    if isinstance(timeout, float):
        warnings.warn(
            f"Please specify timeout arg as a timedelta. Converting current value of {timeout} assuming it represents "
            "seconds",
            stacklevel=stacklevel,
        )
        return timedelta(seconds=timeout)
    return check_timeout(timeout)
