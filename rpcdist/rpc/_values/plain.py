"""Plain values, written by a codec without pickle: compact, and safe to read from anybody, on any thread.

Plain are None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, torch.Size, torch.dtype,
torch.device, tensors and externals (remote references); of exactly these types, since a subclass may carry more than
the codec would send. docs/values.md has the format. Lists, dicts and bytearrays that occur twice arrive as one object,
so cycles work.

Rules of this file: the decoder trusts nothing. Whatever the bytes are, it returns a value or raises
`SerializationError`; it never calls code of the value's choice, never recurses deeper than `MAX_DEPTH`, never builds
more than `MAX_ITEMS` objects, and does no more work for a dict than its size accounts for (`hash_work.py`).
"""

from __future__ import annotations

from operator import index
from struct import Struct
from struct import error as StructError
from typing import Any, Final

import torch
from torch.nn import Parameter

from rpcdist.errors import SerializationError
from rpcdist.rpc._values.buffers import INLINE_LIMIT, ReceiveBuffer
from rpcdist.rpc._values.dtypes import DTYPE_CODES, DTYPES
from rpcdist.rpc._values.externals import Externals
from rpcdist.rpc._values.hash_work import CHECKED_FROM, HashWork
from rpcdist.rpc._values.tensor_runs import RUNS_FROM

__all__ = ["FREE_ITEMS", "ITEM_BYTES", "MAX_DEPTH", "MAX_ITEMS", "NotPlain", "PlainWriter", "most_items", "read_plain"]

MAX_DEPTH: Final = 64
"""Containers within containers; deeper values are pickled."""

MAX_ITEMS: Final = 1 << 20
"""Objects in one value; a tensor counts once. More are pickled, or refused where only plain values may pass."""

FREE_ITEMS: Final = 300_000
ITEM_BYTES: Final = 56
"""What a part takes in memory: a number 40 with its place in a list, a short text 58, an empty dict of one byte 72."""

# Tags. A byte below 128 is that integer itself.
_NONE, _TRUE, _FALSE, _INT64, _BIG, _FLOAT, _COMPLEX = range(0x80, 0x87)
_STR8, _STR32, _BYTES8, _BYTES32, _BYTEARRAY = range(0x87, 0x8C)
_LIST, _TUPLE, _DICT, _SIZE = range(0x8C, 0x90)
_TENSOR, _EXTERNAL, _SAME, _DTYPE, _DEVICE = range(0x90, 0x95)
_STR_BUFFER, _BYTES_BUFFER, _BYTEARRAY_BUFFER = range(0x95, 0x98)
_TENSOR_LIST: Final = 0x98
_TUPLE0: Final = 0xA0  # 0xA0 to 0xAF: a tuple of 0 to 15 items
_DICT0: Final = 0xB0  # a dict of 0 to 15
_TENSOR0: Final = 0xC0  # 0xC0 to 0xDF: tensor 0 to 31

_INT64_FORM: Final = Struct("<Bq")
_FLOAT_FORM: Final = Struct("<Bd")
_COMPLEX_FORM: Final = Struct("<Bdd")
_LENGTH_FORM: Final = Struct("<BI")
_write_int64 = _INT64_FORM.pack
_write_float = _FLOAT_FORM.pack
_write_length = _LENGTH_FORM.pack
_read_int64 = Struct("<q").unpack_from
_read_float = Struct("<d").unpack_from
_read_complex = Struct("<dd").unpack_from
_read_length = Struct("<I").unpack_from
_write_index = Struct("<I").pack

_MIN_INT64: Final = -(1 << 63)
_MAX_INT64: Final = (1 << 63) - 1


def most_items(size_bytes: int) -> int:
    """The parts that a body of that size may have, so that the objects take some three times its size and 16 MiB."""
    return min(MAX_ITEMS, FREE_ITEMS + 3 * size_bytes // ITEM_BYTES)


class NotPlain(Exception):
    """The value has a part that the plain codec does not write."""


class PlainWriter:
    """Writes one value.

    Args:
        source: knows remote references.
        max_items: the parts that it may have.
        may_list_tensors: a long list of tensors counts as one part, and need not name each.

    Attributes:
        body: what was written.
        tensors: the tensors of the value; the body refers to them by index.
        lists_tensors: it has a long list of tensors; only if all tensors differ does the body say what the value is.
        externals: the remote references of the value; the body refers to them by index.
        buffers: large strings and bytes that stay out of the body, which refers to them by index.
    """

    __slots__ = (
        "_known",
        "_known_externals",
        "_left",
        "_max_items",
        "_may_list_tensors",
        "_num_listed",
        "_seen",
        "_source",
        "body",
        "buffers",
        "externals",
        "lists_tensors",
        "tensors",
    )

    def __init__(self, source: Externals | None, max_items: int, *, may_list_tensors: bool = False) -> None:
        self._source = source
        self._left = self._max_items = max_items
        self._may_list_tensors = may_list_tensors
        self._num_listed = max_items
        self.lists_tensors = False
        self._seen: dict[int, int] = {}  # by id(): lists, dicts and bytearrays; tensors; externals
        self._known: dict[int, int] = {}
        self._known_externals: dict[int, int] = {}
        self.body = bytearray()
        self.tensors: list[torch.Tensor] = []
        self.externals: list[object] = []
        self.buffers: list[memoryview] = []

    def write(self, obj: object) -> None:
        """Writes `obj`.

        Raises:
            NotPlain: a part of it is not plain, or it has more than `max_items` parts, or than its size allows. The
                body is useless then.
        """
        self._items((obj,), 0)
        num_items = self._max_items - self._left
        if num_items > FREE_ITEMS and num_items > most_items(len(self.body)):
            raise NotPlain

    def _items(self, items: tuple[Any, ...] | list[Any], depth: int) -> None:
        # One loop for all small types: a Python call per item would cost more than the item.
        body = self.body
        self._left -= len(items)
        if self._left < 0 or depth > MAX_DEPTH:
            raise NotPlain
        for item in items:
            kind = type(item)
            if kind is torch.Tensor:
                self._tensor(item)
            elif kind is int:
                if 0 <= item < 128:
                    body.append(item)
                elif _MIN_INT64 <= item <= _MAX_INT64:
                    body += _write_int64(_INT64, item)
                else:
                    data = item.to_bytes(item.bit_length() // 8 + 1, "little", signed=True)
                    body += _write_length(_BIG, len(data))
                    body += data
            elif kind is tuple:
                count = len(item)
                if count < 16:
                    body.append(_TUPLE0 + count)
                else:
                    body += _write_length(_TUPLE, count)
                if count:
                    self._items(item, depth + 1)
            elif kind is str:
                if len(item) < 128 and item.isascii():
                    body.append(_STR8)
                    body.append(len(item))
                    body += item.encode()
                else:
                    self._string(item)
            elif item is None:
                body.append(_NONE)
            elif item is True:
                body.append(_TRUE)
            elif item is False:
                body.append(_FALSE)
            elif kind is float:
                body += _write_float(_FLOAT, item)
            elif kind is dict:
                if item or id(item) in self._seen:
                    self._dict(item, depth)
                else:  # as the keywords of most calls
                    self._seen[id(item)] = len(self._seen)
                    body.append(_DICT0)
            elif kind is list:
                if not self._written_before(item) and not self._tensor_list(item):
                    body += _write_length(_LIST, len(item))
                    self._items(item, depth + 1)
            else:
                self._other(item)

    def _dict(self, item: dict[object, object], depth: int) -> None:
        if self._written_before(item):
            return
        count = len(item)
        if count < 16:
            self.body.append(_DICT0 + count)
        else:
            self.body += _write_length(_DICT, count)
        self._items([part for pair in item.items() for part in pair], depth + 1)

    def _written_before(self, item: object) -> bool:
        """Whether this very object, which can change, is in the value already; then writes a reference to it."""
        seen = self._seen
        count = len(seen)
        index = seen.setdefault(id(item), count)
        if index == count:
            return False
        self.body += _write_length(_SAME, index)
        return True

    def _tensor(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or (hasattr(tensor, "_is_buffer") and self._may_list_tensors):
            raise NotPlain
        count = len(self.tensors)
        index = self._known.setdefault(id(tensor), count)
        if index == count:
            self.tensors.append(tensor)
        if index < 32:
            self.body.append(_TENSOR0 + index)
        else:
            self.body += _write_length(_TENSOR, index)

    def _tensor_list(self, items: list[Any]) -> bool:
        """Writes a long list of nothing but tensors as one part; whether it was one."""
        count = len(items)
        if count < RUNS_FROM or not self._may_list_tensors or set(map(type, items)) != {torch.Tensor}:
            return False
        self._num_listed += count
        if self._num_listed > MAX_ITEMS or any([hasattr(item, "_is_buffer") for item in items]):
            return False
        self.lists_tensors = True
        self.body += _write_length(_TENSOR_LIST, count)
        self.body += _write_index(len(self.tensors))
        self.tensors += items
        return True

    def _string(self, item: str) -> None:
        try:
            data = item.encode()
        except UnicodeEncodeError:
            data = item.encode("utf-8", "surrogatepass")
        self._bytes(data, _STR8, _STR32, _STR_BUFFER)

    def _bytes(self, data: bytes | bytearray, short: int, long: int, separate: int) -> None:
        body = self.body
        size = len(data)
        if size < 256 and short:
            body.append(short)
            body.append(size)
            body += data
        elif size <= INLINE_LIMIT:
            body += _write_length(long, size)
            body += data
        else:
            body += _write_length(separate, len(self.buffers))
            self.buffers.append(memoryview(data))

    def _other(self, item: Any) -> None:
        kind = type(item)
        body = self.body
        if kind is bytes:
            self._bytes(item, _BYTES8, _BYTES32, _BYTES_BUFFER)
        elif kind is Parameter:
            if vars(item) and self._may_list_tensors:  # attributes, which pickle can say
                raise NotPlain
            self._tensor(item)
        elif kind is complex:
            body += _COMPLEX_FORM.pack(_COMPLEX, item.real, item.imag)
        elif kind is bytearray:
            if not self._written_before(item):
                self._bytes(item, 0, _BYTEARRAY, _BYTEARRAY_BUFFER)
        elif kind is torch.Size:
            body += _write_length(_SIZE, len(item))
            for length in item:
                body += _write_int64(_INT64, length)
        elif kind is torch.dtype and item in DTYPE_CODES:
            body.append(_DTYPE)
            body.append(DTYPE_CODES[item])
        elif kind is torch.device:
            name = str(item).encode()
            body.append(_DEVICE)
            body.append(len(name))
            body += name
        elif self._source is not None and self._source.is_external(item):
            count = len(self.externals)
            index = self._known_externals.setdefault(id(item), count)
            if index == count:
                self.externals.append(item)
            body += _write_length(_EXTERNAL, index)
        else:
            raise NotPlain


def read_plain(
    body: bytes, tensors: list[torch.Tensor], buffers: list[bytes | ReceiveBuffer], externals: Externals | None
) -> object:
    """The value that `PlainWriter` wrote.

    Raises:
        SerializationError: the bytes are not a plain value; what `Externals.internalize` raises.
    """
    reader = _Reader(body, tensors, buffers, externals)
    try:
        items, end = reader.items(0, 1, 0)
    except (IndexError, KeyError, StructError, ValueError, TypeError, OverflowError) as exc:
        if isinstance(exc, SerializationError):
            raise
        raise SerializationError(f"a value arrived that is damaged: {exc}") from exc
    if end != len(body):
        raise SerializationError(f"a value arrived that is damaged: {len(body) - end} bytes are left over")
    return items[0]


class _Reader:
    __slots__ = ("body", "buffers", "externals", "hash_work", "left", "listed_left", "made", "tensors", "used")

    def __init__(
        self,
        body: bytes,
        tensors: list[torch.Tensor],
        buffers: list[bytes | ReceiveBuffer],
        externals: Externals | None,
    ) -> None:
        self.body = body
        self.tensors = tensors
        self.buffers = buffers
        self.externals = externals
        self.left = most_items(len(body))
        self.listed_left = MAX_ITEMS  # of tensors, which are counted elsewhere: each takes a place in a list
        self.hash_work: HashWork | None = None
        self.made: list[object] = []
        self.used: set[int] = set()

    def items(self, position: int, count: int, depth: int) -> tuple[list[Any], int]:
        """Reads `count` items from `position`; returns them and the position behind."""
        body = self.body
        self.left -= count
        if self.left < 0 or depth > MAX_DEPTH:
            raise SerializationError(
                f"a value of {len(body)} bytes arrived with more than {most_items(len(body))} parts, or nested deeper "
                f"than {MAX_DEPTH} containers. Send numbers as a tensor, and the rest in several calls"
            )
        items: list[Any] = []
        add = items.append
        for _ in range(count):
            tag = body[position]
            position += 1
            if tag < 0x80:
                add(tag)
            elif _TENSOR0 <= tag < _TENSOR0 + 32:
                add(self.tensors[tag - _TENSOR0])
            elif _TUPLE0 <= tag < _TUPLE0 + 16:
                if tag == _TUPLE0:
                    add(())
                else:
                    parts, position = self.items(position, tag - _TUPLE0, depth + 1)
                    add(tuple(parts))
            elif _DICT0 <= tag < _DICT0 + 16:
                if tag == _DICT0:
                    made: dict[object, object] = {}
                    self.made.append(made)
                else:
                    made, position = self.dictionary(position, tag - _DICT0, depth)
                add(made)
            elif tag == _NONE:
                add(None)
            elif tag == _STR8:
                end = position + 1 + body[position]
                add(self.bytes(position + 1, end).decode("utf-8", "surrogatepass"))
                position = end
            elif tag == _INT64:
                add(_read_int64(body, position)[0])
                position += 8
            elif tag == _FLOAT:
                add(_read_float(body, position)[0])
                position += 8
            elif tag == _TRUE or tag == _FALSE:
                add(tag == _TRUE)
            else:
                item, position = self.other(tag, position, depth)
                add(item)
        return items, position

    def bytes(self, start: int, end: int) -> bytes:
        if end > len(self.body):
            raise SerializationError("a value arrived that is damaged: it ends too early")
        return self.body[start:end]

    def dictionary(self, position: int, count: int, depth: int) -> tuple[dict[object, object], int]:
        made: dict[object, object] = {}
        self.made.append(made)
        if count:
            parts, position = self.items(position, 2 * count, depth + 1)
            if count < CHECKED_FROM:
                made.update(zip(parts[::2], parts[1::2], strict=True))
            else:
                if self.hash_work is None:
                    self.hash_work = HashWork(len(self.body))
                self.hash_work.fill(made, parts[::2], parts[1::2])
        return made, position

    def other(self, tag: int, position: int, depth: int) -> tuple[object, int]:
        """The rarer types."""
        body = self.body
        if tag == _BYTES8:
            end = position + 1 + body[position]
            return self.bytes(position + 1, end), end
        if tag == _COMPLEX:
            return complex(*_read_complex(body, position)), position + 16
        if tag == _DTYPE:
            return DTYPES[body[position]].dtype, position + 1
        if tag == _DEVICE:
            end = position + 1 + body[position]
            return _device(self.bytes(position + 1, end)), end
        number: int = _read_length(body, position)[0]  # all others begin with a length or an index
        position += 4
        end = position + number
        if tag == _LIST:
            made: list[object] = []
            self.made.append(made)
            parts, position = self.items(position, number, depth + 1)
            made.extend(parts)
            return made, position
        if tag == _TENSOR_LIST:
            return self.tensor_list(number, _read_length(body, position)[0]), position + 4
        if tag == _TUPLE:
            parts, position = self.items(position, number, depth + 1)
            return tuple(parts), position
        if tag == _DICT:
            return self.dictionary(position, number, depth)
        if tag == _SIZE:
            parts, position = self.items(position, number, depth + 1)
            return torch.Size(list(map(index, parts))), position
        if tag == _STR32:
            return self.bytes(position, end).decode("utf-8", "surrogatepass"), end
        if tag == _BYTES32:
            return self.bytes(position, end), end
        if tag == _BIG:
            return int.from_bytes(self.bytes(position, end), "little", signed=True), end
        if tag == _BYTEARRAY:
            self.made.append(bytearray(self.bytes(position, end)))
            return self.made[-1], end
        return self.reference(tag, number), position

    def tensor_list(self, count: int, start: int) -> list[object]:
        self.listed_left -= count
        made: list[object] = list(self.tensors[start : start + count])
        if self.listed_left < 0 or len(made) != count:
            raise SerializationError(f"a value arrived that is damaged: it lists {count} tensors that it has not")
        self.made.append(made)
        return made

    def reference(self, tag: int, index: int) -> object:
        """What stands elsewhere, by its index."""
        if tag == _TENSOR:
            return self.tensors[index]
        if tag == _SAME:
            return self.made[index]
        if tag == _EXTERNAL:
            if self.externals is None:
                raise SerializationError("a remote reference arrived where none may be")
            return self.externals.internalize(index)
        if tag in (_STR_BUFFER, _BYTES_BUFFER, _BYTEARRAY_BUFFER):
            if index in self.used:  # else a short message could ask for any amount of memory
                raise SerializationError("a value arrived that is damaged: two of its parts claim the same buffer")
            self.used.add(index)
            buffer = self.buffers[index]
            data = buffer.view if isinstance(buffer, ReceiveBuffer) else buffer
            if tag == _STR_BUFFER:
                return str(bytes(data), "utf-8", "surrogatepass")  # a copy: lent memory could change while it is read
            if tag == _BYTES_BUFFER:
                return bytes(data)
            self.made.append(bytearray(data))
            return self.made[-1]
        raise SerializationError(f"a value arrived that is damaged: it has an unknown mark {tag:#x}")


def _device(name: bytes) -> torch.device:
    try:
        return torch.device(name.decode())
    except RuntimeError as exc:
        raise SerializationError(f"the device {name.decode()!r} arrived, which this torch does not know") from exc
