"""What errors say to whoever made a common mistake: each says what to do instead."""

from __future__ import annotations

import logging
import socket
import traceback

import pytest

from rpcdist import rpc
from rpcdist.errors import ConnectFailed, RendezvousError
from rpcdist.testing import InProcessCluster


def start(init_method: str) -> None:
    options = rpc.RpcOptions(init_method=init_method, rpc_timeout=0.2)
    rpc.init_rpc("worker1", rank=1, world_size=2, rpc_backend_options=options)


def test_an_address_without_a_scheme() -> None:
    with pytest.raises(RendezvousError, match=r"Did you mean 'tcp://127\.0\.0\.1:29500'\?$"):
        start("127.0.0.1:29500")


def test_a_host_that_nobody_knows() -> None:
    with pytest.raises(ConnectFailed, match=r"not know the name 'nohost\.invalid'.*Check MASTER_ADDR|no name server"):
        start("tcp://nohost.invalid:29500")


def test_a_wrong_port_says_so_in_five_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "rpcdist.rpc")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectFailed, match=r"nobody listens there\. Does rank 0 run there") as caught:
            start(f"tcp://127.0.0.1:{unused.getsockname()[1]}")
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert len(lines) <= 9, lines  # those of this file included
    assert "_stores" not in "".join(lines) and "_stores" in caplog.text  # all of it is in the log


def fail() -> None:
    raise LookupError("first\nsecond")


def test_a_remote_error_is_one_line_in_the_callees_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rpcdist")
    with InProcessCluster("a", "b") as cluster:
        with pytest.raises(LookupError):
            cluster.run("a", rpc.rpc_sync, "b", fail)
        assert [record.getMessage() for record in caplog.records] == [
            f"a call of {__name__}:fail from a failed on b: LookupError: first"
        ]
        caplog.set_level(logging.DEBUG, "rpcdist.rpc._serving")
        with pytest.raises(LookupError):
            cluster.run("a", rpc.rpc_sync, "b", fail)
        assert 'LookupError("first' in caplog.records[-1].getMessage() and caplog.records[-1].levelname == "DEBUG"
