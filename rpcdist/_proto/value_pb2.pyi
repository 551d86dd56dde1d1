from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Value(_message.Message):
    __slots__ = ("encoding", "body", "tensors", "buffers", "rrefs", "body_buffer", "autograd", "gpu_loans", "gpus", "weight")
    class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PLAIN: _ClassVar[Value.Encoding]
        PICKLE: _ClassVar[Value.Encoding]
    PLAIN: Value.Encoding
    PICKLE: Value.Encoding
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    RREFS_FIELD_NUMBER: _ClassVar[int]
    BODY_BUFFER_FIELD_NUMBER: _ClassVar[int]
    AUTOGRAD_FIELD_NUMBER: _ClassVar[int]
    GPU_LOANS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    encoding: Value.Encoding
    body: bytes
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    buffers: _containers.RepeatedCompositeFieldContainer[Buffer]
    rrefs: _containers.RepeatedCompositeFieldContainer[RRefFork]
    body_buffer: int
    autograd: AutogradLeg
    gpu_loans: _containers.RepeatedCompositeFieldContainer[GpuLoan]
    gpus: _containers.RepeatedScalarFieldContainer[int]
    weight: bytes
    def __init__(self, encoding: _Optional[_Union[Value.Encoding, str]] = ..., body: _Optional[bytes] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., buffers: _Optional[_Iterable[_Union[Buffer, _Mapping]]] = ..., rrefs: _Optional[_Iterable[_Union[RRefFork, _Mapping]]] = ..., body_buffer: _Optional[int] = ..., autograd: _Optional[_Union[AutogradLeg, _Mapping]] = ..., gpu_loans: _Optional[_Iterable[_Union[GpuLoan, _Mapping]]] = ..., gpus: _Optional[_Iterable[int]] = ..., weight: _Optional[bytes] = ...) -> None: ...

class AutogradLeg(_message.Message):
    __slots__ = ("message", "stamp")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    message: int
    stamp: int
    def __init__(self, message: _Optional[int] = ..., stamp: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "buffer", "offset", "shape", "stride", "requires_grad", "parameter", "device", "sparse", "run", "unmapped")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_GRAD_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    UNMAPPED_FIELD_NUMBER: _ClassVar[int]
    dtype: int
    buffer: int
    offset: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    stride: _containers.RepeatedScalarFieldContainer[int]
    requires_grad: bool
    parameter: bool
    device: str
    sparse: Sparse
    run: int
    unmapped: bool
    def __init__(self, dtype: _Optional[int] = ..., buffer: _Optional[int] = ..., offset: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., stride: _Optional[_Iterable[int]] = ..., requires_grad: bool = ..., parameter: bool = ..., device: _Optional[str] = ..., sparse: _Optional[_Union[Sparse, _Mapping]] = ..., run: _Optional[int] = ..., unmapped: bool = ...) -> None: ...

class Sparse(_message.Message):
    __slots__ = ("indices", "values", "coalesced")
    INDICES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    COALESCED_FIELD_NUMBER: _ClassVar[int]
    indices: int
    values: int
    coalesced: bool
    def __init__(self, indices: _Optional[int] = ..., values: _Optional[int] = ..., coalesced: bool = ...) -> None: ...

class Buffer(_message.Message):
    __slots__ = ("size", "inline", "gpu_loan", "offset")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    GPU_LOAN_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    size: int
    inline: bytes
    gpu_loan: int
    offset: int
    def __init__(self, size: _Optional[int] = ..., inline: _Optional[bytes] = ..., gpu_loan: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class GpuLoan(_message.Message):
    __slots__ = ("number", "memory", "sequence", "offset", "size", "gpu")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    number: int
    memory: bytes
    sequence: int
    offset: int
    size: int
    gpu: bytes
    def __init__(self, number: _Optional[int] = ..., memory: _Optional[bytes] = ..., sequence: _Optional[int] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., gpu: _Optional[bytes] = ...) -> None: ...

class UniqueId(_message.Message):
    __slots__ = ("created_on", "local_id", "incarnation")
    CREATED_ON_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    created_on: int
    local_id: int
    incarnation: int
    def __init__(self, created_on: _Optional[int] = ..., local_id: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class RRefFork(_message.Message):
    __slots__ = ("rref", "fork", "parent", "owner", "owner_incarnation", "owner_name", "is_serial")
    RREF_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    OWNER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OWNER_NAME_FIELD_NUMBER: _ClassVar[int]
    IS_SERIAL_FIELD_NUMBER: _ClassVar[int]
    rref: UniqueId
    fork: UniqueId
    parent: UniqueId
    owner: int
    owner_incarnation: int
    owner_name: str
    is_serial: bool
    def __init__(self, rref: _Optional[_Union[UniqueId, _Mapping]] = ..., fork: _Optional[_Union[UniqueId, _Mapping]] = ..., parent: _Optional[_Union[UniqueId, _Mapping]] = ..., owner: _Optional[int] = ..., owner_incarnation: _Optional[int] = ..., owner_name: _Optional[str] = ..., is_serial: bool = ...) -> None: ...
