"""The contents of torch's profiler: calls, handlers and collectives; without a profiler nothing is recorded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from rpcdist import profile_ranges, rpc
from rpcdist.parallel.pipeline import Pipeline
from rpcdist.parallel.pipeline._step_messages import push
from rpcdist.rpc._api.call_functions import run_profiled
from rpcdist.rpc._calling.rref_calls import RRefCalls
from rpcdist.rpc.rref import RRef
from rpcdist.testing import LIMIT_S, UNIT_S, InProcessCluster


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("trainer", "server") as cluster:
        yield cluster


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


async def double_later(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Scale:
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


def profiler(all_threads: bool) -> profile:
    config = _ExperimentalConfig(profile_all_threads=all_threads)
    # With `acc_events`, torch 2.12 does not warn of events that another cycle would clear.
    return profile(activities=[ProfilerActivity.CPU], experimental_config=config, acc_events=True)


def counts(profiled: profile) -> dict[str, int]:
    """How often each range of ours is in a profile."""
    found = {each.key: each.count for each in profiled.key_averages()}
    return {key: count for key, count in found.items() if "rpc" in key or "handler" in key or "group" in key}


@pytest.mark.parametrize("all_threads", [False, True])
def test_calls_and_handlers_are_in_a_profile(cluster: InProcessCluster, all_threads: bool) -> None:
    x = torch.ones(3)
    with cluster.use("trainer"):
        scale = rpc.remote("server", Scale)
        scale.rpc_sync().scaled(x)
        with profiler(all_threads) as profiled:
            for _ in range(2):
                rpc.rpc_sync("server", double, (x,))
            rpc.rpc_async("server", double, (x,)).wait()
            rpc.rpc_sync("server", double_later, (x,))
            scale.rpc_sync().scaled(x)
        del scale
    found = counts(profiled)
    assert found[f"rpc to 'server' of {__name__}:double"] == 3
    assert found[f"rpc to 'server' of {__name__}:double_later"] == 1
    handlers = {key: count for key, count in found.items() if key.startswith("handler")}
    assert handlers.get(f"handler of {__name__}:double", 0) == (3 if all_threads else 0)


gate = threading.Event()


def wait_for_gate() -> int:
    assert gate.wait(LIMIT_S)
    return 7


def test_a_wait_for_a_future_is_a_range(cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the handler has run, which ends only when the range has begun."""
    block = rpc.Future._block

    def open_gate(self: rpc.Future[int], timeout: float | None) -> None:
        gate.set()
        block(self, timeout)

    monkeypatch.setattr(rpc.Future, "_block", open_gate)
    with cluster.use("trainer"), profiler(all_threads=False) as profiled:
        assert rpc.rpc_async("server", wait_for_gate).wait() == 7
        gate.clear()
        assert rpc.rpc_async("server", wait_for_gate).then(lambda done: done.value() + 1).wait() == 8
        gate.clear()
    found = [event.name for event in profiled.events() if "wait for" in event.name]
    assert found == [f"wait for rpc to 'server' of {__name__}:wait_for_gate", "wait for a future"]


def slow(duration_s: float) -> torch.Tensor:
    time.sleep(duration_s)  # what is tried is a handler that outlives a profiler
    return torch.ones(2) * 2


@pytest.mark.parametrize("all_threads", [False, True])
def test_calls_and_handlers_may_outlive_the_profiler_and_end_under_the_next_one(
    cluster: InProcessCluster, all_threads: bool
) -> None:
    """torch writes the end of a range to where it was, also when that memory is freed or another profiler's."""
    with cluster.use("trainer"):
        for _ in range(3):
            with profiler(all_threads) as first:
                futures = [rpc.rpc_async("server", slow, (0.02 * UNIT_S * (1 + n % 3),)) for n in range(9)]
            with profiler(all_threads) as second:
                for _ in range(300):
                    torch.ones(3) + 1
            assert counts(first)[f"rpc to 'server' of {__name__}:slow"] == 9
            second.key_averages()
            assert all(future.wait().tolist() == [2.0, 2.0] for future in futures)


def test_a_range_that_its_profiler_did_not_outlive_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    leave = torch.autograd.profiler.record_function.__exit__

    def left(self: torch.autograd.profiler.record_function, *error: Any) -> None:
        ended.append(self.name)
        leave(self, *error)

    monkeypatch.setattr(torch.autograd.profiler.record_function, "__exit__", left)
    with profiler(all_threads=True) as first, profile_ranges.record_function("inside"):
        outlives = profile_ranges.record_function("outlives")
        outlives.__enter__()
    with profiler(all_threads=True):
        outlives.__exit__()
    assert ended == ["inside"] and {each.key for each in first.key_averages()} >= {"inside", "outlives"}


def test_a_call_that_fails_ends_its_range(cluster: InProcessCluster) -> None:
    with cluster.use("trainer"), profiler(all_threads=True) as profiled:
        with pytest.raises(TypeError):
            rpc.rpc_sync("server", double)
        with pytest.raises(TypeError):
            rpc.rpc_async("server", double).wait()
    assert counts(profiled)[f"rpc to 'server' of {__name__}:double"] == 2


def test_what_stages_of_a_pipeline_send_is_in_a_profile(cluster: InProcessCluster) -> None:
    stages = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)]
    with cluster.use("trainer"):
        pipe = Pipeline(stages, ["trainer", "server"], num_microbatches=2, loss_fn=torch.nn.MSELoss())
        with profiler(all_threads=True) as profiled:
            pipe.step(torch.ones(4, 2), torch.ones(4, 1))
        del pipe
    found = counts(profiled)
    assert found[f"rpc to 'server' of {push.__module__}:push"] == 2  # activations
    assert found[f"rpc to 'trainer' of {push.__module__}:push"] == 2  # gradients


def test_without_a_profiler_there_are_no_ranges(cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a range without a profiler")

    monkeypatch.setattr(torch.autograd.profiler.record_function, "__enter__", refuse)
    assert not profile_ranges.is_profiling()
    with cluster.use("trainer"):
        assert rpc.rpc_sync("server", double, (torch.ones(2),)).tolist() == [2.0, 2.0]
        assert rpc.rpc_async("server", double, (torch.ones(2),)).wait().tolist() == [2.0, 2.0]


def refuse(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("seven")


@rpc.functions.async_execution
def double_there(x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return rpc.rpc_async("trainer", double, (x,))


def test_torchs_older_profiler_has_the_events_of_callees(cluster: InProcessCluster) -> None:
    x = torch.ones(3)
    with cluster.use("trainer"):
        with profile_ranges.profile(record_shapes=True) as profiled:  # type: ignore[no-untyped-call]
            results = [rpc.rpc_sync("server", double, (x,)), rpc.rpc_async("server", double_later, (x,)).wait()]
            results.append(rpc.rpc_async("server", double_there, (x,)).wait())
            rref = rpc.remote("server", double, (x,))
            results.append(rref.to_here())
            noted = rref._get_profiling_future()
            assert noted is not None
            noted.wait()
            with pytest.raises(ValueError, match="seven"):
                rpc.rpc_sync("server", refuse, (x,))
            broken = rpc.remote("server", refuse, (x,))
            with pytest.raises(ValueError, match="seven"):
                broken.to_here()
        assert rpc.remote("server", double, (x,))._get_profiling_future() is None
        del rref, broken
    assert all(result.tolist() == [2.0] * 3 for result in results)
    events: Any = profiled.function_events
    local = [event.name for event in events if event.name.startswith("rpc_") and not event.is_remote]
    way, back = "(trainer -> server)", "rpc_async#double(server -> trainer)"
    names = ["sync#double", "async#double_later", "async#double_there", "remote#double", "sync#refuse", "remote#refuse"]
    assert local == [f"rpc_{name}{way}" for name in names]
    remote = {event.name: event for event in events if event.is_remote}
    for call in (f"rpc_sync#double{way}", f"rpc_remote#double{way}", f"rpc_async#double_there{way}#remote_op: {back}"):
        product = remote[f"{call}#remote_op: aten::mul"]
        assert product.node_id == (0 if back in call else 1) and product.input_shapes[0] == [3]
        [outer] = [event for event in events if event.name == call]
        assert outer.time_range.start <= product.time_range.start < product.time_range.end <= outer.time_range.end
    assert not profile_ranges.profile.running


def test_a_remote_that_fails_at_once_returns_its_reference_under_torchs_older_profiler(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is there before the parts of the result are asked for."""
    plain = RRefCalls.remote

    def slowly(self: RRefCalls, *args: Any, **kwargs: Any) -> RRef[Any]:
        rref: RRef[Any] = plain(self, *args, **kwargs)
        rref._get_future().exception(LIMIT_S)
        return rref

    monkeypatch.setattr(RRefCalls, "remote", slowly)
    with cluster.use("trainer"):
        with profile_ranges.profile() as profiled:  # type: ignore[no-untyped-call]
            broken = rpc.remote("server", refuse, (torch.ones(1),))
            with pytest.raises(ValueError, match="seven"):
                broken.to_here()
            noted = broken._get_profiling_future()
            assert noted is not None and isinstance(noted.exception(LIMIT_S), ValueError)
        del broken
    events: Any = profiled.function_events
    called = [event.name for event in events if event.name.startswith("rpc_")]
    assert called == ["rpc_remote#refuse(trainer -> server)"]


class Doubler:
    async def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Counting:
    def __call__(self, n: int) -> Iterator[int]:
        yield from range(n)


def counting(n: int) -> Iterator[int]:
    return (number for number in range(n))


@rpc.functions.async_execution
def no_future() -> Any:
    return 3


OUTCOMES: dict[str, Callable[[], object]] = {
    "remote of a coroutine": lambda: rpc.remote("server", double_later, (3,)).to_here(),
    "remote of a callable": lambda: rpc.remote("server", Doubler(), (3,)).to_here(),
    "a callable": lambda: rpc.rpc_sync("server", Doubler(), (3,)),
    "a callable with yield": lambda: list(rpc.rpc_sync("server", Counting(), (3,))),
    "a function with a generator": lambda: list(rpc.rpc_async("server", counting, (3,)).wait()),
    "remote of a generator": lambda: list(rpc.remote("server", counting, (3,)).to_here()),
    "no future": lambda: rpc.rpc_sync("server", no_future),
    "no function": lambda: rpc.rpc_sync("server", cast(Any, 3)),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_call_ends_under_torchs_older_profiler_as_it_does_without(cluster: InProcessCluster, name: str) -> None:
    def outcome() -> str:
        try:
            return repr(OUTCOMES[name]())
        except (RuntimeError, TypeError) as exc:
            return str(exc)

    with cluster.use("trainer"):
        plain = outcome()
        with profile_ranges.profile():  # type: ignore[no-untyped-call]
            assert outcome() == plain


def enter_and_wait() -> None:
    entered.set()
    assert released.wait(LIMIT_S)


entered, released = threading.Event(), threading.Event()


def test_a_call_may_be_cancelled_under_torchs_older_profiler(
    cluster: InProcessCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster.use("trainer"), profile_ranges.profile():  # type: ignore[no-untyped-call]
        future = rpc.rpc_async("server", enter_and_wait)
        assert entered.wait(LIMIT_S)
        assert future.cancel() and future.cancelled()
        released.set()
        rpc.rpc_sync("server", double, (torch.ones(2),))
    assert not caplog.records


@pytest.mark.parametrize("options", [{"allow_functions": ("test_profile_ranges:*",)}, {"allow_pickle": False}])
def test_restricted_workers_are_called_as_they_allow_it(options: dict[str, Any]) -> None:
    x = torch.ones(2)
    with InProcessCluster("trainer", "server", **options) as cluster, cluster.use("trainer"):
        with profile_ranges.profile() as profiled:  # type: ignore[no-untyped-call]
            results = [rpc.rpc_sync("server", double, (x,)), rpc.rpc_async("server", double, (x,)).wait()]
            results.append(rpc.remote("server", double, (x,)).to_here())
    assert all(result.tolist() == [2.0, 2.0] for result in results)
    events: Any = profiled.function_events
    names = [event.name for event in events if event.name.startswith("rpc_")]
    assert names == [f"rpc_{mode}#double(trainer -> server)" for mode in ("sync", "async", "remote")]


def test_a_call_that_could_not_begin_has_no_events_of_another(cluster: InProcessCluster) -> None:
    with cluster.use("trainer"):
        with profile_ranges.profile() as profiled:  # type: ignore[no-untyped-call]
            with pytest.raises(AttributeError, match="pickle"):
                rpc.rpc_sync("server", double, (lambda: None,))
            rpc.rpc_sync("server", double, (torch.ones(2),))
    events: Any = profiled.function_events
    failed, called = [event for event in events if event.name == "rpc_sync#double(trainer -> server)"]
    [product] = [event for event in events if event.name.endswith("#remote_op: aten::mul")]
    assert failed.time_range.end <= called.time_range.start <= product.time_range.start <= called.time_range.end


def test_idempotent_functions_are_called_again_under_torchs_older_profiler(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    retried = list[object]()
    with cluster.use("trainer") as agent, profile_ranges.profile():  # type: ignore[no-untyped-call]
        start = agent.retries.start_call

        def note(_: object, *args: Any, **kwargs: Any) -> Any:
            retried.append(args[1].func)
            return start(*args, **kwargs)

        monkeypatch.setattr(type(agent.retries), "start_call", note)
        assert rpc.rpc_sync("server", triple, (2,)) == rpc.rpc_async("server", triple, (2,)).wait() == 6
    assert retried == [run_profiled] * 2


@rpc.functions.idempotent
def triple(x: int) -> int:
    return 3 * x


def test_torchs_profiler_of_a_process_has_a_list_for_each_call(cluster: InProcessCluster) -> None:
    with profile_ranges._server_process_global_profile() as profiled, cluster.use("trainer"):  # type: ignore[no-untyped-call]
        for _ in range(2):
            rpc.rpc_sync("server", double, (torch.ones(3),))
        with pytest.raises(ValueError, match="seven"):
            rpc.rpc_sync("server", refuse, (torch.ones(3),))
    with cluster.use("trainer"):
        rpc.rpc_sync("server", double, (torch.ones(3),))
    found = [[event.name for event in events] for events in profiled.process_global_function_events]
    assert [names[0] for names in found if names] == ["aten::mul"] * 2
    averages: Any = profiled.key_averages()  # type: ignore[no-untyped-call]
    assert {row.key: row.count for row in averages}["aten::mul"] == 2


def test_torchs_profiler_of_a_process_has_calls_of_callers_that_have_one_too(cluster: InProcessCluster) -> None:
    """torch allows one profiler on a thread."""
    x = torch.ones(3)
    with cluster.use("trainer"), profile_ranges._server_process_global_profile() as served:  # type: ignore[no-untyped-call]
        with profile_ranges.profile() as called:  # type: ignore[no-untyped-call]
            assert rpc.rpc_sync("server", double, (x,)).tolist() == [2.0] * 3
    [events] = served.process_global_function_events
    remote: Any = called.function_events
    assert "aten::mul" in [event.name for event in events]
    assert "rpc_sync#double(trainer -> server)#remote_op: aten::mul" in [event.name for event in remote]


def test_torchs_profiler_of_a_process_has_calls_beside_another_profiler(cluster: InProcessCluster) -> None:
    with cluster.use("trainer"), profiler(False):
        with profile_ranges._server_process_global_profile() as served:  # type: ignore[no-untyped-call]
            rpc.rpc_sync("server", double, (torch.ones(3),))
    [events] = served.process_global_function_events
    assert "aten::mul" in [event.name for event in events]


def test_torchs_profiler_of_a_process_may_be_off(cluster: InProcessCluster) -> None:
    with cluster.use("trainer"):
        with profile_ranges._server_process_global_profile(enabled=False) as served:  # type: ignore[no-untyped-call]
            assert rpc.rpc_sync("server", double, (torch.ones(3),)).tolist() == [2.0] * 3
    assert not served.process_global_function_events
