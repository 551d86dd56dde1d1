from rpcdist._proto import autograd_pb2 as _autograd_pb2
from rpcdist._proto import membership_pb2 as _membership_pb2
from rpcdist._proto import rref_pb2 as _rref_pb2
from rpcdist._proto import value_pb2 as _value_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Envelope(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Message(_message.Message):
    __slots__ = ("call", "reply", "cancel", "stream_item", "stream_end", "stream_credit", "rref", "ack", "heartbeat", "transfer_aborted", "chunk_credit", "autograd", "segment_offer", "segment_answer", "segment_news", "membership", "device_map", "call_question", "call_state", "failure_notice", "gpu_release", "transfer", "control_seq", "large", "loans", "wrapped")
    CALL_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    STREAM_ITEM_FIELD_NUMBER: _ClassVar[int]
    STREAM_END_FIELD_NUMBER: _ClassVar[int]
    STREAM_CREDIT_FIELD_NUMBER: _ClassVar[int]
    RREF_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ABORTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_CREDIT_FIELD_NUMBER: _ClassVar[int]
    AUTOGRAD_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_OFFER_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_ANSWER_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_NEWS_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MAP_FIELD_NUMBER: _ClassVar[int]
    CALL_QUESTION_FIELD_NUMBER: _ClassVar[int]
    CALL_STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_NOTICE_FIELD_NUMBER: _ClassVar[int]
    GPU_RELEASE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    CONTROL_SEQ_FIELD_NUMBER: _ClassVar[int]
    LARGE_FIELD_NUMBER: _ClassVar[int]
    LOANS_FIELD_NUMBER: _ClassVar[int]
    WRAPPED_FIELD_NUMBER: _ClassVar[int]
    call: Call
    reply: Reply
    cancel: Cancel
    stream_item: StreamItem
    stream_end: StreamEnd
    stream_credit: StreamCredit
    rref: _rref_pb2.RRefMessage
    ack: Ack
    heartbeat: Heartbeat
    transfer_aborted: TransferAborted
    chunk_credit: ChunkCredit
    autograd: _autograd_pb2.AutogradMessage
    segment_offer: SegmentOffer
    segment_answer: SegmentAnswer
    segment_news: SegmentNews
    membership: _membership_pb2.MembershipMessage
    device_map: DeviceMap
    call_question: CallQuestion
    call_state: CallState
    failure_notice: FailureNotice
    gpu_release: GpuRelease
    transfer: int
    control_seq: int
    large: _containers.RepeatedScalarFieldContainer[int]
    loans: _containers.RepeatedCompositeFieldContainer[Loan]
    wrapped: bool
    def __init__(self, call: _Optional[_Union[Call, _Mapping]] = ..., reply: _Optional[_Union[Reply, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., stream_item: _Optional[_Union[StreamItem, _Mapping]] = ..., stream_end: _Optional[_Union[StreamEnd, _Mapping]] = ..., stream_credit: _Optional[_Union[StreamCredit, _Mapping]] = ..., rref: _Optional[_Union[_rref_pb2.RRefMessage, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., transfer_aborted: _Optional[_Union[TransferAborted, _Mapping]] = ..., chunk_credit: _Optional[_Union[ChunkCredit, _Mapping]] = ..., autograd: _Optional[_Union[_autograd_pb2.AutogradMessage, _Mapping]] = ..., segment_offer: _Optional[_Union[SegmentOffer, _Mapping]] = ..., segment_answer: _Optional[_Union[SegmentAnswer, _Mapping]] = ..., segment_news: _Optional[_Union[SegmentNews, _Mapping]] = ..., membership: _Optional[_Union[_membership_pb2.MembershipMessage, _Mapping]] = ..., device_map: _Optional[_Union[DeviceMap, _Mapping]] = ..., call_question: _Optional[_Union[CallQuestion, _Mapping]] = ..., call_state: _Optional[_Union[CallState, _Mapping]] = ..., failure_notice: _Optional[_Union[FailureNotice, _Mapping]] = ..., gpu_release: _Optional[_Union[GpuRelease, _Mapping]] = ..., transfer: _Optional[int] = ..., control_seq: _Optional[int] = ..., large: _Optional[_Iterable[int]] = ..., loans: _Optional[_Iterable[_Union[Loan, _Mapping]]] = ..., wrapped: bool = ...) -> None: ...

class DeviceMap(_message.Message):
    __slots__ = ("here", "there")
    HERE_FIELD_NUMBER: _ClassVar[int]
    THERE_FIELD_NUMBER: _ClassVar[int]
    here: _containers.RepeatedScalarFieldContainer[str]
    there: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, here: _Optional[_Iterable[str]] = ..., there: _Optional[_Iterable[str]] = ...) -> None: ...

class GpuRelease(_message.Message):
    __slots__ = ("copied", "unwanted", "closed")
    COPIED_FIELD_NUMBER: _ClassVar[int]
    UNWANTED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    copied: _containers.RepeatedScalarFieldContainer[int]
    unwanted: _containers.RepeatedScalarFieldContainer[int]
    closed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, copied: _Optional[_Iterable[int]] = ..., unwanted: _Optional[_Iterable[int]] = ..., closed: _Optional[_Iterable[int]] = ...) -> None: ...

class Loan(_message.Message):
    __slots__ = ("buffer", "segment")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    buffer: int
    segment: int
    def __init__(self, buffer: _Optional[int] = ..., segment: _Optional[int] = ...) -> None: ...

class UnreadLoan(_message.Message):
    __slots__ = ("transfer", "segment")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    segment: int
    def __init__(self, transfer: _Optional[int] = ..., segment: _Optional[int] = ...) -> None: ...

class SegmentOffer(_message.Message):
    __slots__ = ("segment", "size", "is_common")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    IS_COMMON_FIELD_NUMBER: _ClassVar[int]
    segment: int
    size: int
    is_common: bool
    def __init__(self, segment: _Optional[int] = ..., size: _Optional[int] = ..., is_common: bool = ...) -> None: ...

class SegmentAnswer(_message.Message):
    __slots__ = ("segment", "accepted")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    segment: int
    accepted: bool
    def __init__(self, segment: _Optional[int] = ..., accepted: bool = ...) -> None: ...

class SegmentNews(_message.Message):
    __slots__ = ("withdrawn", "kept", "unread")
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    withdrawn: _containers.RepeatedScalarFieldContainer[int]
    kept: _containers.RepeatedScalarFieldContainer[int]
    unread: _containers.RepeatedCompositeFieldContainer[UnreadLoan]
    def __init__(self, withdrawn: _Optional[_Iterable[int]] = ..., kept: _Optional[_Iterable[int]] = ..., unread: _Optional[_Iterable[_Union[UnreadLoan, _Mapping]]] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("id", "function", "by_value", "fetch", "arguments", "timeout_us", "result", "autograd_context", "on", "counts_as_idle", "is_nested", "traceparent", "device_map")
    ID_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    BY_VALUE_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_US_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    AUTOGRAD_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ON_FIELD_NUMBER: _ClassVar[int]
    COUNTS_AS_IDLE_FIELD_NUMBER: _ClassVar[int]
    IS_NESTED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MAP_FIELD_NUMBER: _ClassVar[int]
    id: int
    function: str
    by_value: bool
    fetch: RRefFetch
    arguments: _value_pb2.Value
    timeout_us: int
    result: _value_pb2.RRefFork
    autograd_context: int
    on: RRefFetch
    counts_as_idle: bool
    is_nested: bool
    traceparent: str
    device_map: DeviceMap
    def __init__(self, id: _Optional[int] = ..., function: _Optional[str] = ..., by_value: bool = ..., fetch: _Optional[_Union[RRefFetch, _Mapping]] = ..., arguments: _Optional[_Union[_value_pb2.Value, _Mapping]] = ..., timeout_us: _Optional[int] = ..., result: _Optional[_Union[_value_pb2.RRefFork, _Mapping]] = ..., autograd_context: _Optional[int] = ..., on: _Optional[_Union[RRefFetch, _Mapping]] = ..., counts_as_idle: bool = ..., is_nested: bool = ..., traceparent: _Optional[str] = ..., device_map: _Optional[_Union[DeviceMap, _Mapping]] = ...) -> None: ...

class CallQuestion(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class CallState(_message.Message):
    __slots__ = ("id", "phase", "running_us")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ENDED: _ClassVar[CallState.Phase]
        QUEUED: _ClassVar[CallState.Phase]
        RUNNING: _ClassVar[CallState.Phase]
        WAITING: _ClassVar[CallState.Phase]
        STREAMING: _ClassVar[CallState.Phase]
        IN_LINE: _ClassVar[CallState.Phase]
    ENDED: CallState.Phase
    QUEUED: CallState.Phase
    RUNNING: CallState.Phase
    WAITING: CallState.Phase
    STREAMING: CallState.Phase
    IN_LINE: CallState.Phase
    ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_US_FIELD_NUMBER: _ClassVar[int]
    id: int
    phase: CallState.Phase
    running_us: int
    def __init__(self, id: _Optional[int] = ..., phase: _Optional[_Union[CallState.Phase, str]] = ..., running_us: _Optional[int] = ...) -> None: ...

class FailureNotice(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class RRefFetch(_message.Message):
    __slots__ = ("rref", "fork")
    RREF_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    rref: _value_pb2.UniqueId
    fork: _value_pb2.UniqueId
    def __init__(self, rref: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ..., fork: _Optional[_Union[_value_pb2.UniqueId, _Mapping]] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("id", "value", "failure", "stream", "created")
    ID_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    id: int
    value: _value_pb2.Value
    failure: Failure
    stream: bool
    created: bool
    def __init__(self, id: _Optional[int] = ..., value: _Optional[_Union[_value_pb2.Value, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., stream: bool = ..., created: bool = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "type_name", "text", "traceback", "worker", "exception", "type_module", "type_bases")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        USER: _ClassVar[Failure.Kind]
        NOT_FOUND: _ClassVar[Failure.Kind]
        DEADLINE: _ClassVar[Failure.Kind]
        CANCELLED: _ClassVar[Failure.Kind]
        SERIALIZATION: _ClassVar[Failure.Kind]
        REFUSED: _ClassVar[Failure.Kind]
        RREF: _ClassVar[Failure.Kind]
        SHUTDOWN: _ClassVar[Failure.Kind]
        INTERNAL: _ClassVar[Failure.Kind]
    USER: Failure.Kind
    NOT_FOUND: Failure.Kind
    DEADLINE: Failure.Kind
    CANCELLED: Failure.Kind
    SERIALIZATION: Failure.Kind
    REFUSED: Failure.Kind
    RREF: Failure.Kind
    SHUTDOWN: Failure.Kind
    INTERNAL: Failure.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TYPE_NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    TYPE_MODULE_FIELD_NUMBER: _ClassVar[int]
    TYPE_BASES_FIELD_NUMBER: _ClassVar[int]
    kind: Failure.Kind
    type_name: str
    text: str
    traceback: str
    worker: str
    exception: _value_pb2.Value
    type_module: str
    type_bases: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[_Union[Failure.Kind, str]] = ..., type_name: _Optional[str] = ..., text: _Optional[str] = ..., traceback: _Optional[str] = ..., worker: _Optional[str] = ..., exception: _Optional[_Union[_value_pb2.Value, _Mapping]] = ..., type_module: _Optional[str] = ..., type_bases: _Optional[_Iterable[str]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class StreamItem(_message.Message):
    __slots__ = ("id", "value")
    ID_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    id: int
    value: _value_pb2.Value
    def __init__(self, id: _Optional[int] = ..., value: _Optional[_Union[_value_pb2.Value, _Mapping]] = ...) -> None: ...

class StreamEnd(_message.Message):
    __slots__ = ("id", "failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: int
    failure: Failure
    def __init__(self, id: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class StreamCredit(_message.Message):
    __slots__ = ("id", "items")
    ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    id: int
    items: int
    def __init__(self, id: _Optional[int] = ..., items: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("control_seq",)
    CONTROL_SEQ_FIELD_NUMBER: _ClassVar[int]
    control_seq: int
    def __init__(self, control_seq: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChunkCredit(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class TransferAborted(_message.Message):
    __slots__ = ("transfer", "reason")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    reason: str
    def __init__(self, transfer: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
