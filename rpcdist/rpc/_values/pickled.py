"""Values that are not plain: pickle protocol 5, with tensors, remote references and large buffers beside the pickle.

Reading a pickle runs code of the sender's choice, so only pickles of trusted peers are read, and only on pool threads
or waiting threads.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from rpcdist.errors import SerializationError, text_of
from rpcdist.rpc._values.buffers import ReceiveBuffer
from rpcdist.rpc._values.exceptions import add_note, reduce_exception
from rpcdist.rpc._values.tensors import DTYPE_CODES, Internalize, RRefType

Reducer = Callable[[Any], Any]
"""Returns the result that `__reduce__` should return for an object."""

NOT_ON_CALLEE: Final = (
    "Default RPC pickler does not serialize function code. "
    "Ensure that UDFs are defined on both caller and callee modules."
)

_HERE: Final = __name__
_QUANTIZED: Final = (torch.quint8, torch.qint8, torch.qint32)  # the types that torch makes from integers
_CLASS_STATE: Final = cloudpickle.cloudpickle._class_setstate
_reducers: Final[dict[type, Reducer]] = {}
_by_value_lock: Final = threading.Lock()


def register_reducer(cls: type, reducer: Reducer) -> None:
    """Sets how objects of exactly the type `cls` are pickled; the first registration of a type stays."""
    _reducers.setdefault(cls, reducer)


@dataclass(slots=True, eq=False)
class PickledParts:
    """A pickle, and the objects to which it refers by index. Both picklers fill it.

    Attributes:
        rref_type: recognizes remote references.
        body: the pickle.
        tensors: strided tensors.
        rrefs: remote references.
        buffers: the out-of-band buffers of the pickle, in its order; contiguous bytes.
    """

    lists_tensors = False  # see `PlainWriter`: the pickle names each

    rref_type: RRefType
    body: bytes = b""
    tensors: list[torch.Tensor] = field(default_factory=list)
    rrefs: list[object] = field(default_factory=list)
    buffers: list[memoryview] = field(default_factory=list)

    def add_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """The pickler's `buffer_callback`; True leaves the buffer in the pickle."""
        try:
            self.buffers.append(buffer.raw())
        except BufferError:  # not contiguous
            return True
        return False

    def reduce(self, obj: Any) -> Any:
        """The pickler's `reducer_override`: decides how an object of the value is pickled."""
        kind = type(obj)
        if kind is torch.Tensor or kind is Parameter:
            return self._tensor(obj)
        reducer = _reducers.get(kind)
        if reducer is not None:
            return reducer(obj)
        if kind is types.FunctionType or kind is type:
            return NotImplemented
        if isinstance(obj, self.rref_type):
            self.rrefs.append(obj)
            return external_, (len(self.rrefs) - 1,)
        if issubclass(kind, BaseException):
            return reduce_exception(obj)
        if isinstance(obj, torch.UntypedStorage):
            return _reduce_storage(obj)
        if isinstance(obj, torch.storage.TypedStorage):
            return _typed_storage, (obj._untyped_storage, obj.dtype)
        if kind is torch.jit.ScriptFunction:
            return script_function, (obj.qualified_name,)
        if isinstance(obj, torch.jit.ScriptModule):
            return _reduce_script_module(obj)
        if isinstance(obj, torch.futures.Future):
            raise SerializationError("Can not pickle torch.futures.Future; wait for it, and send its value")
        if isinstance(obj, FakeTensor):
            raise SerializationError("a FakeTensor has no values to send; make the tensor outside FakeTensorMode")
        return NotImplemented

    def _tensor(self, tensor: torch.Tensor) -> Any:
        reduced = self._reduced(tensor)
        # As in torch, the attributes of parameters and buffers are sent; torch's own way also sends them.
        if reduced is not NotImplemented and (type(tensor) is Parameter or hasattr(tensor, "_is_buffer")):
            return (*reduced, vars(tensor) or None, None, None, _set_attributes)
        return reduced

    def _reduced(self, tensor: torch.Tensor) -> Any:
        is_in_table = tensor.layout is torch.strided or tensor.layout is torch.sparse_coo
        if is_in_table and not tensor.is_nested and tensor.dtype in DTYPE_CODES:
            self.tensors.append(tensor)
            return tensor_, (len(self.tensors) - 1,)
        if type(tensor) is Parameter:
            return Parameter, (tensor.detach(), tensor.requires_grad)
        if tensor.dtype in _QUANTIZED and not tensor.is_nested:
            return _reduce_quantized(tensor)
        # torch splits the others into strided tensors and storages, and loses that a sparse one requires grad.
        if tensor.requires_grad and tensor.layout is not torch.strided:
            return _requiring_grad, (tensor.detach(),)
        return NotImplemented


def write_pickle(obj: object, rref_type: RRefType, by_value: bool) -> PickledParts:
    """Pickles `obj`.

    Args:
        rref_type: recognizes remote references.
        by_value: whether to send the code of functions and classes that the receiver cannot import, with cloudpickle.

    Raises:
        AttributeError, TypeError, pickle.PicklingError: the pickler's error for a part that cannot be pickled, with a
            note.
        SerializationError: a future, or a value that is nested too deeply. Errors of a user's `__reduce__` pass
            through.
    """
    parts = PickledParts(rref_type)
    file = io.BytesIO()
    pickler: Any
    if by_value:
        send_main_by_value()
        pickler = _ByValuePickler(file, 5, buffer_callback=parts.add_buffer)
        pickler.reduce = parts.reduce
    else:
        pickler = _ValuePickler(file, 5, buffer_callback=parts.add_buffer)
        pickler.reducer_override = parts.reduce
    try:
        pickler.dump(obj)
    except (AttributeError, TypeError, pickle.PicklingError) as exc:
        add_note(
            exc,
            "rpcdist could not pickle a value. Send only data and objects of classes that both sides can import. "
            "Define functions and classes at the top level of a module, or let the sender send them by value: "
            "RpcOptions(by_value=True). Give classes that hold locks, files or sockets a `__reduce__` or "
            "`__getstate__`.",
        )
        raise
    except RecursionError as exc:
        raise SerializationError(
            "a value is nested too deeply to be pickled; flatten it, for example into a list of its parts"
        ) from exc
    parts.body = file.getvalue()
    return parts


def read_pickle(
    body: bytes | memoryview,
    tensors: list[torch.Tensor],
    buffers: Sequence[bytes | memoryview | ReceiveBuffer],
    internalize: Internalize | None,
    *,
    is_trial: bool = False,
) -> object:
    """The value of a pickle that `write_pickle` made.

    With `is_trial`, this process has made the pickle, so its classes exist, and stay unchanged.

    Raises:
        SerializationError: it cannot be rebuilt here; the cause is the error of the unpickler, or of a user's
            `__setstate__`, `SystemExit` included: an arriving value must not end this program.
    """
    out_of_band = (buffer.view if isinstance(buffer, ReceiveBuffer) else bytearray(buffer) for buffer in buffers)
    try:
        return _ValueUnpickler(io.BytesIO(body), tensors, out_of_band, internalize, is_trial).load()
    except (Exception, SystemExit, GeneratorExit) as exc:
        advice = f" {NOT_ON_CALLEE}" if issubclass(type(exc), AttributeError | ImportError) else ""
        raise SerializationError(
            f"an arrived value cannot be unpickled here: {type(exc).__name__}: {text_of(exc)}.{advice}"
        ) from exc


class _ValuePickler(pickle.Pickler):
    """Has attributes, unlike its base, and so a `reducer_override`."""


class _ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    reduce: Callable[[object], Any]

    def reducer_override(self, obj: Any) -> Any:
        reduced = self.reduce(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


def send_main_by_value() -> None:
    """Makes cloudpickle treat the main module of a spawned process like `__main__`: by value."""
    main = sys.modules.get("__mp_main__")
    if main is not None and main.__name__ == "__mp_main__":
        with _by_value_lock:
            if main.__name__ not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(main)


class _ValueUnpickler(pickle.Unpickler):
    """Inserts the tensors and remote references of the value where its pickle refers to them."""

    def __init__(
        self,
        file: io.BytesIO,
        tensors: list[torch.Tensor],
        buffers: Any,
        internalize: Internalize | None,
        is_trial: bool,
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._tensors = tensors
        self._internalize = internalize
        self._is_trial = is_trial

    def find_class(self, module: str, name: str) -> Any:
        if module == _HERE:
            if name == "tensor_":
                return self._tensors.__getitem__
            if name == "external_":
                if self._internalize is None:
                    raise SerializationError("a remote reference arrived where none is allowed")
                return self._internalize
        elif module == "__mp_main__":
            # The script of a spawned process; here it is the script, too.
            module = "__main__"
        elif module == "torch._utils" and name == "_rebuild_tensor_v3":
            return _rebuild_tensor_v3
        elif module == _CLASS_STATE.__module__ and name == _CLASS_STATE.__name__:
            return _leave_class if self._is_trial else _set_class_state
        return super().find_class(module, name)


def _leave_class(cls: type, *_: object) -> type:
    return cls


def _set_class_state(cls: type, state: Any) -> type:
    """Sets the methods of a class sent by value, unless it exists here: there it has its methods and their globals."""
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return cls if found is cls else _CLASS_STATE(cls, state)  # type: ignore[no-any-return]


def tensor_(index: int) -> torch.Tensor:
    """Represents tensor `index` in a pickle; the unpickler replaces this function by its table."""
    raise SerializationError(f"tensor {index} belongs to a value of rpcdist, and can be read only as a part of it")


def external_(index: int) -> object:
    """Represents external `index` in a pickle, like `tensor_`."""
    raise SerializationError(
        f"remote reference {index} belongs to a value of rpcdist, and can be read only as a part of it"
    )


def script_function(qualified_name: str) -> Any:
    """The TorchScript function that this process has compiled under a name; as in torch, its code is not sent."""
    function = torch.jit._state._python_cu.find_function(qualified_name)
    if function is None:
        raise SerializationError(
            f"this process has no TorchScript function {qualified_name!r}; compile it in a module that both processes "
            "import"
        )
    return function


def _reduce_script_module(module: torch.jit.ScriptModule) -> Any:
    """Sends a compiled or traced module, with its code, in TorchScript's own format."""
    file = io.BytesIO()
    torch.jit.save(module, file)
    return _script_module, (pickle.PickleBuffer(file.getbuffer()),)


def _script_module(saved: bytes | bytearray | memoryview) -> Any:
    return torch.jit.load(io.BytesIO(saved))


def _set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    vars(tensor).update(attributes)


def _requiring_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


def _reduce_quantized(tensor: torch.Tensor) -> Any:
    if tensor.qscheme() == torch.per_tensor_affine:
        return torch._make_per_tensor_quantized_tensor, (tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point())
    parts = (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis())
    return torch._make_per_channel_quantized_tensor, (tensor.int_repr(), *parts)


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    """Sends a storage as a tensor of bytes, so that it shares memory with the tensors of the value."""
    if storage.device.type != "cpu":
        return NotImplemented
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    return _storage, (flat,)


def _storage(flat: torch.Tensor) -> torch.UntypedStorage:
    storage = flat.untyped_storage()
    return storage if storage.nbytes() == flat.nbytes else flat.clone().untyped_storage()


def _rebuild_tensor_v3(storage: torch.UntypedStorage, *rest: Any) -> torch.Tensor:
    """torch's function, for subclasses of dtypes without a typed storage, which it needs nevertheless."""
    return torch._utils._rebuild_tensor_v3(_typed_storage(storage, torch.uint8), *rest)  # type: ignore[no-any-return]


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
