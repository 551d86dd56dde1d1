"""Which connections are encrypted, by mode and trusted networks."""

from __future__ import annotations

import asyncio

import pytest

from rpcdist.errors import ConfigError
from rpcdist.transport._tls.tls_policy import TlsPolicy

LOOPBACK = ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost", "::ffff:127.0.0.1")


def policy(monkeypatch: pytest.MonkeyPatch, mode: str | None = None, trusted: str = "") -> TlsPolicy:
    if mode is None:
        monkeypatch.delenv("RPCDIST_TLS", raising=False)
    else:
        monkeypatch.setenv("RPCDIST_TLS", mode)
    monkeypatch.setenv("RPCDIST_TRUSTED_NETWORKS", trusted)
    return TlsPolicy.of_environment()


def test_by_default_only_raw_connections_on_loopback_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = policy(monkeypatch)
    assert usual.mode == "auto" and usual.encrypts_grpc
    assert not any(usual.encrypts_raw(host) for host in LOOPBACK)
    assert all(usual.encrypts_raw(host) for host in ("10.0.0.1", "192.168.1.1", "fd00::1", "worker-1", "0.0.0.0"))


def test_trusted_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    trusting = policy(monkeypatch, trusted=" 10.0.0.0/8, fd00::/8 ,192.168.7.7")
    plain = ["10.255.0.1", "::ffff:10.0.0.1", "fd12::1", "[fd12::1]", "fd12::1%eth0", "192.168.7.7", *LOOPBACK]
    assert not any(trusting.encrypts_raw(host) for host in plain)
    assert all(trusting.encrypts_raw(host) for host in ("11.0.0.1", "::ffff:11.0.0.1", "fe80::1", "192.168.7.8"))
    assert trusting.encrypts_grpc


def test_always_encrypts_loopback_too(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = policy(monkeypatch, "always", "10.0.0.0/8")
    assert all(strict.encrypts_raw(host) for host in ("10.0.0.1", *LOOPBACK))


@pytest.mark.parametrize("text", ["yes", "0", "OFF", "auto "])
def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with pytest.raises(ConfigError, match="'auto', 'always' or 'off'"):
        policy(monkeypatch, text)


@pytest.mark.parametrize("text", ["10.0.0.1/8", "ten", "10.0.0.0/8;11.0.0.0/8", "10.0.0.0/33"])
def test_a_wrong_network_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with pytest.raises(ConfigError, match="RPCDIST_TRUSTED_NETWORKS"):
        policy(monkeypatch, trusted=text)


def test_the_option_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, tls, mode in [
        ("auto", False, "off"),
        ("always", False, "off"),
        ("off", True, "auto"),
        ("always", True, "always"),
        ("off", None, "off"),
    ]:
        monkeypatch.setenv("RPCDIST_TLS", text)
        assert TlsPolicy.of_environment(tls).mode == mode, (text, tls)


def test_without_tls_only_trusted_addresses_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    off = policy(monkeypatch, "off", "10.0.0.0/8")
    for host in ("127.0.0.1", "localhost", "10.1.2.3"):
        asyncio.run(off.check_plain(host))
    for host in ("192.0.2.1", "0.0.0.0", "2001:db8::1"):
        with pytest.raises(ConfigError, match=f"{host} is neither on loopback nor in a trusted network"):
            asyncio.run(off.check_plain(host))
    asyncio.run(policy(monkeypatch).check_plain("192.0.2.1"))  # it is encrypted


def test_what_is_plain_beyond_loopback_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    trusting = policy(monkeypatch, trusted="10.0.0.0/8")
    assert "raw connections are not encrypted between 10.1.2.3 and" in str(trusting.plain_beyond_loopback("10.1.2.3"))
    assert trusting.plain_beyond_loopback("127.0.0.1") is trusting.plain_beyond_loopback("11.0.0.1") is None
    off = policy(monkeypatch, "off", "10.0.0.0/8")
    assert "nothing is encrypted" in str(off.plain_beyond_loopback("10.1.2.3"))
    assert policy(monkeypatch, "always", "10.0.0.0/8").plain_beyond_loopback("10.1.2.3") is None
