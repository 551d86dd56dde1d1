from rpcdist._proto import value_pb2 as _value_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RRefDelivered(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RRefMessage(_message.Message):
    __slots__ = ("fork_request", "fork_confirmed", "fork_refused", "child_confirmed", "user_deleted", "creation_failed")
    FORK_REQUEST_FIELD_NUMBER: _ClassVar[int]
    FORK_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    FORK_REFUSED_FIELD_NUMBER: _ClassVar[int]
    CHILD_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    USER_DELETED_FIELD_NUMBER: _ClassVar[int]
    CREATION_FAILED_FIELD_NUMBER: _ClassVar[int]
    fork_request: ForkRequest
    fork_confirmed: ForkConfirmed
    fork_refused: ForkRefused
    child_confirmed: ChildConfirmed
    user_deleted: UserDeleted
    creation_failed: CreationFailed
    def __init__(self, fork_request: _Optional[_Union[ForkRequest, _Mapping]] = ..., fork_confirmed: _Optional[_Union[ForkConfirmed, _Mapping]] = ..., fork_refused: _Optional[_Union[ForkRefused, _Mapping]] = ..., child_confirmed: _Optional[_Union[ChildConfirmed, _Mapping]] = ..., user_deleted: _Optional[_Union[UserDeleted, _Mapping]] = ..., creation_failed: _Optional[_Union[CreationFailed, _Mapping]] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("rref", "fork")
    RREF_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    rref: _value_pb2.UniqueId
    fork: _value_pb2.UniqueId
    def __init__(self, rref: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ..., fork: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ...) -> None: ...

class ForkConfirmed(_message.Message):
    __slots__ = ("rref", "fork")
    RREF_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    rref: _value_pb2.UniqueId
    fork: _value_pb2.UniqueId
    def __init__(self, rref: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ..., fork: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ...) -> None: ...

class ForkRefused(_message.Message):
    __slots__ = ("rref", "fork", "reason")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[ForkRefused.Reason]
        LEASE_EXPIRED: _ClassVar[ForkRefused.Reason]
    UNKNOWN: ForkRefused.Reason
    LEASE_EXPIRED: ForkRefused.Reason
    RREF_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    rref: _value_pb2.UniqueId
    fork: _value_pb2.UniqueId
    reason: ForkRefused.Reason
    def __init__(self, rref: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ..., fork: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ..., reason: _Optional[_Union[ForkRefused.Reason, str]] = ...) -> None: ...

class ChildConfirmed(_message.Message):
    __slots__ = ("rref", "fork")
    RREF_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    rref: _value_pb2.UniqueId
    fork: _value_pb2.UniqueId
    def __init__(self, rref: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ..., fork: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ...) -> None: ...

class UserDeleted(_message.Message):
    __slots__ = ("rref", "fork")
    RREF_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    rref: _value_pb2.UniqueId
    fork: _value_pb2.UniqueId
    def __init__(self, rref: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ..., fork: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ...) -> None: ...

class CreationFailed(_message.Message):
    __slots__ = ("rref", "fork", "text")
    RREF_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    rref: _value_pb2.UniqueId
    fork: _value_pb2.UniqueId
    text: str
    def __init__(self, rref: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ..., fork: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ..., text: _Optional[str] = ...) -> None: ...
