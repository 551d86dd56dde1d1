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
    __slots__ = ("context", "backward", "part", "aborted", "release")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    context: int
    backward: int
    part: bytes
    aborted: BackwardAborted
    release: ContextRelease
    def __init__(self, context: _Optional[int] = ..., backward: _Optional[int] = ..., part: _Optional[bytes] = ..., aborted: _Optional[_Union[BackwardAborted, _Mapping]] = ..., release: _Optional[_Union[ContextRelease, _Mapping]] = ...) -> None: ...

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
