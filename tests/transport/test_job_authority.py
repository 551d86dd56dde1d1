"""The job token as a certificate authority, and when a process shows another certificate."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from rpcdist.ids import Identity
from rpcdist.transport._tls import tls_identity
from rpcdist.transport._tls.certificate import PEER_NAME, fingerprint_of_pem
from rpcdist.transport._tls.job_authority import CLOCK_TOLERANCE, LIFETIME, JobAuthority
from rpcdist.transport._tls.tls_identity import TlsIdentity, issued_certificates

TOKEN = b"a token for these tests only"
OWNER = Identity("ps/0 of rack: 1", 0, 77)
NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)


def loaded(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def public_bytes(pem: bytes) -> bytes:
    key = loaded(pem).public_key()
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def test_every_holder_of_a_token_is_the_same_authority() -> None:
    mine, yours = JobAuthority(TOKEN), JobAuthority(TOKEN)
    assert public_bytes(mine.certificate) == public_bytes(yours.certificate)
    loaded(mine.issue(OWNER, "job").chain).verify_directly_issued_by(loaded(yours.certificate))


@pytest.mark.parametrize("token", [TOKEN + b"x", TOKEN[:-1], TOKEN.upper()])
def test_another_token_is_another_authority(token: bytes) -> None:
    mine, other = JobAuthority(TOKEN), JobAuthority(token)
    assert public_bytes(mine.certificate) != public_bytes(other.certificate)
    with pytest.raises(InvalidSignature):
        loaded(other.issue(OWNER, "job").chain).verify_directly_issued_by(loaded(mine.certificate))


@pytest.mark.parametrize("name", ["x" * 128, "\u00e4" * 50, "\u65e5" * 128, "\U0001f600" * 20])
def test_long_names_in_any_script_are_cut_to_what_a_certificate_holds(name: str) -> None:
    (common_name,) = loaded(JobAuthority(TOKEN).issue(Identity(name, 0, 1), "job").chain).subject
    assert name.startswith(str(common_name.value)) and 60 < len(str(common_name.value).encode()) <= 64


def test_a_certificate_says_whose_it_is_and_how_long() -> None:
    shown = JobAuthority(TOKEN).issue(OWNER, "nightly/eu", NOW)
    certificate = loaded(shown.chain)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [PEER_NAME]
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [
        "rpcdist://nightly%2Feu/ps%2F0%20of%20rack%3A%201/77"
    ]
    assert certificate.not_valid_before_utc == NOW - CLOCK_TOLERANCE
    assert certificate.not_valid_after_utc == NOW + LIFETIME
    assert NOW < shown.renew_at < NOW + LIFETIME
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert shown.fingerprint == fingerprint_of_pem(shown.chain) != fingerprint_of_pem(shown.authority)
    assert b"PRIVATE" in shown.key and "PRIVATE" not in repr(shown)


def test_nothing_shows_the_key_or_the_token() -> None:
    identity = TlsIdentity(issued_certificates(TOKEN, "job", lambda: OWNER))
    key = identity.certificate().key.decode()
    for text in (repr(identity), repr(JobAuthority(TOKEN)), repr(identity.certificate())):
        assert TOKEN.decode() not in text and key[40:80] not in text


def test_the_same_certificate_is_shown_until_the_name_or_the_time_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = [OWNER]
    identity = TlsIdentity(issued_certificates(TOKEN, "job", lambda: owner[0]))
    first = identity.certificate()
    assert identity.certificate() is first
    owner[0] = OWNER._replace(name="trainer")
    second = identity.certificate()
    assert second.fingerprint != first.fingerprint and b"trainer" in ssl.PEM_cert_to_DER_cert(second.chain.decode())

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) + LIFETIME / 2 + timedelta(minutes=1)

    monkeypatch.setattr(tls_identity, "datetime", Later)
    third = identity.certificate()
    assert third.fingerprint != second.fingerprint
