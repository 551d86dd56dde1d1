from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ReachRequest(_message.Message):
    __slots__ = ("address", "reply_bytes", "padding")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REPLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    address: str
    reply_bytes: int
    padding: bytes
    def __init__(self, address: _Optional[str] = ..., reply_bytes: _Optional[int] = ..., padding: _Optional[bytes] = ...) -> None: ...

class ReachReply(_message.Message):
    __slots__ = ("failure", "channel", "time_s", "versions", "padding")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    failure: str
    channel: str
    time_s: float
    versions: _containers.ScalarMap[str, str]
    padding: bytes
    def __init__(self, failure: _Optional[str] = ..., channel: _Optional[str] = ..., time_s: _Optional[float] = ..., versions: _Optional[_Mapping[str, str]] = ..., padding: _Optional[bytes] = ...) -> None: ...
