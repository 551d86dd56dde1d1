"""Roles: their workers, finding workers by them, and waiting for a number of them."""

from __future__ import annotations

import pytest

from rpcdist import rpc
from rpcdist.errors import ConfigError, DeadlineExceeded
from rpcdist.rpc._api import initialization
from rpcdist.testing import LIMIT_S, WorkerPool

pytestmark = pytest.mark.multiproc


def join(name: str, rank: int, url: str, role: str | None) -> None:
    options = rpc.RpcOptions(init_method=url, rpc_timeout=LIMIT_S)
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options, role=role)


def my_name() -> str:
    return rpc.get_worker_info().name


def names_of(role: str) -> list[str]:
    return [worker.name for worker in rpc.workers(role)]


def wait_for(role: str, count: int, timeout: float = LIMIT_S) -> list[str]:
    return [worker.name for worker in rpc.wait_for_workers(role, count, timeout)]


def test_workers_are_found_called_and_waited_for_by_their_role(worker_pool: WorkerPool) -> None:
    url = worker_pool.new_url()
    workers = {name: worker_pool.start(name) for name in ("trainer", "g0", "g1", "other")}
    roles = {"trainer": "trainer", "g0": "generator", "g1": "generator", "other": None}
    ranks = {name: rank for rank, name in enumerate(workers)}
    trainer = workers["trainer"]
    trainer.run(join, "trainer", 0, url, "trainer")
    error = trainer.begin(wait_for, "generator", 2, 0.05).error(DeadlineExceeded)
    assert "0 of 2 workers of the role 'generator' came within 0.05 s: none. Check" in str(error)
    waiting = trainer.begin(wait_for, "generator", 2)
    for name in ("g0", "other"):
        workers[name].run(join, name, ranks[name], url, roles[name])
    assert not waiting.done()
    workers["g1"].run(join, "g1", ranks["g1"], url, roles["g1"])
    assert waiting.result() == ["g0", "g1"]
    assert workers["other"].run(names_of, "generator") == ["g0", "g1"]
    assert workers["other"].run(rpc.call_each, "generator", my_name) == ["g0", "g1"]
    workers["g0"].kill()
    assert trainer.run(wait_for, "generator", 1) == ["g1"]  # the dead one does not answer, though its name is there
    waiting = trainer.begin(wait_for, "generator", 2)
    workers["g0"] = worker_pool.start("g0")
    workers["g0"].run(join, "g0", ranks["g0"], url, "generator")  # takes its place
    assert waiting.result() == ["g0", "g1"]
    assert trainer.run(rpc.call_each, "generator", my_name) == ["g0", "g1"]


def test_what_is_no_role(no_agent: None) -> None:
    with pytest.raises(TypeError, match="role must be a string, but got 3"):
        rpc.init_rpc("a", rank=0, world_size=1, role=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the limit is 128"):
        rpc.RpcOptions().role = "x" * 129
    with rpc.session("a", rank=0, world_size=1, role="alone"):
        assert names_of("alone") == ["a"]
        for count in (0, True, 1.5):
            with pytest.raises(ConfigError, match="count is the number of workers"):
                rpc.wait_for_workers("alone", count)  # type: ignore[arg-type]


def test_the_role_that_launch_gave_is_the_default(no_agent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_ROLE", "trainer:3")
    options = rpc.RpcOptions(init_method="memory://")
    with monkeypatch.context() as patch:
        patch.setattr(initialization, "_start", lambda *arguments: None)
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=options)
        assert options.role == "trainer"
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=options, role="server")
        assert options.role == "server"
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=options)  # what the program says counts
        assert options.role == "server"
