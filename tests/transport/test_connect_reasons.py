"""Texts of gRPC as it was seen to write them, and what users read instead."""

from __future__ import annotations

import pytest

from rpcdist.transport._channels.grpc_channel import connect_reason

LAST_ERROR = "failed to connect to all addresses; last error: "


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        (
            LAST_ERROR + "UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused",
            "connection refused: no process listens there",
        ),
        (
            LAST_ERROR + "UNKNOWN: ipv6:%5B::1%5D:1: Failed to connect to remote host: Connection refused",
            "connection refused: no process listens there",
        ),
        (
            "errors resolving nohost.invalid:1: [field:hostname lookup error:address lookup failed for "
            "nohost.invalid:1: Domain name not found]",
            "the host name cannot be resolved; check its spelling",
        ),
        (
            LAST_ERROR + "FAILED_PRECONDITION: ipv4:255.255.255.255:5: connect failed: addr: ipv4:255.255.255.255:5 "
            "error: Network is unreachable",
            "the network has no route there; check the address",
        ),
        (
            LAST_ERROR + "INTERNAL: ipv4:127.0.0.1:42481: Failed parsing HTTP/2 (Expected SETTINGS frame as the first "
            "frame, got frame type 80) (Trying to connect an http1.x server (HTTP status 400))",
            "the program that answered is not an rpcdist process",
        ),
        ("Received http2 header with status: 404", "the program that answered is not an rpcdist process"),
        (
            LAST_ERROR + "UNKNOWN: ipv4:127.0.0.1:57283: Handshake read failed (Endpoint closing)",
            "a process listens there, but it does not answer, or is not an rpcdist process",
        ),
        ("Cancelling all calls", "the process there is shutting down"),
        (LAST_ERROR + "UNKNOWN: ipv4:10.0.0.1:9: Too many open files", "Too many open files"),
        (
            LAST_ERROR + "INTERNAL: ipv4:10.0.0.1:9: socket: Too many open files\n\0\xb6\x1b\0\xff\x7f",
            "socket: Too many open files",
        ),
        ("the coordinator has ended", "the coordinator has ended"),
    ],
)
def test_reasons_are_in_plain_words(details: str, reason: str) -> None:
    assert connect_reason(details) == reason
