from rpcdist._proto import handshake_pb2 as _handshake_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Member(_message.Message):
    __slots__ = ("identity", "address", "role")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    identity: _handshake_pb2.Identity
    address: str
    role: str
    def __init__(self, identity: _Optional[_Union[_handshake_pb2.Identity, _Mapping]] = ..., address: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class MemberList(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("member", "world_size", "timeout_ms", "known_version", "known", "attempt")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_VERSION_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    member: Member
    world_size: int
    timeout_ms: int
    known_version: int
    known: _containers.RepeatedCompositeFieldContainer[Member]
    attempt: str
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., world_size: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., known_version: _Optional[int] = ..., known: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., attempt: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("outcome", "detail", "members", "version", "missing", "departures")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OK: _ClassVar[JoinReply.Outcome]
        DUPLICATE_NAME: _ClassVar[JoinReply.Outcome]
        DUPLICATE_ID: _ClassVar[JoinReply.Outcome]
        WORLD_SIZE_DIFFERS: _ClassVar[JoinReply.Outcome]
        TIMED_OUT: _ClassVar[JoinReply.Outcome]
        STATIC_AND_DYNAMIC: _ClassVar[JoinReply.Outcome]
        ID_OUT_OF_RANGE: _ClassVar[JoinReply.Outcome]
        WORLD_FULL: _ClassVar[JoinReply.Outcome]
        INCARNATION_GONE: _ClassVar[JoinReply.Outcome]
    OK: JoinReply.Outcome
    DUPLICATE_NAME: JoinReply.Outcome
    DUPLICATE_ID: JoinReply.Outcome
    WORLD_SIZE_DIFFERS: JoinReply.Outcome
    TIMED_OUT: JoinReply.Outcome
    STATIC_AND_DYNAMIC: JoinReply.Outcome
    ID_OUT_OF_RANGE: JoinReply.Outcome
    WORLD_FULL: JoinReply.Outcome
    INCARNATION_GONE: JoinReply.Outcome
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    DEPARTURES_FIELD_NUMBER: _ClassVar[int]
    outcome: JoinReply.Outcome
    detail: str
    members: bytes
    version: int
    missing: _containers.RepeatedScalarFieldContainer[int]
    departures: _containers.RepeatedCompositeFieldContainer[Departure]
    def __init__(self, outcome: _Optional[_Union[JoinReply.Outcome, str]] = ..., detail: _Optional[str] = ..., members: _Optional[bytes] = ..., version: _Optional[int] = ..., missing: _Optional[_Iterable[int]] = ..., departures: _Optional[_Iterable[_Union[Departure, _Mapping]]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("identity",)
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    identity: _handshake_pb2.Identity
    def __init__(self, identity: _Optional[_Union[_handshake_pb2.Identity, _Mapping]] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MembersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MembershipMessage(_message.Message):
    __slots__ = ("version", "members", "departures", "base")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    DEPARTURES_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    version: int
    members: bytes
    departures: _containers.RepeatedCompositeFieldContainer[Departure]
    base: int
    def __init__(self, version: _Optional[int] = ..., members: _Optional[bytes] = ..., departures: _Optional[_Iterable[_Union[Departure, _Mapping]]] = ..., base: _Optional[int] = ...) -> None: ...

class Departure(_message.Message):
    __slots__ = ("identity", "reason")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    identity: _handshake_pb2.Identity
    reason: str
    def __init__(self, identity: _Optional[_Union[_handshake_pb2.Identity, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...
