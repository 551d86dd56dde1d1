"""The means that an engine gives to the ranks that it starts: a store that no rank serves, a token, and functions by
value.
"""

from __future__ import annotations

import pytest

from rpcdist.collectives import TCPStore
from rpcdist.collectives.rendezvous import rendezvous
from rpcdist.errors import ConfigError
from rpcdist.rpc import RpcOptions
from rpcdist.transport import token

BROUGHT = "brought by an engine 0123456789"


def test_a_store_outside_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 calls it as all others do, and serves nothing at MASTER_PORT."""
    served = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    try:
        monkeypatch.setenv("RPCDIST_STORE", f"127.0.0.1:{served.port}")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "1")  # nobody may listen there
        store, rank, size = next(rendezvous("env://", rank=0, world_size=1))
        try:
            store.set("key", "value")
            assert (served.get("key"), rank, size) == (b"value", 0, 1)
        finally:
            store.close()
        monkeypatch.setenv("RPCDIST_STORE", "somewhere")
        with pytest.raises(ConfigError, match="an address is written host:port"):
            next(rendezvous("env://", rank=0, world_size=1))
    finally:
        served.close()


def test_a_token_that_is_not_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token, "_chosen", [])
    monkeypatch.setenv("RPCDIST_TOKEN", "the one of the environment 012345")
    with pytest.raises(ConfigError, match="the token that the engine set has 5 characters"):
        token.set_job_token("short")
    assert token.job_token() == b"the one of the environment 012345"
    token.set_job_token(BROUGHT)
    assert token.job_token() == BROUGHT.encode()
    assert token.describe_token_source() == "the token that the engine set"
    assert token.job_token("an option of the program 0123456") == b"an option of the program 0123456"


def test_functions_go_by_value_where_the_launcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RpcOptions().by_value is False
    monkeypatch.setattr("rpcdist.rpc.options.by_value_by_default", True)
    assert (RpcOptions().by_value, RpcOptions(by_value=False).by_value) == (True, False)
