"""The numbers under which torch dtypes travel.

The numbers are part of the wire format: new dtypes get new numbers, and none is ever used twice. Types that the
running torch does not have are left out, and a tensor of such a type is refused when it arrives.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

_CODES: Final = {
    # 0 costs no byte on the wire, so it belongs to the most common one.
    "float32": 0,
    "float64": 1,
    "float16": 2,
    "bfloat16": 3,
    "int64": 4,
    "int32": 5,
    "int16": 6,
    "int8": 7,
    "uint8": 8,
    "uint16": 9,
    "uint32": 10,
    "uint64": 11,
    "bool": 12,
    "complex64": 13,
    "complex128": 14,
    "complex32": 15,
    "float8_e4m3fn": 16,
    "float8_e4m3fnuz": 17,
    "float8_e5m2": 18,
    "float8_e5m2fnuz": 19,
    "float8_e8m0fnu": 20,
    "float4_e2m1fn_x2": 21,
    "int1": 32,
    "int2": 33,
    "int3": 34,
    "int4": 35,
    "int5": 36,
    "int6": 37,
    "int7": 38,
    "uint1": 40,
    "uint2": 41,
    "uint3": 42,
    "uint4": 43,
    "uint5": 44,
    "uint6": 45,
    "uint7": 46,
}


class DtypeInfo(NamedTuple):
    """What the decoder has to know about a dtype."""

    dtype: torch.dtype
    itemsize: int
    differentiable: bool


def _available() -> dict[int, DtypeInfo]:
    found = {}
    for name, code in _CODES.items():
        dtype = getattr(torch, name, None)
        if isinstance(dtype, torch.dtype):
            found[code] = DtypeInfo(dtype, dtype.itemsize, dtype.is_floating_point or dtype.is_complex)
    return found


DTYPES: Final[dict[int, DtypeInfo]] = _available()
DTYPE_CODES: Final[dict[torch.dtype, int]] = {info.dtype: code for code, info in DTYPES.items()}
