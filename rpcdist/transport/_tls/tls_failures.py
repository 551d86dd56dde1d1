"""What a TLS handshake that failed means, in the words of a user: the libraries say it in their own."""

from __future__ import annotations

from typing import Final

from rpcdist.transport.handshake import TOKEN_ADVICE

STRANGE_CERTIFICATE: Final = (
    f"did not prove the job token, or shows a certificate of another authority. {TOKEN_ADVICE} Either all processes "
    "use certificates of their own (RpcOptions(tls=TlsOptions(...))), all of one authority, or none does."
)

_FAILED: Final = "TSI_PROTOCOL_FAILURE"  # gRPC's word; connections that break in a handshake have others
_WRONG_NAME: Final = "Hostname Verification Check failed"
_NO_GRPC: Final = "missing selected ALPN property"
_PLAIN_PEER: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "INVALID_ALERT")


def tls_failure(details: str) -> str | None:
    """Says why gRPC could not connect, if TLS is to blame.

    Args:
        details: gRPC's text.

    Returns:
        The reason and what to do; None if it was something else.
    """
    if _WRONG_NAME in details:
        return (
            "the server's certificate does not have the DNS name that all certificates of the job need. Set "
            "TlsOptions(server_name=...), or server_name in RPCDIST_TLS, to one that they have, the same everywhere."
        )
    if _NO_GRPC in details:
        return (
            "the server speaks TLS, but not gRPC, so this is not the address of a worker. A worker has a second port "
            "for large messages, which is not its address either."
        )
    if _FAILED not in details:
        return None
    if any(word in details for word in _PLAIN_PEER):
        return (
            "the server does not speak TLS: it is no rpcdist process, or TLS is off there. Set RPCDIST_TLS and "
            "RpcOptions(tls=...) to the same in every process of the job."
        )
    if "expired" in details or "not yet valid" in details:
        return (
            f"the server's certificate {'has expired' if 'expired' in details else 'is not valid yet'}. Are the clocks "
            "of the two hosts right? They may differ by a day. A certificate of one's own has to be renewed in time."
        )
    return f"the server {STRANGE_CERTIFICATE}"
