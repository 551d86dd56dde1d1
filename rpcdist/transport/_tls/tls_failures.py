"""What a TLS handshake that failed means, in the words of a user: the libraries say it in their own."""

from __future__ import annotations

from typing import Final

from rpcdist.transport.handshake import TOKEN_ADVICE

__all__ = ["tls_failure"]

_FAILED: Final = "TSI_PROTOCOL_FAILURE"  # gRPC's word; connections that break in a handshake have others
_PLAIN_PEER: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "INVALID_ALERT")


def tls_failure(details: str) -> str | None:
    """Says why gRPC could not connect, if TLS is to blame.

    Args:
        details: gRPC's text.

    Returns:
        The reason and what to do; None if it was something else.
    """
    if _FAILED not in details:
        return None
    if any(word in details for word in _PLAIN_PEER):
        return (
            "the server does not speak TLS: it is no rpcdist process, or TLS is off there. Set RPCDIST_TLS and "
            "RpcOptions(tls=...) to the same in every process of the job."
        )
    if "expired" in details or "not yet valid" in details:
        return (
            f"the server's certificate is out of its time ({details.rpartition(': ')[2]}). Are the clocks of the two "
            "hosts right? They may differ by a day."
        )
    return f"the server did not prove the job token, or shows a certificate of another authority. {TOKEN_ADVICE}"
