from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Identity(_message.Message):
    __slots__ = ("name", "id", "incarnation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: int
    incarnation: int
    def __init__(self, name: _Optional[str] = ..., id: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "nonce", "job", "role", "identity", "purpose", "channel", "package")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_FIELD_NUMBER: _ClassVar[int]
    version: int
    nonce: bytes
    job: str
    role: str
    identity: Identity
    purpose: str
    channel: str
    package: str
    def __init__(self, version: _Optional[int] = ..., nonce: _Optional[bytes] = ..., job: _Optional[str] = ..., role: _Optional[str] = ..., identity: _Optional[_Union[Identity, _Mapping]] = ..., purpose: _Optional[str] = ..., channel: _Optional[str] = ..., package: _Optional[str] = ...) -> None: ...

class CertificateProof(_message.Message):
    __slots__ = ("chain", "signature")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    chain: _containers.RepeatedScalarFieldContainer[bytes]
    signature: bytes
    def __init__(self, chain: _Optional[_Iterable[bytes]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("nonce", "proof", "identity", "stream_port", "certificate")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STREAM_PORT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    proof: bytes
    identity: Identity
    stream_port: int
    certificate: CertificateProof
    def __init__(self, nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., identity: _Optional[_Union[Identity, _Mapping]] = ..., stream_port: _Optional[int] = ..., certificate: _Optional[_Union[CertificateProof, _Mapping]] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("proof", "certificate")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    certificate: CertificateProof
    def __init__(self, proof: _Optional[bytes] = ..., certificate: _Optional[_Union[CertificateProof, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session_id", "proof")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    proof: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "code")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Refusal.Code]
        VERSION: _ClassVar[Refusal.Code]
        JOB: _ClassVar[Refusal.Code]
        TOKEN: _ClassVar[Refusal.Code]
        WRONG_PEER: _ClassVar[Refusal.Code]
        POLICY: _ClassVar[Refusal.Code]
        CHANNEL: _ClassVar[Refusal.Code]
        BUSY: _ClassVar[Refusal.Code]
        CERTIFICATE: _ClassVar[Refusal.Code]
    UNSPECIFIED: Refusal.Code
    VERSION: Refusal.Code
    JOB: Refusal.Code
    TOKEN: Refusal.Code
    WRONG_PEER: Refusal.Code
    POLICY: Refusal.Code
    CHANNEL: Refusal.Code
    BUSY: Refusal.Code
    CERTIFICATE: Refusal.Code
    REASON_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    code: Refusal.Code
    def __init__(self, reason: _Optional[str] = ..., code: _Optional[_Union[Refusal.Code, str]] = ...) -> None: ...

class Handshake(_message.Message):
    __slots__ = ("hello", "challenge", "proof", "welcome", "refusal")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    challenge: Challenge
    proof: Proof
    welcome: Welcome
    refusal: Refusal
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., challenge: _Optional[_Union[Challenge, _Mapping]] = ..., proof: _Optional[_Union[Proof, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...
