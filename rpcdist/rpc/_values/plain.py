"""Plain values, written by a codec without pickle: compact, and safe to read from any peer, on any thread.

Plain are None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, torch.Size, torch.dtype,
torch.device, tensors and remote references; of exactly these types, since a subclass may carry more than the codec
would send. docs/values.md has the format. Lists, dicts and bytearrays that occur twice arrive as one object,
so cycles work.

Rules of this file: the decoder trusts no input. For any bytes it returns a value or raises `SerializationError`; it
never calls code of the value's choice, never recurses deeper than `MAX_DEPTH`, and does no more work for a dict than
its size accounts for (`hash_work.py`).

[Note: what a value costs]
A number of nine bytes takes 40 in memory, an empty dict of one byte takes 90. So the decoder counts the memory of the
objects, with the constants below, before it makes them, and refuses a value that would take more than `allowed_bytes`:
with its own bytes, a value takes at most three times its weight and 1 MiB. The writer counts in the same way. If a
legitimate value takes more, `codec.py` adds an unused buffer, which makes the value weigh enough.
"""

from __future__ import annotations

from struct import Struct
from struct import error as StructError
from typing import Any, Final

import torch
from torch.nn import Parameter

from rpcdist.errors import SerializationError
from rpcdist.rpc._values.buffers import INLINE_LIMIT, ReceiveBuffer
from rpcdist.rpc._values.hash_work import CHECKED_FROM, Fill, bounded_fill
from rpcdist.rpc._values.tensor_runs import RUNS_FROM
from rpcdist.rpc._values.tensors import DTYPE_CODES, DTYPES, Internalize, NotPlain, RRefType

MAX_DEPTH: Final = 64
"""Limit on containers within containers; deeper values are pickled."""

MAX_ITEMS: Final = 1 << 25
"""Limit on the parts of a value without pickle: the same tuple many times in tuples of such tuples would never end."""

MAX_LISTED: Final = 1 << 20
"""Limit on the tensors that one value may list without naming each."""

FREE_BYTES: Final = 1 << 20
"""The memory that any value may take, even one of few bytes."""

REFERENCE_BYTES: Final = 3400
"""The memory of an arrived remote reference: its entry in the message, in the tables, and the message to its owner that
waits to be sent."""

# The memory of objects, rounded up as the allocator does. [Note: what a value costs]
_SLOT_BYTES: Final = 9  # a place in a list, which grows by an eighth at a time
_NUMBER_BYTES: Final = 32
_LIST_BYTES: Final = 120  # with its place among the objects that may occur twice
_TUPLE_BYTES: Final = 64
_TUPLE_SLOT_BYTES: Final = 17  # a tuple is made from a list
_DICT_BYTES: Final = 96
_FIRST_ENTRY_BYTES: Final = 192
_ENTRY_BYTES: Final = 128  # while the table grows, the old table still exists
_TEXT_BYTES: Final = 80
_CHECKED_ITEMS: Final = 256  # between two checks of the remaining bytes
_CHECKED_ENTRIES: Final = 128

_ASTRAL: Final = tuple(bytes((lead,)) for lead in range(0xF0, 0xF5))
_CONTINUATION: Final = bytes(range(0x80, 0xC0))
_BLOCK_BYTES: Final = 1 << 16

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


def allowed_bytes(weight_bytes: int) -> int:
    """The memory that the objects of a value of this weight may take. [Note: what a value costs]"""
    return FREE_BYTES + 2 * weight_bytes


def too_much_for_its_weight(weight_bytes: int) -> SerializationError:
    """The error for a value that would take more than `allowed_bytes`."""
    return SerializationError(
        f"a value of {weight_bytes} bytes arrived that would take more than {allowed_bytes(weight_bytes)} bytes of "
        "memory. Send numbers as a tensor, fewer and larger tensors, or the rest in several calls"
    )


def _text_bytes(data: bytes) -> int:
    """The memory of a `str` that is `data` in UTF-8: all characters have the width of the widest one, and during the
    construction the characters before the first of that width take half as much again."""
    size = len(data)
    if data.isascii():
        return _TEXT_BYTES + size
    starts = range(0, size, _BLOCK_BYTES)
    length = sum([len(data[at : at + _BLOCK_BYTES].translate(None, _CONTINUATION)) for at in starts])
    return _TEXT_BYTES + length * (6 if any([lead in data for lead in _ASTRAL]) else 3)


class PlainWriter:
    """Writes one value.

    Args:
        rref_type: recognizes remote references.
        max_items: limit on the parts.
        may_list_tensors: whether a long list of tensors counts as one part, and need not name each.

    Attributes:
        body: the written bytes.
        cost_bytes: the memory of the objects at the receiver. [Note: what a value costs]
        tensors: the tensors of the value; the body refers to them by index.
        may_list_tensors: see above.
        lists_tensors: whether it has a long list of tensors; the body then is valid only if all tensors differ.
        rrefs: the remote references of the value; the body refers to them by index.
        buffers: large strings and bytes that stay out of the body, which refers to them by index.
    """

    __slots__ = (
        "_known", "_known_rrefs", "_left", "_num_listed", "_rref_type", "_seen", "body", "buffers", "cost_bytes",
        "lists_tensors", "may_list_tensors", "rrefs", "tensors",
    )  # fmt: skip

    def __init__(self, rref_type: RRefType, max_items: int, *, may_list_tensors: bool = False) -> None:
        self._rref_type = rref_type
        self._left = max_items
        self.may_list_tensors = may_list_tensors
        self._num_listed = 0
        self.cost_bytes = 0
        self.lists_tensors = False
        self._seen: dict[int, int] = {}  # by id(): lists, dicts and bytearrays; tensors; references
        self._known: dict[int, int] = {}
        self._known_rrefs: dict[int, int] = {}
        self.body = bytearray()
        self.tensors: list[torch.Tensor] = []
        self.rrefs: list[object] = []
        self.buffers: list[memoryview] = []

    def write(self, obj: object) -> None:
        """Writes `obj`.

        Raises:
            NotPlain: a part of it is not plain, or it has more than `max_items` parts. The body is then unusable.
        """
        self._items((obj,), 0)

    def _items(self, items: tuple[Any, ...] | list[Any], depth: int) -> None:
        # One loop for all small types: a Python call per item would cost more than the item.
        body = self.body
        self._left -= len(items)
        if self._left < 0 or depth > MAX_DEPTH:
            raise NotPlain
        cost = 0
        for item in items:
            kind = type(item)
            if kind is torch.Tensor:
                self._tensor(item)
            elif kind is int:
                if 0 <= item < 128:
                    body.append(item)
                elif _MIN_INT64 <= item <= _MAX_INT64:
                    body += _write_int64(_INT64, item)
                    cost += _NUMBER_BYTES
                else:
                    data = item.to_bytes(item.bit_length() // 8 + 1, "little", signed=True)
                    body += _write_length(_BIG, len(data))
                    body += data
                    cost += _NUMBER_BYTES + 2 * len(data)
            elif kind is tuple:
                count = len(item)
                if count < 16:
                    body.append(_TUPLE0 + count)
                else:
                    body += _write_length(_TUPLE, count)
                if count:
                    cost += _TUPLE_BYTES + _TUPLE_SLOT_BYTES * count
                    self._items(item, depth + 1)
            elif kind is str:
                if len(item) < 128 and item.isascii():
                    body.append(_STR8)
                    body.append(len(item))
                    body += item.encode()
                    cost += _TEXT_BYTES + len(item)
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
                cost += _NUMBER_BYTES
            elif kind is dict:
                if item or id(item) in self._seen:
                    self._dict(item, depth)
                else:  # the keyword arguments of most calls
                    self._seen[id(item)] = len(self._seen)
                    body.append(_DICT0)
                    cost += _DICT_BYTES
            elif kind is list:
                if not self._written_before(item):
                    cost += _LIST_BYTES + _SLOT_BYTES * len(item)
                    if not self._tensor_list(item):
                        body += _write_length(_LIST, len(item))
                        self._items(item, depth + 1)
            else:
                self._other(item)
        self.cost_bytes += cost

    def _dict(self, item: dict[object, object], depth: int) -> None:
        if self._written_before(item):
            return
        count = len(item)
        if 2 * count > self._left:  # `_items` would notice only after a list of all parts was made
            raise NotPlain
        self.cost_bytes += _DICT_BYTES + _FIRST_ENTRY_BYTES + _ENTRY_BYTES * count if count else _DICT_BYTES
        if count < 16:
            self.body.append(_DICT0 + count)
        else:
            self.body += _write_length(_DICT, count)
        self._items([part for pair in item.items() for part in pair], depth + 1)

    def _written_before(self, item: object) -> bool:
        """Whether this mutable object is in the value already; then writes a reference to it."""
        seen = self._seen
        count = len(seen)
        index = seen.setdefault(id(item), count)
        if index == count:
            return False
        self.body += _write_length(_SAME, index)
        return True

    def _tensor(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or (hasattr(tensor, "_is_buffer") and self.may_list_tensors):
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
        """Writes a long list that has only tensors as one part; False for other lists."""
        count = len(items)
        may_be_one = count >= RUNS_FROM and self.may_list_tensors and type(items[0]) is torch.Tensor
        if not may_be_one or set(map(type, items)) != {torch.Tensor}:
            return False
        self._num_listed += count
        if self._num_listed > MAX_LISTED or any([hasattr(item, "_is_buffer") for item in items]):
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
        self.cost_bytes += _text_bytes(data)
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
            self.cost_bytes += _TEXT_BYTES + size  # the copy that the receiver makes first

    def _other(self, item: Any) -> None:
        kind = type(item)
        body = self.body
        if kind is bytes:
            self.cost_bytes += _TEXT_BYTES + len(item)
            self._bytes(item, _BYTES8, _BYTES32, _BYTES_BUFFER)
        elif kind is Parameter:
            if vars(item) and self.may_list_tensors:  # attributes, which only pickle can express
                raise NotPlain
            self._tensor(item)
        elif kind is complex:
            body += _COMPLEX_FORM.pack(_COMPLEX, item.real, item.imag)
            self.cost_bytes += _NUMBER_BYTES
        elif kind is bytearray:
            if not self._written_before(item):
                self._bytes(item, 0, _BYTEARRAY, _BYTEARRAY_BUFFER)
                self.cost_bytes += _LIST_BYTES + _TEXT_BYTES + len(item)
        elif kind is torch.Size:
            body += _write_length(_SIZE, len(item))
            self.cost_bytes += _TUPLE_BYTES + (_TUPLE_SLOT_BYTES + _SLOT_BYTES + _NUMBER_BYTES) * len(item)
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
            self.cost_bytes += _TEXT_BYTES + len(name)
        elif isinstance(item, self._rref_type):
            count = len(self.rrefs)
            index = self._known_rrefs.setdefault(id(item), count)
            if index == count:
                self.rrefs.append(item)
                self.cost_bytes += REFERENCE_BYTES
            body += _write_length(_EXTERNAL, index)
        else:
            raise NotPlain


def read_plain(
    body: bytes | memoryview,
    tensors: list[torch.Tensor],
    buffers: list[bytes | ReceiveBuffer],
    internalize: Internalize | None,
    weight_bytes: int | None = None,
    taken_bytes: int = 0,
) -> object:
    """The value that `PlainWriter` wrote.

    Args:
        body: the bytes that arrived; no other code may write to them.
        weight_bytes: the weight of the value, with all of its buffers; by default the size of `body`.
        taken_bytes: the memory taken by objects and copies made from it before. [Note: what a value costs]

    Raises:
        SerializationError: the bytes are not a plain value, or it would take too much for its weight; or the error of
            `Internalize`.
    """
    weight = len(body) if weight_bytes is None else weight_bytes
    reader = _Reader(body, tensors, buffers, internalize, weight, allowed_bytes(weight) - taken_bytes)
    try:
        items, end = reader.items(0, 1, 0)
    except (IndexError, KeyError, StructError, ValueError, TypeError, OverflowError) as exc:
        if isinstance(exc, SerializationError):
            raise
        raise SerializationError(f"a damaged value arrived: {exc}") from exc
    if end != len(body):
        raise SerializationError(f"a damaged value arrived: {len(body) - end} bytes are left over")
    return items[0]


class _Reader:
    __slots__ = ("body", "buffers", "fill", "internalize", "left", "made", "tensors", "used", "weight_bytes")

    def __init__(
        self,
        body: bytes | memoryview,
        tensors: list[torch.Tensor],
        buffers: list[bytes | ReceiveBuffer],
        internalize: Internalize | None,
        weight_bytes: int,
        left: int,
    ) -> None:
        self.body = body
        self.tensors = tensors
        self.buffers = buffers
        self.internalize = internalize
        self.weight_bytes = weight_bytes
        self.left = left
        self.fill: Fill | None = None
        self.made: list[object] = []
        self.used: set[int] = set()

    def take(self, num_bytes: int) -> None:
        """Counts memory that is about to be used. Raises `SerializationError` if the value may not take it."""
        self.left -= num_bytes
        if self.left < 0:
            raise too_much_for_its_weight(self.weight_bytes)

    def items(self, position: int, count: int, depth: int, into: list[Any] | None = None) -> tuple[list[Any], int]:
        """Reads `count` items from `position`; returns them and the next position. Their slots are already counted."""
        if depth > MAX_DEPTH:
            raise SerializationError(f"a value arrived that is nested deeper than {MAX_DEPTH} containers")
        body = self.body
        items: list[Any] = [] if into is None else into
        add = items.append
        while count > 0:
            cost = 0
            for _ in range(count if count < _CHECKED_ITEMS else _CHECKED_ITEMS):
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
                        few = tag - _TUPLE0
                        self.left -= cost + _TUPLE_BYTES + _TUPLE_SLOT_BYTES * few
                        cost = 0
                        parts, position = self.items(position, few, depth + 1)
                        add(tuple(parts))
                elif _DICT0 <= tag < _DICT0 + 16:
                    entries: dict[object, object] = {}
                    self.made.append(entries)
                    add(entries)
                    cost += _DICT_BYTES
                    if tag != _DICT0:  # with so few entries that `hash_work` does not check them
                        few = tag - _DICT0
                        self.left -= cost + _FIRST_ENTRY_BYTES + _ENTRY_BYTES * few
                        cost = 0
                        parts, position = self.items(position, 2 * few, depth + 1)
                        entries.update(zip(parts[::2], parts[1::2], strict=True))
                elif tag == _NONE:
                    add(None)
                elif tag == _STR8:
                    end = position + 1 + body[position]
                    data = self.bytes(position + 1, end)
                    cost += _TEXT_BYTES + len(data) if data.isascii() else _text_bytes(data)
                    add(data.decode("utf-8", "surrogatepass"))
                    position = end
                elif tag == _INT64:
                    cost += _NUMBER_BYTES
                    add(_read_int64(body, position)[0])
                    position += 8
                elif tag == _FLOAT:
                    cost += _NUMBER_BYTES
                    add(_read_float(body, position)[0])
                    position += 8
                elif tag == _TRUE or tag == _FALSE:
                    add(tag == _TRUE)
                else:
                    self.left -= cost
                    cost = 0
                    item, position = self.other(tag, position, depth)
                    add(item)
            self.left -= cost
            if self.left < 0:
                raise too_much_for_its_weight(self.weight_bytes)
            count -= _CHECKED_ITEMS
        return items, position

    def bytes(self, start: int, end: int) -> bytes:
        if end > len(self.body):
            raise SerializationError("a damaged value arrived: it ends too early")
        return bytes(self.body[start:end])

    def dictionary(self, position: int, count: int, depth: int) -> tuple[dict[object, object], int]:
        made: dict[object, object] = {}
        self.made.append(made)
        if not count:
            self.take(_DICT_BYTES)
            return made, position
        self.take(_DICT_BYTES + _FIRST_ENTRY_BYTES + _ENTRY_BYTES * count)
        if count >= CHECKED_FROM and self.fill is None:
            self.fill = bounded_fill(len(self.body))
        for start in range(0, count, _CHECKED_ENTRIES):
            before = position
            parts, position = self.items(position, 2 * min(_CHECKED_ENTRIES, count - start), depth + 1)
            keys, values = parts[::2], parts[1::2]
            if count < CHECKED_FROM or self.fill is None:
                made.update(zip(keys, values, strict=True))
            else:
                self.fill(made, keys, values, position - before)
        return made, position

    def other(self, tag: int, position: int, depth: int) -> tuple[object, int]:
        """The rarer types."""
        body = self.body
        if tag == _BYTES8:
            end = position + 1 + body[position]
            self.take(_TEXT_BYTES + body[position])
            return self.bytes(position + 1, end), end
        if tag == _COMPLEX:
            self.take(_NUMBER_BYTES)
            return complex(*_read_complex(body, position)), position + 16
        if tag == _DTYPE:
            return DTYPES[body[position]], position + 1
        if tag == _DEVICE:
            end = position + 1 + body[position]
            self.take(_TEXT_BYTES + body[position])
            return _device(self.bytes(position + 1, end)), end
        number: int = _read_length(body, position)[0]  # all others begin with a length or an index
        position += 4
        end = position + number
        if tag == _LIST:
            self.take(_LIST_BYTES + _SLOT_BYTES * number)
            made: list[object] = []
            self.made.append(made)
            return self.items(position, number, depth + 1, made)
        if tag == _TENSOR_LIST:
            self.take(_LIST_BYTES + _SLOT_BYTES * number)
            return self.tensor_list(number, _read_length(body, position)[0]), position + 4
        if tag == _TUPLE:
            self.take(_TUPLE_BYTES + _TUPLE_SLOT_BYTES * number)
            parts, position = self.items(position, number, depth + 1)
            return tuple(parts), position
        if tag == _DICT:
            return self.dictionary(position, number, depth)
        if tag == _SIZE:
            self.take(_TUPLE_BYTES + (_TUPLE_SLOT_BYTES + _SLOT_BYTES) * number)
            parts, position = self.items(position, number, depth + 1)
            if not {int}.issuperset(map(type, parts)):  # torch would read the element of a tensor
                raise TypeError("a torch.Size has a part that is not a number")
            return torch.Size(parts), position
        if tag == _STR32:
            data = self.bytes(position, end)
            self.take(_text_bytes(data))
            return data.decode("utf-8", "surrogatepass"), end
        if tag == _BYTES32:
            self.take(_TEXT_BYTES + number)
            return self.bytes(position, end), end
        if tag == _BIG:
            self.take(_NUMBER_BYTES + 2 * number)
            return int.from_bytes(self.bytes(position, end), "little", signed=True), end
        if tag == _BYTEARRAY:
            self.take(_LIST_BYTES + _TEXT_BYTES + number)
            self.made.append(bytearray(self.bytes(position, end)))
            return self.made[-1], end
        return self.reference(tag, number), position

    def tensor_list(self, count: int, start: int) -> list[object]:
        made: list[object] = list(self.tensors[start : start + count])
        if len(made) != count:
            raise SerializationError(f"a damaged value arrived: it lists {count} tensors, but has fewer")
        self.made.append(made)
        return made

    def reference(self, tag: int, index: int) -> object:
        """An object outside of the body, or an earlier one, by its index."""
        if tag == _TENSOR:
            return self.tensors[index]
        if tag == _SAME:
            return self.made[index]
        if tag == _EXTERNAL:
            if self.internalize is None:
                raise SerializationError("a remote reference arrived where none is allowed")
            return self.internalize(index)
        if tag in (_STR_BUFFER, _BYTES_BUFFER, _BYTEARRAY_BUFFER):
            if index in self.used:  # otherwise a short message could demand any amount of memory
                raise SerializationError("a damaged value arrived: two of its parts claim the same buffer")
            self.used.add(index)
            buffer = self.buffers[index]
            size = buffer.size if isinstance(buffer, ReceiveBuffer) else len(buffer)
            self.take(_TEXT_BYTES + size)
            data = bytes(buffer.view if isinstance(buffer, ReceiveBuffer) else buffer)  # lent memory could change
            if tag == _STR_BUFFER:
                self.take(_text_bytes(data))
                return data.decode("utf-8", "surrogatepass")
            if tag == _BYTES_BUFFER:
                return data
            self.take(_LIST_BYTES + len(data))
            self.made.append(bytearray(data))
            return self.made[-1]
        raise SerializationError(f"a damaged value arrived: it has an unknown tag {tag:#x}")


def _device(name: bytes) -> torch.device:
    try:
        return torch.device(name.decode())
    except RuntimeError as exc:
        raise SerializationError(f"the device {name.decode()!r} arrived, which this torch does not know") from exc
