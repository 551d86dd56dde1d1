"""Which workers read the GPU memory of others, on a stand-in for GPUs: the questions, and the end of the answers."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from fake_gpus import UUID, FakeGpuMemory, FakeHost

from rpcdist._proto import value_pb2
from rpcdist.ids import Identity
from rpcdist.rpc._devices import gpu_sharing
from rpcdist.rpc._devices.gpu_sharing import PROBE, GpuSharing
from rpcdist.rpc._devices.lent_gpu_memory import SHARED_ALLOCATION_BYTES, LentGpuMemory
from rpcdist.rpc._peers.directory import Member, MemberEvent
from rpcdist.rpc._peers.network import calling_worker
from rpcdist.rpc.future import Future
from rpcdist.time_limits import GPU_LOAN_DOUBT_S, IDLE_LIMIT_S

ALICE, BOB = Identity("alice", 0, 100), Identity("bob", 1, 101)


class Agent:
    """The sharing of one agent, whose questions to others a test answers.

    Attributes:
        asked: the loan of each question, and the future of its answer.
    """

    def __init__(self, me: Identity, **options: bool) -> None:
        self.asked: list[tuple[value_pb2.GpuLoan, Future[Any]]] = []
        self.sharing = GpuSharing(
            me,
            lambda id: (ALICE, BOB)[id],
            lambda to, session, of_call: None,
            self._ask,
            lambda to, message: None,
            lambda function, *arguments: function(*arguments),
            lambda sender, part: None,
            **{"takes_loans": True, "lends": True, **options},
        )
        self.sharing.borrowed._indices = {UUID: 0}

    def _ask(self, to: int, function: str, arguments: tuple[Any, ...], timeout_s: float) -> Future[Any]:
        assert function == PROBE
        answer: Future[Any] = Future()
        self.asked.append((value_pb2.GpuLoan.FromString(arguments[0]), answer))
        return answer

    def lends(self, device: int = 0, session: Any = None) -> bool:
        """Whether it lends memory of a GPU to bob."""
        lend = self.sharing.route(BOB.id, session).lend
        assert lend is not None
        return lend(device, ()) is not None


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> FakeGpuMemory:
    memory = FakeHost().process("this one")
    lent = LentGpuMemory(memory)
    monkeypatch.setattr(gpu_sharing, "cuda_memory", lambda: memory)
    monkeypatch.setattr(gpu_sharing, "_lent_by_process", lambda: lent)
    return memory


def test_each_gpu_is_asked_about(memory: FakeGpuMemory, caplog: pytest.LogCaptureFixture) -> None:
    """A worker may see one GPU of this worker and not another."""
    caplog.set_level(logging.INFO)
    alice = Agent(ALICE)
    assert not alice.lends(0) and not alice.lends(0) and not alice.lends(1)
    (_, of_first), (_, of_second) = alice.asked
    of_first.set_result("")
    of_second.set_result("a tensor lies on a GPU that this process does not see")
    assert alice.lends(0) and not alice.lends(1)
    text = "tensors of cuda:1 travel through host memory to worker 'bob': a tensor lies on a GPU"
    assert caplog.text.count(text) == 1 and caplog.text.count("travel through host memory") == 1


def test_agents_of_one_process_read_each_others_memory(memory: FakeGpuMemory) -> None:
    alice, bob = Agent(ALICE), Agent(BOB)
    assert not alice.lends()
    ((loan, answer),) = alice.asked
    calling_worker.set(ALICE)
    answer.set_result(bob.sharing.callables[PROBE](loan.SerializeToString()))
    assert alice.lends() and not memory.host.opened


def test_nothing_is_lent_on_a_session_that_has_ended(memory: FakeGpuMemory) -> None:
    alice = Agent(ALICE)
    session = SimpleNamespace(peer=BOB, closed_reason=None)
    assert not alice.lends(0, session) and len(alice.asked) == 1
    alice.asked[0][1].set_result("")
    assert alice.lends(0, session)
    alice.sharing.on_gone(BOB)
    session.closed_reason = "the connection was lost"
    assert not alice.lends(0, session) and len(alice.asked) == 1


@pytest.mark.parametrize("kind", ["left", "joined"])
def test_a_worker_that_has_left_keeps_no_memory(
    memory: FakeGpuMemory, kind: Literal["left", "joined"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports nothing more: neither copies nor the end of its use of allocations."""
    alice = Agent(ALICE)
    assert not alice.lends()
    alice.asked[0][1].set_result("")
    assert alice.lends()
    alice.sharing.on_member(MemberEvent(kind, Member(BOB, "host:1")))
    lent = gpu_sharing._lent_by_process()
    after = time.monotonic() + max(IDLE_LIMIT_S, GPU_LOAN_DOUBT_S) + 1
    monkeypatch.setattr(lent, "_now", lambda: after)
    lent.clean()  # ends doubts
    monkeypatch.setattr(lent, "_now", lambda: after + IDLE_LIMIT_S + 1)
    lent.clean()
    if kind == "left":
        assert not lent.kept_bytes() and not alice.sharing._readers
    else:
        assert lent.kept_bytes() == SHARED_ALLOCATION_BYTES and alice.lends()


def test_an_answer_that_comes_after_the_loss_of_its_worker(memory: FakeGpuMemory) -> None:
    alice = Agent(ALICE)
    assert not alice.lends()
    alice.sharing.on_gone(BOB)
    alice.asked[0][1].set_result("")
    assert not alice.sharing._readers


def test_the_answer_of_a_worker_is_short_in_the_log(memory: FakeGpuMemory, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    alice = Agent(ALICE)
    assert not alice.lends()
    alice.asked[0][1].set_result("x" * 1_000_000)
    assert not alice.lends() and 500 <= len(caplog.text) < 1000


def test_an_agent_ends_although_its_gpu_has_failed(
    memory: FakeGpuMemory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of the program that fails makes every later call of CUDA fail. The log says so once."""
    alice = Agent(ALICE)
    assert not alice.lends()
    alice.asked[0][1].set_result("")
    assert alice.lends()

    def fail(*arguments: object) -> int:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(memory, "read", fail)
    monkeypatch.setattr(LentGpuMemory, "clean", fail)
    for end in (alice.sharing.tick, partial(alice.sharing.on_gone, BOB), partial(alice.sharing.close, 30.0)):
        end()
    assert caplog.text.count("a GPU has failed") == 1 and "illegal memory access" in caplog.text


def test_the_end_of_an_agent_waits_for_copies_of_its_memory(memory: FakeGpuMemory) -> None:
    alice = Agent(ALICE)
    assert not alice.lends()
    closing = threading.Thread(target=alice.sharing.close, args=(30.0,))
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()  # the GPU has not written the loan
    assert memory.run()
    closing.join(30.0)
    assert not closing.is_alive()
