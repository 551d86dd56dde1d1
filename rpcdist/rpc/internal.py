"""Names of torch's `torch.distributed.rpc.internal` that programs and tests use, on our own codec.

Calls do not use it: `rpcdist.rpc._values` encodes them straight into messages. These names serve programs that pickle
parts of a call themselves, or register how a class of theirs travels.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

from rpcdist.errors import SerializationError
from rpcdist.profile_ranges import profiling_key
from rpcdist.rpc._values.buffers import ReceiveBuffer
from rpcdist.rpc._values.pickled import read_pickle, register_reducer, write_pickle
from rpcdist.rpc.rref import RRef

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]

T = TypeVar("T")


class RPCExecMode(enum.Enum):
    """The kinds of calls, as profilers name them."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function of the user's, and the arguments to call it with."""

    func: Callable[..., object]
    args: Sequence[object]
    kwargs: Mapping[str, object] | None


class RemoteException(NamedTuple):
    """The text and the type of an exception that a call raised."""

    msg: str
    exception_type: type[BaseException]


class _InternalRPCPickler:
    """Pickles a value into bytes and a table of its tensors, which are not copied."""

    def serialize(self, obj: object) -> tuple[bytes, list[torch.Tensor]]:
        """Pickle a value.

        Runs user code (`__reduce__`) on the calling thread. It may call this method again.

        Returns:
            The bytes, and the tensors that they refer to by index.

        Raises:
            AttributeError, TypeError, pickle.PicklingError: a part of it cannot be pickled.
            SerializationError: it holds a future, or is nested too deeply.
        """
        parts = write_pickle(obj, RRef, by_value=False)
        shares = [cast(Any, rref)._serialize() for rref in parts.rrefs]
        frame = (parts.body, [bytes(buffer) for buffer in parts.buffers], shares)
        return pickle.dumps(frame, protocol=5), parts.tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> object:
        """Rebuild the value that `serialize` pickled. Runs code of the sender's choice.

        Raises:
            SerializationError: it cannot be rebuilt here; the text says why.
        """
        body, buffers, forks = cast(tuple[bytes, list[bytes | ReceiveBuffer], list[object]], pickle.loads(binary_data))

        def internalize(index: int) -> object:
            if index >= len(forks):
                raise SerializationError(f"the value refers to remote reference {index} of {len(forks)}")
            return RRef._deserialize(forks[index])

        return read_pickle(body, tensor_table, buffers, internalize)

    _register_reducer = staticmethod(register_reducer)
    """Say how objects of exactly this class travel, in calls too; the first registration of a class stays."""


_internal_rpc_pickler = _InternalRPCPickler()


serialize = _internal_rpc_pickler.serialize
"""`_InternalRPCPickler.serialize` of the pickler that all calls share."""

deserialize = _internal_rpc_pickler.deserialize
"""`_InternalRPCPickler.deserialize` of the pickler that all calls share."""


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """The name under which a call appears in a profile, such as `rpc_sync#torch.add(worker0 -> worker1)`."""
    return profiling_key(exec_type.value, func_name, current_worker_name, dst_worker_name)
