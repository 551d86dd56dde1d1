"""Entry point of the value codec: a Python value to and from `value_pb2.Value` and the large buffers beside it.

If a value cannot be sent, it finds the part that is the reason, so that the error can name it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Final, cast

import torch
from torch.nn import Parameter

from rpcdist._proto import value_pb2
from rpcdist.errors import SerializationError
from rpcdist.rpc._values.buffers import INLINE_LIMIT, ReceiveBuffer, add_buffer, received_buffers
from rpcdist.rpc._values.pickled import PickledParts, read_pickle, write_pickle
from rpcdist.rpc._values.plain import (
    FREE_BYTES,
    MAX_DEPTH,
    MAX_ITEMS,
    REFERENCE_BYTES,
    PlainWriter,
    allowed_bytes,
    read_plain,
)
from rpcdist.rpc._values.rebuild import TENSOR_BYTES, GpuArrivals, rebuild_tensors, tensors_cost
from rpcdist.rpc._values.tensors import (
    DTYPE_CODES,
    DeviceRoute,
    Internalize,
    NotPlain,
    RRefType,
    ShareRRef,
    pack_tensors,
)
from rpcdist.transport._framing.message_parts import missing_weight
from rpcdist.transport.memory_copies import LargeBuffer

MAX_TRIALS = 1000
"""Limit on the parts that are pickled to find the one that fails."""

_SCALARS = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device)


def why_not_plain(obj: object, rref_type: RRefType, name: str = "value") -> str:
    """A sentence that names the first part of `obj` that cannot be sent without pickle, by its path."""
    seen: set[int] = set()
    pending: list[tuple[object, str, int]] = [(obj, name, 0)]
    while pending:
        item, path, depth = pending.pop()
        kind = type(item)
        if kind in (list, tuple, dict):
            if id(item) in seen:
                continue
            seen.add(id(item))
            if depth > MAX_DEPTH:
                return f"{path} is nested deeper than {MAX_DEPTH} containers, which only pickle can send"
            pending.extend((part, path + step, depth + 1) for part, step in reversed(_parts(item)))
            continue
        if kind in (torch.Tensor, Parameter):
            assert isinstance(item, torch.Tensor)
            if item.layout is not torch.strided or item.is_nested or item.dtype not in DTYPE_CODES:
                return f"{path} is a tensor of {item.layout} and {item.dtype}; only dense ones go without pickle"
            continue
        if kind in _SCALARS or isinstance(item, rref_type):
            continue
        return (
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which only pickle can send, and pickle is off here. "
            "Send None, bool, numbers, str, bytes, tensors, and lists, tuples and dicts of them"
        )
    return (
        f"{name} has more than {MAX_ITEMS} parts, the limit without pickle: put numbers into a tensor, or send it in "
        "several calls"
    )


def _parts(item: object) -> list[tuple[object, str]]:
    if isinstance(item, dict):
        keys = [(key, f".key({key!r:.40})") for key in item]
        return [
            part
            for key, entry in zip(keys, item.items(), strict=True)
            for part in (key, (entry[1], f"[{entry[0]!r:.40}]"))
        ]
    assert isinstance(item, list | tuple)
    return [(part, f"[{index}]") for index, part in enumerate(item)]


def unpicklable_part(obj: object, name: str, rref_type: RRefType, by_value: bool) -> str | None:
    """A sentence that names the innermost part of `obj` that cannot be pickled; None if all parts can.

    Runs user code (`__reduce__`), as sending does.
    """
    trials = MAX_TRIALS
    item, path = obj, name
    if _pickles(item, rref_type, by_value):
        return None
    seen: set[int] = set()
    while trials > 0 and id(item) not in seen:
        seen.add(id(item))
        for part, step in _picklable_parts(item):
            trials -= 1
            if trials <= 0:
                break
            if not _pickles(part, rref_type, by_value):
                item, path = part, path + step
                break
        else:
            break
    kind = type(item)
    return f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be pickled"


def _pickles(item: object, rref_type: RRefType, by_value: bool) -> bool:
    try:
        write_pickle(item, rref_type, by_value)
    except Exception:  # for whatever reason, the part cannot be sent
        return False
    return True


def _held_parts(function: FunctionType) -> list[tuple[object, str]]:
    """The objects that are sent with a function by value."""
    code = function.__code__
    parts = [
        (default, ".default") for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    ]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not set yet
            parts.append((cell.cell_contents, f".closure[{name!r}]"))
    used = [name for name in code.co_names if name in function.__globals__]
    return parts + [(function.__globals__[name], f".globals[{name!r}]") for name in used]


def _picklable_parts(item: object) -> list[tuple[object, str]]:
    if isinstance(item, dict | list | tuple):
        return _parts(item)
    if isinstance(item, set | frozenset):
        return [(part, f".item({part!r:.40})") for part in item]
    if isinstance(item, type):
        return []
    if isinstance(item, FunctionType):
        return _held_parts(item)
    attributes = getattr(item, "__dict__", None)
    return [(part, f".{name}") for name, part in attributes.items()] if isinstance(attributes, dict) else []


OnTensors = Callable[[list[torch.Tensor]], object]
"""Called with the tensor table of a value; the order is the same at both ends."""

MAX_MADE_HEAVIER: Final = 1 << 14
"""Workers that may send pickles, and so rarely call workers that refuse them, add no weight for more tensors."""

FEW_PARTS: Final = 200
"""Fewer tensors, buffers and references than this take little memory."""

PLAIN_ITEMS: Final = 48
"""Values with more parts are pickled: the plain writer, in Python, is slower from here on."""


def write_plain(obj: object, rref_type: RRefType = (), *, plain_only: bool = False) -> PlainWriter | None:
    """Writes `obj` without pickle; None if it has a part that cannot be written so, or too many parts."""
    writer = PlainWriter(rref_type, MAX_ITEMS if plain_only else PLAIN_ITEMS, may_list_tensors=not plain_only)
    try:
        writer.write(obj)
    except NotPlain:
        return None
    return writer


def encode_into(
    value: value_pb2.Value,
    obj: object,
    rref_type: RRefType = (),
    share: ShareRRef | None = None,
    *,
    by_value: bool = False,
    plain_only: bool = False,
    route: DeviceRoute | None = None,
    on_tensors: OnTensors | None = None,
) -> list[LargeBuffer]:
    """Writes `obj` into `value`, which must be empty, and returns the memory that is not copied.

    Runs user code (`__reduce__`) on the calling thread. The returned buffers alias the memory of `obj`: until they are
    sent, the caller must not change tensors and arrays in `obj`.

    Args:
        rref_type: recognizes remote references; without it they are refused.
        share: shares each of them with the receiver.
        by_value: whether to send the code of functions and classes that the receiver cannot import.
        plain_only: whether to refuse values that would need pickle.
        route: how tensors on GPUs reach the receiver; without it they are refused.
        on_tensors: called when the value is complete, if it has tensors.

    Raises:
        SerializationError: the value cannot be sent; with `plain_only`, the text names the part.
        AttributeError, TypeError, pickle.PicklingError: from pickle, with a note. `value` is left empty in all cases.
    """
    writer = write_plain(obj, rref_type, plain_only=plain_only)
    return fill_value(value, obj, writer, rref_type, share, route, by_value, plain_only, on_tensors)


def fill_value(
    value: value_pb2.Value,
    obj: object,
    writer: PlainWriter | None,
    rref_type: RRefType,
    share: ShareRRef | None,
    route: DeviceRoute | None,
    by_value: bool,
    plain_only: bool,
    on_tensors: OnTensors | None,
) -> list[LargeBuffer]:
    """Like `encode_into`, for an object that `write_plain` has written, or could not write."""
    if writer is not None:
        with suppress(NotPlain):  # it has a tensor that only pickle can send
            return fill_parts(value, writer, share, route, on_tensors)
    if plain_only:
        raise SerializationError(why_not_plain(obj, rref_type))
    return fill_parts(value, write_pickle(obj, rref_type, by_value), share, route, on_tensors)


def fill_parts(
    value: value_pb2.Value,
    parts: PlainWriter | PickledParts,
    share: ShareRRef | None = None,
    route: DeviceRoute | None = None,
    on_tensors: OnTensors | None = None,
) -> list[LargeBuffer]:
    """Like `encode_into`, for the result of `write_plain` or `write_pickle`."""
    large: list[LargeBuffer] = []
    try:
        # The order matters: the buffers of the body have the first numbers.
        for view in parts.buffers:
            add_buffer(value, view, large)
        body = bytes(parts.body)
        if len(body) <= INLINE_LIMIT:
            value.body = body
        else:
            value.body_buffer = add_buffer(value, memoryview(body), large) + 1
        if parts.tensors:
            pack_tensors(value, parts.tensors, large, route, all_differ=parts.lists_tensors)
        if isinstance(parts, PlainWriter):
            _make_it_weigh_enough(value, parts, large)
        else:
            value.encoding = value_pb2.Value.PICKLE
        add_weight(value)
        for rref in parts.rrefs:  # from here on, nothing fails
            assert share is not None  # given with the type that has found it
            share(rref)
        if on_tensors is not None and parts.tensors:
            on_tensors(parts.tensors)
    except BaseException:
        value.Clear()
        raise
    return large


def _make_it_weigh_enough(value: value_pb2.Value, parts: PlainWriter, large: list[LargeBuffer]) -> None:
    """Adds an unused buffer if the receiver would refuse the value without it. [Note: what a value costs]"""
    count = len(parts.tensors)
    cost = parts.cost_bytes + TENSOR_BYTES * count
    if count > MAX_MADE_HEAVIER and parts.may_list_tensors:
        cost = parts.cost_bytes
    if cost > FREE_BYTES:
        missing = cost - allowed_bytes(sum([buffer.size for buffer in large]))
        if missing > 0:
            add_buffer(value, memoryview(bytes(max(missing // 2, INLINE_LIMIT) + 1)), large)


def add_weight(value: value_pb2.Value) -> None:
    """Makes a value with very many parts weigh what they take once they are parsed; else its receiver refuses it."""
    if len(value.tensors) + len(value.buffers) + len(value.rrefs) < FEW_PARTS:
        return
    missing = missing_weight(value_pb2.Value, value.SerializeToString())
    if missing > 0:
        value.weight = bytes(len(value.weight) + missing)


def decode(
    value: value_pb2.Value,
    large: Sequence[ReceiveBuffer] = (),
    internalize: Internalize | None = None,
    *,
    plain_only: bool = False,
    on_tensors: OnTensors | None = None,
    gpus: GpuArrivals | None = None,
) -> object:
    """The object that `encode_into` wrote.

    With the encoding PICKLE this runs code of the sender's choice: only for trusted peers, only on pool or waiting
    threads.

    Args:
        large: the buffers that followed the message, complete, in the order of `value.buffers`.
        internalize: receives remote references; without it they are refused.
        plain_only: whether to refuse pickles, and devices other than cpu and meta.
        on_tensors: called when the tensors exist, and the value does not yet; it may change them in place.
        gpus: moves tensors to GPUs; without it they are refused.

    Raises:
        SerializationError: the value is damaged, refused, or cannot be rebuilt here.
    """
    body = value.body
    encoding = value.encoding
    if encoding and plain_only:
        raise SerializationError(
            "a pickled value arrived from a peer that may send plain values only: None, bool, numbers, str, bytes, "
            "tensors, and lists, tuples and dicts of them"
        )
    buffers = received_buffers(value, large)
    inline_bytes = sum([len(buffer) for buffer in buffers if isinstance(buffer, bytes)])
    weight_bytes = len(body) + inline_bytes + sum([buffer.size for buffer in large]) + len(value.weight)
    taken_bytes = len(body) + 2 * inline_bytes  # copied out of the message, and again into tensors
    taken_bytes += REFERENCE_BYTES * len(value.rrefs)
    if plain_only and value.tensors:
        taken_bytes += tensors_cost(value.tensors, weight_bytes, allowed_bytes(weight_bytes) - taken_bytes)
    tensors = rebuild_tensors(value, buffers, plain_only, gpus)
    contents = cast(
        "list[bytes | ReceiveBuffer]", [b"" if isinstance(buffer, value_pb2.Buffer) else buffer for buffer in buffers]
    )
    if on_tensors is not None and tensors:
        on_tensors(tensors)
    separate = value.body_buffer
    source: bytes | memoryview = body
    if separate:
        if separate > len(buffers):
            raise SerializationError("a damaged value arrived: its body is missing")
        buffer = contents[separate - 1]
        source = buffer if isinstance(buffer, bytes) else buffer.view
        if encoding == value_pb2.Value.PLAIN and isinstance(buffer, ReceiveBuffer) and buffer.borrowed_view is not None:
            source = bytes(source)  # otherwise the sender could change it while it is read
    if encoding == value_pb2.Value.PLAIN:
        return read_plain(source, tensors, contents, internalize, weight_bytes, taken_bytes)
    if encoding == value_pb2.Value.PICKLE:
        return read_pickle(source, tensors, contents, internalize)
    raise SerializationError(f"a value arrived in encoding {encoding}, which this version of rpcdist does not know")
