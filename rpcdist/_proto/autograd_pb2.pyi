from rpcdist._proto import value_pb2 as _value_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AutogradDelivered(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AutogradMessage(_message.Message):
    __slots__ = ("context", "backward", "begin", "verdicts", "gradients", "done", "aborted", "release")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    context: int
    backward: int
    begin: BackwardBegin
    verdicts: Verdicts
    gradients: Gradients
    done: BackwardDone
    aborted: BackwardAborted
    release: ContextRelease
    def __init__(self, context: _Optional[int] = ..., backward: _Optional[int] = ..., begin: _Optional[_Union[BackwardBegin, _Mapping]] = ..., verdicts: _Optional[_Union[Verdicts, _Mapping]] = ..., gradients: _Optional[_Union[Gradients, _Mapping]] = ..., done: _Optional[_Union[BackwardDone, _Mapping]] = ..., aborted: _Optional[_Union[BackwardAborted, _Mapping]] = ..., release: _Optional[_Union[ContextRelease, _Mapping]] = ...) -> None: ...

class BackwardBegin(_message.Message):
    __slots__ = ("fast", "retain_graph", "timeout_us", "child", "received")
    FAST_FIELD_NUMBER: _ClassVar[int]
    RETAIN_GRAPH_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_US_FIELD_NUMBER: _ClassVar[int]
    CHILD_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    fast: bool
    retain_graph: bool
    timeout_us: int
    child: bool
    received: Verdicts
    def __init__(self, fast: bool = ..., retain_graph: bool = ..., timeout_us: _Optional[int] = ..., child: bool = ..., received: _Optional[_Union[Verdicts, _Mapping]] = ...) -> None: ...

class Verdicts(_message.Message):
    __slots__ = ("used", "unused", "open", "partly")
    USED_FIELD_NUMBER: _ClassVar[int]
    UNUSED_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PARTLY_FIELD_NUMBER: _ClassVar[int]
    used: _containers.RepeatedScalarFieldContainer[int]
    unused: _containers.RepeatedScalarFieldContainer[int]
    open: _containers.RepeatedScalarFieldContainer[int]
    partly: _containers.RepeatedCompositeFieldContainer[PartlyUsed]
    def __init__(self, used: _Optional[_Iterable[int]] = ..., unused: _Optional[_Iterable[int]] = ..., open: _Optional[_Iterable[int]] = ..., partly: _Optional[_Iterable[_Union[PartlyUsed, _Mapping]]] = ...) -> None: ...

class PartlyUsed(_message.Message):
    __slots__ = ("message", "tensors")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    message: int
    tensors: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, message: _Optional[int] = ..., tensors: _Optional[_Iterable[int]] = ...) -> None: ...

class Gradients(_message.Message):
    __slots__ = ("messages", "value", "table", "counts", "absent")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedScalarFieldContainer[int]
    value: _value_pb2.Value
    table: bytes
    counts: _containers.RepeatedScalarFieldContainer[int]
    absent: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, messages: _Optional[_Iterable[int]] = ..., value: _Optional[_Union[_value_pb2.Value, _Mapping]] = ..., table: _Optional[bytes] = ..., counts: _Optional[_Iterable[int]] = ..., absent: _Optional[_Iterable[int]] = ...) -> None: ...

class BackwardDone(_message.Message):
    __slots__ = ("is_heavy",)
    IS_HEAVY_FIELD_NUMBER: _ClassVar[int]
    is_heavy: bool
    def __init__(self, is_heavy: bool = ...) -> None: ...

class BackwardAborted(_message.Message):
    __slots__ = ("worker", "worker_name", "type_name", "text", "traceback")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    WORKER_NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    worker: int
    worker_name: str
    type_name: str
    text: str
    traceback: str
    def __init__(self, worker: _Optional[int] = ..., worker_name: _Optional[str] = ..., type_name: _Optional[str] = ..., text: _Optional[str] = ..., traceback: _Optional[str] = ...) -> None: ...

class ContextRelease(_message.Message):
    __slots__ = ("others",)
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    others: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, others: _Optional[_Iterable[int]] = ...) -> None: ...
