from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Piece(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("timeout_ms", "set", "get", "wait", "check", "add", "append", "compare_set", "delete_key", "num_keys", "list_keys", "queue_push", "queue_pop", "queue_len", "weight")
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    GET_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    COMPARE_SET_FIELD_NUMBER: _ClassVar[int]
    DELETE_KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_KEYS_FIELD_NUMBER: _ClassVar[int]
    LIST_KEYS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_PUSH_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POP_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LEN_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    set: StoreItems
    get: StoreKeys
    wait: StoreKeys
    check: StoreKeys
    add: StoreAdd
    append: StoreItem
    compare_set: StoreCompareSet
    delete_key: StoreKey
    num_keys: StoreNothing
    list_keys: StorePrefix
    queue_push: StoreItem
    queue_pop: StoreKey
    queue_len: StoreKey
    weight: bytes
    def __init__(self, timeout_ms: _Optional[int] = ..., set: _Optional[_Union[StoreItems, _Mapping]] = ..., get: _Optional[_Union[StoreKeys, _Mapping]] = ..., wait: _Optional[_Union[StoreKeys, _Mapping]] = ..., check: _Optional[_Union[StoreKeys, _Mapping]] = ..., add: _Optional[_Union[StoreAdd, _Mapping]] = ..., append: _Optional[_Union[StoreItem, _Mapping]] = ..., compare_set: _Optional[_Union[StoreCompareSet, _Mapping]] = ..., delete_key: _Optional[_Union[StoreKey, _Mapping]] = ..., num_keys: _Optional[_Union[StoreNothing, _Mapping]] = ..., list_keys: _Optional[_Union[StorePrefix, _Mapping]] = ..., queue_push: _Optional[_Union[StoreItem, _Mapping]] = ..., queue_pop: _Optional[_Union[StoreKey, _Mapping]] = ..., queue_len: _Optional[_Union[StoreKey, _Mapping]] = ..., weight: _Optional[bytes] = ...) -> None: ...

class StoreReply(_message.Message):
    __slots__ = ("flag", "number", "value", "values", "keys", "missing", "problem", "too_large", "weight")
    FLAG_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    TOO_LARGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    flag: bool
    number: int
    value: bytes
    values: StoreValues
    keys: StoreKeys
    missing: StoreKeys
    problem: str
    too_large: bool
    weight: bytes
    def __init__(self, flag: bool = ..., number: _Optional[int] = ..., value: _Optional[bytes] = ..., values: _Optional[_Union[StoreValues, _Mapping]] = ..., keys: _Optional[_Union[StoreKeys, _Mapping]] = ..., missing: _Optional[_Union[StoreKeys, _Mapping]] = ..., problem: _Optional[str] = ..., too_large: bool = ..., weight: _Optional[bytes] = ...) -> None: ...

class StoreNothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreKey(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class StoreKeys(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keys: _Optional[_Iterable[str]] = ...) -> None: ...

class StoreValues(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, values: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StoreItem(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class StoreItems(_message.Message):
    __slots__ = ("keys", "values")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StoreAdd(_message.Message):
    __slots__ = ("key", "amount")
    KEY_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    key: str
    amount: int
    def __init__(self, key: _Optional[str] = ..., amount: _Optional[int] = ...) -> None: ...

class StoreCompareSet(_message.Message):
    __slots__ = ("key", "expected", "desired")
    KEY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    key: str
    expected: bytes
    desired: bytes
    def __init__(self, key: _Optional[str] = ..., expected: _Optional[bytes] = ..., desired: _Optional[bytes] = ...) -> None: ...

class StorePrefix(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    def __init__(self, prefix: _Optional[str] = ...) -> None: ...
