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
    __slots__ = ("fork_request", "fork_confirmed", "fork_refused", "child_confirmed", "user_deleted", "share_query", "share_lost", "creation_query", "creation_probe", "creation_over", "users_deleted")
    FORK_REQUEST_FIELD_NUMBER: _ClassVar[int]
    FORK_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    FORK_REFUSED_FIELD_NUMBER: _ClassVar[int]
    CHILD_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    USER_DELETED_FIELD_NUMBER: _ClassVar[int]
    SHARE_QUERY_FIELD_NUMBER: _ClassVar[int]
    SHARE_LOST_FIELD_NUMBER: _ClassVar[int]
    CREATION_QUERY_FIELD_NUMBER: _ClassVar[int]
    CREATION_PROBE_FIELD_NUMBER: _ClassVar[int]
    CREATION_OVER_FIELD_NUMBER: _ClassVar[int]
    USERS_DELETED_FIELD_NUMBER: _ClassVar[int]
    fork_request: ForkRequest
    fork_confirmed: ForkConfirmed
    fork_refused: ForkRefused
    child_confirmed: ChildConfirmed
    user_deleted: UserDeleted
    share_query: ShareQuery
    share_lost: ShareLost
    creation_query: CreationQuery
    creation_probe: CreationProbe
    creation_over: CreationOver
    users_deleted: UsersDeleted
    def __init__(self, fork_request: _Optional[_Union[ForkRequest, _Mapping]] = ..., fork_confirmed: _Optional[_Union[ForkConfirmed, _Mapping]] = ..., fork_refused: _Optional[_Union[ForkRefused, _Mapping]] = ..., child_confirmed: _Optional[_Union[ChildConfirmed, _Mapping]] = ..., user_deleted: _Optional[_Union[UserDeleted, _Mapping]] = ..., share_query: _Optional[_Union[ShareQuery, _Mapping]] = ..., share_lost: _Optional[_Union[ShareLost, _Mapping]] = ..., creation_query: _Optional[_Union[CreationQuery, _Mapping]] = ..., creation_probe: _Optional[_Union[CreationProbe, _Mapping]] = ..., creation_over: _Optional[_Union[CreationOver, _Mapping]] = ..., users_deleted: _Optional[_Union[UsersDeleted, _Mapping]] = ...) -> None: ...

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
        CREATION_FAILED: _ClassVar[ForkRefused.Reason]
        OWNER_LOST: _ClassVar[ForkRefused.Reason]
        SHARE_LOST: _ClassVar[ForkRefused.Reason]
        NOT_HELD: _ClassVar[ForkRefused.Reason]
        TOO_MANY: _ClassVar[ForkRefused.Reason]
    UNKNOWN: ForkRefused.Reason
    LEASE_EXPIRED: ForkRefused.Reason
    CREATION_FAILED: ForkRefused.Reason
    OWNER_LOST: ForkRefused.Reason
    SHARE_LOST: ForkRefused.Reason
    NOT_HELD: ForkRefused.Reason
    TOO_MANY: ForkRefused.Reason
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

class UsersDeleted(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    def __init__(self, ids: _Optional[bytes] = ...) -> None: ...

class ShareQuery(_message.Message):
    __slots__ = ("rref", "fork")
    RREF_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    rref: _value_pb2.UniqueId
    fork: _value_pb2.UniqueId
    def __init__(self, rref: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ..., fork: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ...) -> None: ...

class ShareLost(_message.Message):
    __slots__ = ("rref", "fork")
    RREF_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    rref: _value_pb2.UniqueId
    fork: _value_pb2.UniqueId
    def __init__(self, rref: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ..., fork: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ...) -> None: ...

class CreationQuery(_message.Message):
    __slots__ = ("rref", "fork")
    RREF_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    rref: _value_pb2.UniqueId
    fork: _value_pb2.UniqueId
    def __init__(self, rref: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ..., fork: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ...) -> None: ...

class CreationProbe(_message.Message):
    __slots__ = ("rref",)
    RREF_FIELD_NUMBER: _ClassVar[int]
    rref: _value_pb2.UniqueId
    def __init__(self, rref: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ...) -> None: ...

class CreationOver(_message.Message):
    __slots__ = ("rref",)
    RREF_FIELD_NUMBER: _ClassVar[int]
    rref: _value_pb2.UniqueId
    def __init__(self, rref: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ...) -> None: ...
