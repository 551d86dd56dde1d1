"""Values that need pickle: what they carry beside it, code by value, and errors on both sides."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torchscript_functions import compiled
from values_helpers import encode, round_trip, wire

from rpcdist._proto import value_pb2
from rpcdist.errors import SerializationError
from rpcdist.rpc._values import pickled
from rpcdist.rpc._values.buffers import INLINE_LIMIT, copy_of
from rpcdist.rpc._values.codec import decode
from rpcdist.rpc._values.pickled import register_reducer

PICKLE = value_pb2.Value.PICKLE


@dataclass
class Holder:
    """Something that only pickle knows."""

    item: Any


def iter_of_nothing() -> Iterator[int]:
    """A generator, which nothing can send."""
    yield from ()


class Unreadable:
    def __setstate__(self, state: object) -> None:
        raise KeyError("no state today")

    def __getstate__(self) -> object:
        return 1


class Stubborn:
    def __reduce__(self) -> Any:
        raise ValueError("I stay here")


class Doubling(torch.nn.Module):
    """For TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    "make",
    [
        lambda: compiled(Doubling()),
        lambda: torch.jit.trace(Doubling(), torch.ones(2)),
        lambda: torch.jit.freeze(compiled(Doubling().eval())),
        lambda: compiled(torch.nn.Linear(200, 200)),  # more than travels inside of a message
    ],
    ids=["scripted", "traced", "frozen", "large"],
)
@pytest.mark.parametrize("by_value", [False, True])
def test_modules_in_torchscript_travel_with_their_code(make: Callable[[], Any], by_value: bool) -> None:
    module = make()
    x = torch.rand(200) if hasattr(module, "in_features") else torch.rand(2)
    arrived = round_trip([Holder(module), 1], by_value=by_value)[1][0].item
    assert isinstance(arrived, torch.jit.ScriptModule) and arrived is not module
    assert torch.equal(arrived(x), module(x))
    assert [part.requires_grad for part in arrived.parameters()] == [part.requires_grad for part in module.parameters()]


def test_tensors_in_objects_go_into_the_table() -> None:
    tensor = torch.randn(INLINE_LIMIT)
    encoded, result = round_trip(Holder([tensor, tensor[:5], Holder(tensor)]))
    assert encoded.value.encoding == PICKLE
    assert len(encoded.large) == 1
    first, part, inner = result.item
    assert inner.item is first
    part.zero_()
    assert first[:5].tolist() == [0.0] * 5
    assert torch.equal(first[5:], tensor[5:])


@pytest.mark.parametrize("length", [3, INLINE_LIMIT])
def test_arrays_travel_beside_the_pickle_and_arrive_writable(length: int) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(float(length))
    encoded, (copy, fortran, frozen, tensor) = round_trip(
        (array, numpy.asfortranarray(array.reshape(1, -1).repeat(2, 0)), array[::3], torch.ones(length))
    )
    assert len(encoded.value.body) < 1000
    assert (copy == array).all()
    copy += 1
    assert fortran.flags.f_contiguous and fortran.flags.writeable
    assert (frozen == array[::3]).all()
    assert tensor.sum() == length


def test_arrays_are_not_copied_by_encode() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(INLINE_LIMIT)
    (buffer,) = encode(array).large
    array[0] = 1.0
    assert bytes(buffer.view[:8]) == array[:1].tobytes()


def test_read_only_and_unusual_buffers() -> None:
    data = Holder(pickle.PickleBuffer(b"x" * 100))
    _, result = round_trip(data)
    assert bytes(result.item) == b"x" * 100
    with pytest.raises((BufferError, pickle.PicklingError)):
        encode(Holder(pickle.PickleBuffer(memoryview(b"abcdef")[::2])))


def test_large_bytes_in_objects() -> None:
    encoded, result = round_trip(Holder(b"x" * 1_000_000))
    assert result.item == b"x" * 1_000_000
    assert encoded.value.ByteSize() < 100


def test_torch_constants() -> None:
    parts = {torch.float8_e5m2, torch.device("cuda:3"), torch.strided, torch.sparse_coo, torch.channels_last}
    assert round_trip(parts)[1] == parts
    assert round_trip(Holder(torch.Size([1, 2])))[1].item == torch.Size([1, 2])


class Registered:
    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.Lock()


@pytest.fixture
def registered() -> Iterator[None]:
    register_reducer(Registered, lambda obj: (Registered, (obj.number,)))
    register_reducer(Registered, lambda obj: (Registered, (-1,)))  # the first one stays
    yield
    pickled._reducers.pop(Registered)


@pytest.mark.usefixtures("registered")
def test_registered_reducers() -> None:
    assert round_trip([Registered(5)])[1][0].number == 5


def test_without_its_reducer_it_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object") as error:
        encode(Registered(5))
    assert "both sides can import" in "".join(error.value.__notes__)


def test_what_cannot_be_pickled_raises_what_pickle_raises() -> None:
    def local() -> None:
        """Has no name at the receiver."""

    cases = [
        (local, AttributeError, "local object"),
        (iter_of_nothing(), TypeError, "generator"),
        (sys, TypeError, "module"),
    ]
    for obj, kind, text in cases:
        with pytest.raises(kind, match=text) as error:
            encode((obj, torch.ones(2)))
        assert error.value.__notes__
    with pytest.raises(ValueError, match="I stay here"):
        encode(Stubborn())
    with pytest.raises(SerializationError, match=r"Can not pickle torch\.futures\.Future"):
        encode((torch.futures.Future(),))
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SerializationError, match="nested too deeply to be pickled; flatten it"):
        encode(deep)


def test_what_cannot_be_unpickled_names_the_cause() -> None:
    with pytest.raises(SerializationError, match="KeyError: 'no state today'") as error:
        decode(encode(Unreadable()).value)
    assert isinstance(error.value.__cause__, KeyError)
    missing = encode(Holder(1)).value
    missing.body = missing.body.replace(b"Holder", b"Folder")
    with pytest.raises(SerializationError, match="RPC pickler does not serialize"):
        decode(missing)
    cut = encode(Holder(1)).value
    cut.body = cut.body[:-5]
    with pytest.raises(SerializationError, match="cannot be unpickled here"):
        decode(cut)
    absent = encode(Holder(torch.ones(1))).value
    del absent.tensors[:]
    with pytest.raises(SerializationError, match="IndexError"):
        decode(absent)


def test_table_entries_cannot_be_read_outside() -> None:
    body = encode(Holder(torch.ones(1))).value.body
    with pytest.raises(SerializationError, match="only as a part of it"):
        pickle.loads(body)


def test_values_within_values() -> None:
    """A class may encode parts of itself while it is being encoded."""

    result: Any = round_trip(Nested(torch.ones(3)))[1]
    assert torch.equal(result.tensor, torch.ones(3))


class Nested:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> bytes:
        return encode(Holder(self.tensor)).value.SerializeToString()

    def __setstate__(self, state: bytes) -> None:
        holder: Any = decode(value_pb2.Value.FromString(state))
        self.tensor = holder.item


def test_code_by_value() -> None:
    offset = torch.ones(2)

    class Local:
        def add(self, number: int) -> Tensor:
            return offset + number

    with pytest.raises(AttributeError):
        encode(Local())
    encoded, (function, obj) = round_trip((lambda number: number + offset, Local()), by_value=True)
    assert function(1).tolist() == [2, 2]
    assert obj.add(2).tolist() == [3, 3]
    assert len(encoded.value.tensors) == 1


SCRIPT = """
    import multiprocessing, sys
    from rpcdist._proto import value_pb2
    from rpcdist.rpc._values.codec import decode, encode_into
    from rpcdist.rpc._values.function_names import function_reference

    class Own:
        pass

    def own():
        return 42

    def encoded(obj, **options):
        value = value_pb2.Value()
        encode_into(value, obj, **options)
        return value.SerializeToString()

    def child(connection):
        connection.send((encoded([Own(), own]), function_reference(own), encoded(own, by_value=True)))

    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=child, args=(there,))
        process.start()
        there.close()
        raw, name, by_value = here.recv()
        process.join(60)
        result = decode(value_pb2.Value.FromString(raw))
        assert type(result[0]) is Own, result
        assert result[1] is own
        assert name == "__main__:own", name
        function = decode(value_pb2.Value.FromString(by_value))
        assert function is not own and function() == 42
        print("done")
"""


@pytest.mark.multiproc
def test_the_script_of_a_spawned_process_is_the_script_here(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert run.stdout == "done\n", run.stderr


def test_cyclic_objects_with_large_parts() -> None:
    holder = Holder(None)
    holder.item = [holder, torch.randn(INLINE_LIMIT)]
    encoded = encode(holder)
    result: Any = decode(wire(encoded), [copy_of(buffer) for buffer in encoded.large])
    assert result.item[0] is result
    assert torch.equal(result.item[1], holder.item[1])
