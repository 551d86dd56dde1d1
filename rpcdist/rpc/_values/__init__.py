"""Python values on the wire; docs/values.md describes the format and its promises."""

from rpcdist.rpc._values.buffers import INLINE_LIMIT, ReceiveBuffer, takes_long
from rpcdist.rpc._values.codec import OnTensors, decode, encode_into
from rpcdist.rpc._values.pickled import NOT_ON_CALLEE, Reducer, register_reducer
from rpcdist.rpc._values.rebuild import GpuArrivals
from rpcdist.rpc._values.tensors import DeviceRoute, Lend, MapDevice
from rpcdist.transport.memory_copies import LargeBuffer

__all__ = [
    "INLINE_LIMIT",
    "NOT_ON_CALLEE",
    "DeviceRoute",
    "GpuArrivals",
    "LargeBuffer",
    "Lend",
    "MapDevice",
    "OnTensors",
    "ReceiveBuffer",
    "Reducer",
    "decode",
    "encode_into",
    "register_reducer",
    "takes_long",
]
