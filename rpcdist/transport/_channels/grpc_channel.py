"""The gRPC channel: streams, unary calls and channel options; converts every grpc error into an rpcdist one."""

from __future__ import annotations

import asyncio
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import grpc
import grpc.aio

from rpcdist._proto import handshake_pb2
from rpcdist.errors import (
    AuthenticationFailed,
    ConnectFailed,
    DeadlineExceeded,
    ProtocolViolation,
    RpcdistError,
    TransportError,
)
from rpcdist.inspection import ChannelFacts
from rpcdist.own_shortage import check_can_start
from rpcdist.time_limits import ATTEMPT_LIMIT_S
from rpcdist.transport._framing.frames import CHUNK_BYTES, MAX_ENVELOPE_BYTES, MAX_FRAME_BYTES
from rpcdist.transport._tls.certificate import Certificate, fingerprint_of_pem
from rpcdist.transport.handshake import UNTRUSTED_CERTIFICATE
from rpcdist.transport.keys import REFUSED

_REASONS: Final = (
    ("Connection refused", "connection refused: no process listens there"),
    ("errors resolving", "the host name cannot be resolved; check its spelling"),
    ("is unreachable", "the network has no route there; check the address"),
    ("No route to host", "the network has no route there; check the address, and the firewall of the other host"),
    ("parsing HTTP/2", "the program that answered is not an rpcdist process"),
    ("http2 header with status", "the program that answered is not an rpcdist process"),
    ("Handshake read failed", "a process listens there, but it does not answer, or is not an rpcdist process"),
    ("Cancelling all calls", "the process there is shutting down"),
    ("timed out", "no answer in time; check the address, and the firewall of the other host"),
    ("Socket closed", "the process there closed the connection; it may be shutting down"),
    ("reset by peer", "the process there closed the connection; it may be shutting down"),
)
"""Words in the texts of gRPC, which name its own classes, and the reason that users see instead."""

_PREFIX: Final = re.compile(r"^failed to connect to all addresses; last error: ([A-Z_]+: )?(\w+:\S+: )?")

_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ufffd]")  # gRPC appends uninitialised memory to some texts


def connect_reason(details: str) -> str:
    """The reason of a failed connection, found in gRPC's text; for an unusual reason, that text without its prefix."""
    for words, reason in _REASONS:
        if words in details:
            return reason
    return _UNPRINTABLE.split(_PREFIX.sub("", details), maxsplit=1)[0]


_TLS_FAILED: Final = "TSI_PROTOCOL_FAILURE"  # gRPC's word; the errors of broken connections have others
_WRONG_NAME: Final = "Hostname Verification Check failed"
_NO_GRPC: Final = "missing selected ALPN property"
_PLAIN_PEER: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "INVALID_ALERT")


def tls_failure(details: str) -> str | None:
    """The reason why gRPC could not connect, with advice, if TLS failed; None otherwise."""
    if _WRONG_NAME in details:
        return (
            "the server's certificate does not have the DNS name that all certificates of the job need. Set "
            "TlsOptions(server_name=...), or server_name in RPCDIST_TLS, to a name that they all have, everywhere."
        )
    if _NO_GRPC in details:
        return (
            "the server speaks TLS, but not gRPC, so this is not the address of a worker. It may be the second port of "
            "a worker, for large messages."
        )
    if _TLS_FAILED not in details:
        return None
    if any(word in details for word in _PLAIN_PEER):
        return (
            "the server does not speak TLS: it is not an rpcdist process, or TLS is off in it. Set RPCDIST_TLS and "
            "RpcOptions(tls=...) to the same values in every process of the job."
        )
    if "expired" in details or "not yet valid" in details:
        return (
            f"the server's certificate {'has expired' if 'expired' in details else 'is not valid yet'}. Check the "
            "clocks of both hosts, which may differ by at most a day, and renew certificates of your own in time."
        )
    return f"the server {UNTRUSTED_CERTIFICATE}"


_LARGEST_MESSAGE_BYTES = MAX_ENVELOPE_BYTES + MAX_FRAME_BYTES + CHUNK_BYTES

_COMMON_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", _LARGEST_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _LARGEST_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
]
CHANNEL_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # the channel has its own connection, which ends with it
    ("grpc.enable_http_proxy", 0),  # a proxy for web traffic must not get traffic inside a cluster
    ("grpc.min_reconnect_backoff_ms", int(ATTEMPT_LIMIT_S * 1000)),  # gRPC's name for the limit of one attempt
    # gRPC pauses after a failed attempt and connects once more by itself. The pause outlasts the channel: otherwise the
    # server would see TLS begin without a call, and report a process with another token.
    ("grpc.initial_reconnect_backoff_ms", int(2 * ATTEMPT_LIMIT_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", int(2 * ATTEMPT_LIMIT_S * 1000)),
]
_MOST_CONNECTIONS = 1 << 13  # an unproven connection costs 50 KiB
_FEWEST_CONNECTIONS = 256  # a server accepts this many, even if the process may have few descriptors


def server_options() -> list[tuple[str, int]]:
    """Settings of a server. Its connections may take half of the process's descriptors; other uses need the rest."""
    return [
        *_COMMON_OPTIONS,
        # Limits the calls of a connection, including those that no other limit counts, such as refusals.
        ("grpc.max_concurrent_streams", 1 << 14),
        ("grpc.so_reuseport", 0),  # binding a port that is in use must fail
        ("grpc.server_handshake_timeout_ms", int(ATTEMPT_LIMIT_S * 1000)),
        ("grpc.max_allowed_incoming_connections", max_grpc_connections()),
    ]


def max_grpc_connections() -> int:
    """Limit on the connections that a server of this process accepts, including those in their handshake."""
    num_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if num_descriptors == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return min(max(num_descriptors // 2, _FEWEST_CONNECTIONS), _MOST_CONNECTIONS)


def grpc_ends(fingerprint: str | None) -> str:
    """The name that both sides give their connection; see `stream_sockets.connected_ends`.

    gRPC identifies the ends of a connection only by the client's certificate, which the server sees. That is enough: a
    relay does not have the client's private key, so it cannot finish the handshake with the client's certificate.

    Args:
        fingerprint: fingerprint of the client's certificate; None without TLS.
    """
    return "grpc" if fingerprint is None else f"grpc, from certificate {fingerprint}"


def accepted_grpc_ends(context: Any) -> str:
    """Returns the same name as `grpc_ends` on the serving side, from the context of a call."""
    shown = context.auth_context().get("x509_pem_cert")
    return grpc_ends(fingerprint_of_pem(shown[0]) if shown else None)


@cache
def check_grpc_can_start() -> None:
    """Checks, before gRPC is used first, that its threads can start. Raises `TransportError`."""
    check_can_start("gRPC")


def connect_grpc(address: str, shown: Certificate | None) -> grpc.aio.Channel:
    """A channel to a server; gRPC connects it when it is first used.

    Args:
        address: host:port.
        shown: the certificate of this process; None without TLS.
    """
    check_grpc_can_start()
    if shown is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(shown.authority, shown.key, shown.chain)
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", shown.server_name)]
    return grpc.aio.secure_channel(address, credentials, options=options)


def error_of(exc: grpc.RpcError, address: str) -> RpcdistError:
    """The error of this package for an error of gRPC."""
    return _error_for(exc.code(), exc.details() or "", address)


def _error_for(code: grpc.StatusCode, details: str, address: str) -> RpcdistError:
    details = details or code.name
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return AuthenticationFailed(details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"no answer from {address} in time")
    if code is grpc.StatusCode.UNAVAILABLE:
        if (failure := tls_failure(details)) is not None:
            return AuthenticationFailed(failure)
        return ConnectFailed(address, connect_reason(details))
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return TransportError(f"{address} {REFUSED}: {details}")
    if code is grpc.StatusCode.ABORTED:
        return TransportError(f"{address} closed the connection: {details}")
    if code is grpc.StatusCode.CANCELLED:
        return TransportError(f"the connection with {address} was closed")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        text = f"{address} does not serve this call: it still joins its job, or it is not a worker of this version"
        return ProtocolViolation(text)
    if code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT):
        return ProtocolViolation(f"{address}: {connect_reason(details)}")
    return TransportError(f"{address}: {code.name}: {details}")


@contextmanager
def mapped_errors(address: str) -> Iterator[None]:
    """Turns the errors of gRPC into errors of this package."""
    try:
        yield
    except grpc.RpcError as exc:
        raise error_of(exc, address) from exc
    except grpc.aio.BaseError as exc:
        raise TransportError(f"the connection with {address} is closed: {exc}") from exc


# The streams handle errors inline: a context manager costs 3 us, and each call would enter four of them.
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_STATUS_LOST: Final = "Internal error from Core"
"""The details of a call that ended while this process wrote: gRPC then drops the status that the peer has sent."""
_GRPC_ERRORS = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)


def _stream_error(exc: Exception, address: str, had_answered: bool = True) -> RpcdistError:
    """The error of this package for an error of a stream; `had_answered` says whether the peer had answered before."""
    if not isinstance(exc, grpc.RpcError):
        return TransportError(f"the connection with {address} is closed: {exc}")
    if had_answered and exc.code() in _BROKEN:
        reason = connect_reason(exc.details() or exc.code().name)
        if exc.details() == _STATUS_LOST:
            reason = "it ended while this process sent, and gRPC lost the reason"
        return TransportError(f"the connection with {address} broke: {reason}")
    return error_of(exc, address)


class GrpcClientChannel:
    """The calling end of `Rpc.Session`."""

    def __init__(self, call: Any, address: str, tls: bool = False) -> None:
        self._call = call
        self._address = address
        self._has_answered = False  # True once the peer has answered
        self.facts = ChannelFacts("", "", False, "grpc", tls)

    async def read(self) -> bytes | None:
        try:
            data = await self._call.read()
            if data is not grpc.aio.EOF:
                self._has_answered = True
                return data  # type: ignore[no-any-return]  # the stream has no deserializer
            await self._raise_status()
        except asyncio.CancelledError:
            self._raise_if_aborted()
            raise
        except _GRPC_ERRORS as exc:
            raise _stream_error(exc, self._address, self._has_answered) from exc
        return None

    async def _raise_status(self) -> None:
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            raise _error_for(code, await self._call.details() or "", self._address)

    async def write(self, data: bytes) -> None:
        try:
            await self._call.write(data)
        except asyncio.CancelledError:
            self._raise_if_aborted()
            raise
        except asyncio.InvalidStateError as exc:
            await self._raise_status()  # the call has ended, and its status has the reason
            raise _stream_error(exc, self._address) from exc
        except _GRPC_ERRORS as exc:
            if not self._has_answered and isinstance(exc, grpc.RpcError) and exc.code() is grpc.StatusCode.INTERNAL:
                # gRPC loses the status of a call that ended before its first write.
                reason = "the server ended the connection at once; it may be overloaded"
                raise ConnectFailed(self._address, reason) from exc
            raise _stream_error(exc, self._address, self._has_answered) from exc

    def _raise_if_aborted(self) -> None:
        # grpc.aio reports an aborted call as a cancelled task. Only a task that is being cancelled was cancelled by
        # its caller.
        task = asyncio.current_task()
        if self._call.done() and (task is None or not task.cancelling()):
            raise TransportError(f"the connection with {self._address} was closed") from None

    def abort(self, reason: str) -> None:
        self._call.cancel()


class GrpcServerChannel:
    """The serving end of `Rpc.Session`; made in the handler's task, which also reads."""

    def __init__(self, context: Any, address: str) -> None:
        tls = bool(context.auth_context().get("transport_security_type"))
        self.facts = ChannelFacts("", "", False, "grpc", tls)
        self._context = context
        self._address = address
        self._task = asyncio.current_task()
        self._aborted: str | None = None

    async def read(self) -> bytes | None:
        if self._aborted is not None:
            return None
        try:
            data = await self._context.read()
        except asyncio.CancelledError:
            self._raise_if_aborted()
            raise
        except _GRPC_ERRORS as exc:
            raise _stream_error(exc, self._address) from exc
        return None if data is grpc.aio.EOF else data

    async def write(self, data: bytes) -> None:
        if self._aborted is not None:
            raise TransportError(self._aborted)
        try:
            await self._context.write(data)
        except _GRPC_ERRORS as exc:
            raise _stream_error(exc, self._address) from exc

    def _raise_if_aborted(self) -> None:
        if self._aborted is not None and self._task is not None:
            self._task.uncancel()
            raise TransportError(self._aborted) from None

    def abort(self, reason: str) -> None:
        """Ends the handler: gRPC closes the stream when the handler's task returns."""
        if self._aborted is None:
            self._aborted = reason
            if self._task is not None and self._task is not asyncio.current_task():
                self._task.cancel(reason)

    async def end(self) -> None:
        """Sends the peer the reason why this end aborted the stream; the handler's last step."""
        if self._aborted is not None and not self._context.done():
            await self._context.abort(grpc.StatusCode.ABORTED, self._aborted)


async def refuse(context: Any, refusal: handshake_pb2.Refusal) -> None:
    """Ends a call of an unproven peer; after a refusal for lack of capacity, the peer tries again."""
    is_busy = refusal.code == handshake_pb2.Refusal.BUSY
    await context.abort(grpc.StatusCode.UNAVAILABLE if is_busy else grpc.StatusCode.UNAUTHENTICATED, refusal.reason)
