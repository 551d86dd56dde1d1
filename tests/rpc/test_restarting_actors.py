"""`rpc.remote(..., serial=True, max_restarts=n)`: an actor is made again, with its state, on a new worker."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import restarting_functions as there
from actor_functions import LIMIT_S, entered, new_gate
from restarting_functions import CheckpointLater, Forgetful, Fragile, Ledger, OnlyCheckpoint, Unsaved, Unsendable

from rpcdist import rpc
from rpcdist.errors import (
    CallRefused,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    OwnerLost,
    RRefError,
    SerializationError,
    WorkerLost,
)
from rpcdist.rpc import RestartingActor
from rpcdist.rpc._actors.checkpointed import Checkpointed
from rpcdist.rpc._api.restarting_actor import _is_answer
from rpcdist.rpc._rref.proxied import CHECKPOINTED_METHOD
from rpcdist.testing import InProcessCluster, WorkerPool, eventually

NUM_CALLS = 100
INVOKE = "rpcdist.rpc._rref.proxied:_invoke_in_turn"


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("a", "b", elastic=True) as cluster, cluster.use("a"):
        yield cluster


def ledger(max_restarts: int = 1, checkpoint_every: int = 1) -> RestartingActor[Ledger]:
    return rpc.remote("b", Ledger, (100,), serial=True, max_restarts=max_restarts, checkpoint_every=checkpoint_every)


def test_the_last_state_survives_the_worker(cluster: InProcessCluster) -> None:
    actor = ledger()
    assert actor.rpc_sync().add(1) == 101
    assert rpc.wait_all([actor.rpc_async().add_later(1) for _ in range(3)]) == [102, 103, 104]
    cluster.kill("b")
    cluster.restart("b")
    assert actor.rpc_sync().add(1) == 105
    assert actor.call(Ledger.read) == (105, [5.0] * 3)
    assert actor.rpc_sync().total() == 105, "an attribute is read"
    assert "at the owner: .rpc_sync().total()" in repr(actor.rpc_sync().total)
    assert actor.num_restarts == 1
    assert repr(actor) == "<RestartingActor Ledger on 'b', restarted 1 times>"


def test_calls_wait_for_the_replacement_and_keep_their_order(cluster: InProcessCluster) -> None:
    actor = ledger()
    assert actor.rpc_sync().add(1) == 101
    cluster.kill("b")
    eventually(lambda: [worker.name for worker in rpc.workers()] == ["a"], "the loss is known")
    sums = [actor.rpc_async().add(1) for _ in range(NUM_CALLS)]
    given_up = actor.rpc_async().add(1000)
    assert given_up.cancel()
    cluster.restart("b")
    assert rpc.wait_all(sums) == list(range(102, 102 + NUM_CALLS))
    with pytest.raises(Cancelled):
        given_up.wait()
    assert actor.rpc_sync().read() == (101 + NUM_CALLS, [1.0 + NUM_CALLS] * 3)


def test_a_call_that_was_lost_left_nothing_in_the_state(cluster: InProcessCluster) -> None:
    gate = new_gate("restarting")
    actor = ledger()
    assert actor.rpc_sync().add(1) == 101
    lost = [actor.rpc_async().add(10, "restarting"), actor.rpc_async().add(20)]
    assert entered["restarting"].wait(LIMIT_S)
    cluster.network.cut("a", "b")  # the answers do not get through
    gate.set()
    for future in lost:
        with pytest.raises(WorkerLost):
            future.wait()
    cluster.kill("b")
    cluster.network.heal("a", "b")
    cluster.restart("b")
    assert actor.rpc_sync().add(1) == 102


def test_what_came_after_the_last_checkpoint_is_lost(cluster: InProcessCluster) -> None:
    actor = ledger(checkpoint_every=3)
    assert [actor.rpc_sync().add(1) for _ in range(5)] == [101, 102, 103, 104, 105]
    cluster.kill("b")
    cluster.restart("b")
    assert actor.rpc_sync().add(1) == 104


def test_a_class_without_checkpoint_begins_anew(cluster: InProcessCluster) -> None:
    actor = rpc.remote("b", Forgetful, (7,), serial=True, max_restarts=-1)
    assert actor.rpc_sync().add(1) == 8
    cluster.kill("b")
    cluster.restart("b")
    assert actor.rpc_sync().add(1) == 8


def test_a_worker_that_was_cut_off_goes_on(cluster: InProcessCluster) -> None:
    actor = ledger()
    actor.rpc_sync().add(1)
    cluster.network.cut("a", "b")
    with pytest.raises(WorkerLost, match=r"of the method add\(\)"):
        actor.rpc_sync().add(1)
    cluster.network.heal("a", "b")
    assert actor.rpc_sync().add(1) in (102, 103), "the lost call may have run"


@pytest.mark.parametrize("answer", [None, (1, 2, 3), (1, 2)])
def test_an_answer_of_another_form_is_an_error(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    """Both workers are in this process, so the owner answers what is put in place of its method."""
    actor = ledger()
    assert actor.rpc_sync().add(1) == 101
    with monkeypatch.context() as patch:
        patch.setattr(Checkpointed, CHECKPOINTED_METHOD, lambda *args: answer)
        with pytest.raises(SerializationError, match=r"worker 'b' sent an invalid answer to add\(\)"):
            actor.rpc_sync().add(1)
    assert actor.rpc_sync().add(1) == 102


def test_restarts_are_counted(cluster: InProcessCluster) -> None:
    actor = ledger(max_restarts=1)
    actor.rpc_sync().add(1)
    for _ in range(2):
        cluster.kill("b")
        cluster.restart("b")
        rpc.wait_for_worker("b")
        if actor.num_restarts == 0:
            assert actor.rpc_sync().add(1) == 102
            [facts] = rpc.inspect_worker("b").actors
            assert (facts.kind, facts.num_restarts, actor.num_restarts) == ("Ledger", 1, 1)
    with pytest.raises(OwnerLost):
        actor.rpc_sync().add(1)
    with pytest.raises(OwnerLost):
        actor.rpc_sync().add(1)


def test_nobody_takes_the_place(cluster: InProcessCluster) -> None:
    actor = ledger()
    actor.rpc_sync().add(1)
    cluster.kill("b")
    eventually(lambda: len(rpc.workers()) == 1, "the loss is known")
    with pytest.raises(DeadlineExceeded, match="no process with its name joined before the deadline of add"):
        actor.rpc_sync(timeout=0.2).add(1)
    cluster.restart("b")
    assert actor.rpc_sync().add(1) == 102


def test_errors_of_methods_and_checkpoints(cluster: InProcessCluster) -> None:
    actor = ledger()
    with pytest.raises(KeyError, match="on purpose"):
        actor.rpc_sync().fail()
    with pytest.raises(AttributeError, match="nothing"):
        actor.rpc_sync().nothing()
    with pytest.raises(TypeError, match=r"items\(\) of the actor Ledger is a generator function: .* Return a list"):
        actor.rpc_sync().items()
    assert actor.rpc_sync().add(1) == 101
    unsaved = rpc.remote("b", Unsaved, (1,), serial=True, max_restarts=1)
    with pytest.raises(RRefError, match=r"add\(\) of the actor Unsaved ran, but .* OSError: the disk is full"):
        unsaved.rpc_sync().add(1)


@pytest.mark.parametrize("what", ["restore", "class"])
def test_an_actor_that_could_not_be_made_again_is_tried_with_each_call(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(there, "broken", {what})
    with pytest.raises(OSError) if what == "class" else nullcontext():  # at first it is the user's error as it is
        assert rpc.remote("b", Fragile, (1,), serial=True, max_restarts=1).rpc_sync().add(1) == 2
    there.broken.clear()
    actor = rpc.remote("b", Fragile, (100,), serial=True, max_restarts=1)
    assert actor.rpc_sync().add(1) == 101
    cluster.kill("b")
    eventually(lambda: len(rpc.workers()) == 1, "the loss is known")
    waiting = [actor.rpc_async().add(1) for _ in range(20)]
    there.broken.add(what)
    cluster.restart("b")
    said = r"Fragile could not be restarted on worker 'b': its class or its restore\(\) raised OSError: (no|the port)"
    for future in waiting:
        with pytest.raises(RRefError, match=said):
            future.wait()
    with pytest.raises(
        RRefError, match=r"The last checkpoint is kept. Fix the error above; the next call retries"
    ) as caught:
        actor.rpc_sync().add(1)
    assert isinstance(caught.value.__cause__, OSError)
    there.broken.clear()
    assert actor.rpc_sync().add(1) == 102
    assert actor.num_restarts == 1


def test_a_state_that_cannot_be_sent_is_named_by_its_path(cluster: InProcessCluster) -> None:
    actor = rpc.remote("b", Unsendable, (1,), serial=True, max_restarts=1)
    part = r"checkpoint\(\)\['cfg'\]\[1\]\['find'\] is a builtins.function, which cannot be pickled"
    for method in ("add", "add_later"):
        with pytest.raises(
            RRefError, match=rf"{method}\(\) of the actor Unsendable ran, but {part}.* create it in restore\(\)"
        ):
            getattr(actor.rpc_sync(), method)(1)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Ledger, {"serial": False, "max_restarts": 1}, "pass serial=True"),
        (Ledger, {"max_restarts": 1, "name": "ledger"}, "omit name="),
        (Ledger, {"max_restarts": -2}, "max_restarts must be a whole number of at least -1, not -2"),
        (Ledger, {"max_restarts": 1.5}, "max_restarts must be a whole number"),
        (Ledger, {"max_restarts": 1, "checkpoint_every": 0}, "checkpoint_every must be a whole number of at least 1"),
        (OnlyCheckpoint, {"max_restarts": 1}, r"OnlyCheckpoint has only one of .*; add restore\(state\)"),
        (CheckpointLater, {"max_restarts": 1}, "with def, not async def"),
        (len, {"max_restarts": 1}, "needs a class"),
    ],
)
def test_what_cannot_be_made_again_is_refused(
    cluster: InProcessCluster, kind: type, options: dict[str, object], said: str
) -> None:
    arguments: dict[str, object] = {"serial": True, **options}
    with pytest.raises(ConfigError, match=said):
        rpc.remote("b", kind, (), **arguments)  # type: ignore[call-overload]


def test_the_creator_keeps_it(cluster: InProcessCluster) -> None:
    with pytest.raises(ConfigError, match="on another worker"):
        rpc.remote("a", Ledger, serial=True, max_restarts=1)
    with pytest.raises(TypeError, match="only be used by its creator"):
        pickle.dumps(ledger())


def test_allowed_functions_are_those_of_the_user() -> None:
    allowed = [f"{Checkpointed.__module__}:{Checkpointed.__qualname__}", f"{Ledger.__module__}:Ledger", INVOKE]
    with InProcessCluster("a", "b", allow_functions=allowed) as cluster, cluster.use("a"):
        assert ledger().rpc_sync().add(1) == 101
        with pytest.raises(CallRefused, match="does not allow calls of restarting_functions:Forgetful"):
            rpc.remote("b", Forgetful, (1,), serial=True, max_restarts=1).rpc_sync().add(1)


@pytest.mark.multiproc
def test_a_killed_worker_is_replaced(worker_pool: WorkerPool) -> None:
    world = worker_pool.new_world(2)
    for joining in [world.begin_join("a", 0), world.begin_join("b", 1)]:
        joining.result()
    assert world["a"].run(there.begin_ledger, "b", 3) == 3
    world["b"].kill()
    going_on = world["a"].begin(there.go_on, 2)
    world.join("b", 1)
    assert going_on.result() == ([4, 5], 1)
    leaving = [world[name].begin(rpc.shutdown) for name in ("a", "b")]
    assert [pending.result() for pending in leaving] == [{}] * 2


@pytest.mark.parametrize(
    ("answer", "is_answer"),
    [(("r", None), True), (("r", (None,)), True), ((1, ()), False), ((1, (2, 3)), False), ((1, 2), False), (1, False)],
)
def test_an_answer_of_another_form_is_no_state(answer: object, is_answer: bool) -> None:
    """The worker of an actor may send anything; the state that it sends is restored elsewhere."""
    assert _is_answer(answer) is is_answer
