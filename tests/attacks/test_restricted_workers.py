"""Where peers are not trusted: what works without pickle, the name of the job, and no token in logs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rpcdist import rpc
from rpcdist.errors import ConfigError, RemoteError
from rpcdist.rpc import functions
from rpcdist.rpc._start import node_options
from rpcdist.rpc.future import Future
from rpcdist.testing import InProcessCluster
from rpcdist.transport import NodeOptions, acquire_node

TOKEN = "0123456789abcdef0123456789abcdef"


class Model:
    def __init__(self) -> None:
        self.size = 4

    def double(self, number: int) -> int:
        return 2 * number

    async def triple(self, number: int) -> int:
        await asyncio.sleep(0)
        return 3 * number

    @staticmethod
    @functions.async_execution
    def later(number: int) -> Future[int]:
        future: Future[int] = Future()
        future.set_result(number)
        return future

    def fail(self) -> None:
        raise LookupError("no such key")


def test_methods_of_references_without_pickle() -> None:
    """The class of the value was asked for, and is a pickle."""
    with InProcessCluster("a", "b", allow_pickle=False) as cluster, cluster.use("a"):
        rref: Any = rpc.remote("b", Model)
        assert [rref.rpc_sync().double(2) for _ in range(2)] == [4, 4]
        assert rref.rpc_async().triple(2).wait() == 6
        assert rref.rpc_sync().triple(3) == 9 and rref.rpc_sync().later(7) == 7
        assert rref.remote().double(5).to_here() == 10
        assert rref.rpc_sync().size() == 4
        with pytest.raises(LookupError, match="no such key") as caught:  # of the class, though it did not travel
            rref.rpc_sync().fail()
        assert isinstance(caught.value, RemoteError)
        with pytest.raises(AttributeError, match="no attribute 'missing'"):
            rref.rpc_async().missing().wait()
        mine: Any = rpc.RRef(Model())
        assert mine.rpc_sync().double(4) == 8


def test_the_token_is_in_no_text() -> None:
    options = rpc.RpcOptions(token=TOKEN)
    for text in (repr(NodeOptions(token=TOKEN)), repr(options), repr(node_options(options))):
        assert TOKEN not in text


@pytest.mark.usefixtures("no_agent")  # the process has a node of its own then
def test_the_job_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RPCDIST_JOB", raising=False)
    assert NodeOptions().job == "default" == node_options(rpc.RpcOptions()).job
    monkeypatch.setenv("RPCDIST_JOB", "nightly")
    assert NodeOptions().job == "nightly" == node_options(rpc.RpcOptions()).job
    assert node_options(rpc.RpcOptions(job="other")).job == "other"
    node = acquire_node()
    try:
        with pytest.raises(ConfigError, match=r"belongs to job 'nightly', so it cannot join job 'other'.*RPCDIST_JOB"):
            acquire_node(NodeOptions(job="other"))
    finally:
        node.release()
    for wrong in ("", 5):
        with pytest.raises((ConfigError, TypeError), match="job"):
            rpc.RpcOptions(job=wrong)  # type: ignore[arg-type]
