from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class LookRequest(_message.Message):
    __slots__ = ("is_live", "after", "is_brief", "has_members")
    IS_LIVE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    IS_BRIEF_FIELD_NUMBER: _ClassVar[int]
    HAS_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    is_live: bool
    after: int
    is_brief: bool
    has_members: bool
    def __init__(self, is_live: bool = ..., after: _Optional[int] = ..., is_brief: bool = ..., has_members: bool = ...) -> None: ...

class LookReply(_message.Message):
    __slots__ = ("facts", "notes")
    FACTS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    facts: bytes
    notes: bytes
    def __init__(self, facts: _Optional[bytes] = ..., notes: _Optional[bytes] = ...) -> None: ...

class NeighbourRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class NeighbourReply(_message.Message):
    __slots__ = ("state", "detail", "stacks")
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    state: str
    detail: str
    stacks: str
    def __init__(self, state: _Optional[str] = ..., detail: _Optional[str] = ..., stacks: _Optional[str] = ...) -> None: ...
