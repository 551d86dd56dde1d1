"""Memory of GPUs that is lent and borrowed, on a stand-in for GPUs.

Nothing is read before it is written, nor used again before it is read, whichever GPU is slow and whichever worker dies.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fake_gpus import UUID, FakeGpuMemory, FakeHost

from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.deadline import Deadline
from rpcdist.errors import SerializationError
from rpcdist.ids import Identity
from rpcdist.rpc._devices import lent_gpu_memory
from rpcdist.rpc._devices.borrowed_gpu_memory import Borrowed, BorrowedGpuMemory
from rpcdist.rpc._devices.cuda_memory import GpuUnavailable
from rpcdist.rpc._devices.gpu_sharing import ValueOnGpus
from rpcdist.rpc._devices.lent_gpu_memory import (
    ALIGNMENT_BYTES,
    MOST_OF_DEVICE,
    SHARED_ALLOCATION_BYTES,
    LentGpuMemory,
    slot_size,
)
from rpcdist.rpc._marshal.arrived_value import ArrivedValue
from rpcdist.rpc._values.tensors import DeviceRoute
from rpcdist.time_limits import GPU_LOAN_DOUBT_S, GPU_WAIT_LIMIT_S, IDLE_LIMIT_S

ALICE, BOB, CAROL = (Identity(name, id, 100 + id) for id, name in enumerate(("alice", "bob", "carol")))


@dataclass
class World:
    """Alice lends to bob."""

    host: FakeHost = field(default_factory=FakeHost)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.alice, self.bob = self.host.process("alice"), self.host.process("bob")
        self.lent = LentGpuMemory(self.alice, lambda: self.now)
        self.borrowed = self.borrower(self.bob)

    def borrower(self, memory: FakeGpuMemory, lent: LentGpuMemory | None = None) -> BorrowedGpuMemory:
        borrowed = BorrowedGpuMemory(lambda: memory, lambda: lent or LentGpuMemory(memory), lambda: self.now)
        borrowed._indices = {UUID: 0}
        return borrowed

    def lend(self, tensor: torch.Tensor, to: Identity = BOB) -> value_pb2.GpuLoan:
        self.tensors.append(tensor)  # the stand-in copies when it runs
        made = self.lent.lend(to, 0, [(tensor.data_ptr(), tensor.nbytes)])
        assert made is not None
        loan, (offset,) = made
        assert offset == ALIGNMENT_BYTES
        return loan

    def copy(self, loan: value_pb2.GpuLoan, size: int) -> tuple[Borrowed, torch.Tensor]:
        target = torch.full((size,), 99, dtype=torch.uint8)
        self.tensors.append(target)
        begun = self.borrowed.begin(loan, ALICE)
        self.borrowed.copy(begun, ALIGNMENT_BYTES, target, size)
        self.borrowed.finish(begun, ALICE)
        return begun, target

    def news(self) -> rpc_pb2.GpuRelease:
        message = self.borrowed.release(ALICE)
        assert message is not None
        return message.gpu_release

    def tell(self) -> None:
        """Alice gets bob's message."""
        news = self.news()
        self.lent.release(news.copied, news.unwanted, BOB, news.closed)


def tensor_of(number: int, size: int = 1000) -> torch.Tensor:
    return torch.full((size,), number, dtype=torch.uint8)


def all_are(tensor: torch.Tensor, number: int) -> bool:
    return bool(tensor.eq(number).all())


def test_a_loan_is_copied_when_it_is_there() -> None:
    world = World()
    loan = world.lend(tensor_of(1))
    _, copied = world.copy(loan, 1000)
    assert not world.bob.run() and all_are(copied, 99)  # alice's GPU is busy
    assert world.alice.run() and world.bob.run()
    assert all_are(copied, 1)


def test_what_is_lent_is_a_copy() -> None:
    world = World()
    source = tensor_of(1)
    loan = world.lend(source)
    world.alice.enqueue(lambda: source.fill_(2))  # the next kernel of the caller
    _, copied = world.copy(loan, 1000)
    assert world.alice.run() and world.bob.run()
    assert all_are(copied, 1) and all_are(source, 2)


def test_a_slot_is_used_again_when_it_was_read() -> None:
    """The news that it is being copied comes before the GPU has copied it."""
    world = World()
    first = world.lend(tensor_of(1))
    _, copied = world.copy(first, 1000)
    world.tell()
    second = world.lend(tensor_of(2))
    assert (first.memory, first.offset) == (second.memory, second.offset)
    assert first.sequence != second.sequence
    assert not world.alice.run()  # she waits for bob's GPU
    _, copied_too = world.copy(second, 1000)
    for _ in range(3):
        world.bob.run()
        world.alice.run()
    assert all_are(copied, 1) and all_are(copied_too, 2)
    assert world.host.num_made == 1


def test_a_loan_that_nobody_wants_is_used_again_at_once() -> None:
    world = World()
    loan = world.lend(tensor_of(1))
    world.borrowed.discard([loan], ALICE)
    world.tell()
    assert world.lent.num_loans == 0
    again = world.lend(tensor_of(2))
    assert again.offset == loan.offset and world.alice.run()


def readers_of(lent: LentGpuMemory) -> list[dict[Any, Any]]:
    """The workers that have each allocation open, with what they know of it."""
    return [dict(each.readers) for each in lent._allocations.values()]


def test_numbers_go_round() -> None:
    world = World()
    loan = world.lend(tensor_of(0))
    world.copy(loan, 1000)
    assert world.alice.run() and world.bob.run()
    world.tell()
    (slot,) = world.lent._idle[0, slot_size(ALIGNMENT_BYTES + 1024)]
    address = slot.allocation.address + slot.offset
    slot.sequence = 0xFFFFFFFD
    for at in (0, 128):
        world.alice.force(0, address + at, slot.sequence)
    for number in range(1, 7):
        loan = world.lend(tensor_of(number))
        _, copied = world.copy(loan, 1000)
        assert not world.bob.run()
        assert world.alice.run() and world.bob.run()
        assert all_are(copied, number)
        world.tell()


def test_others_cannot_end_a_loan() -> None:
    world = World()
    loan = world.lend(tensor_of(1))
    world.lent.release([loan.number], [loan.number], CAROL)
    world.lent.release([loan.number + 1], (), BOB, [loan.number + 1])
    assert world.lent.num_loans == 1


def test_a_loan_whose_message_may_not_have_arrived() -> None:
    world = World()
    loan = world.lend(tensor_of(1))
    world.lent.doubt([loan.number])
    world.now += GPU_LOAN_DOUBT_S - 1
    world.lent.clean()
    assert world.lent.num_loans == 1
    world.now += 2
    world.lent.clean()
    assert world.lent.num_loans == 0
    other = world.lend(tensor_of(1))
    world.lent.doubt([other.number])
    world.lent.release((), [other.number], BOB)  # it did arrive
    assert world.lent.num_loans == 0


def test_no_more_than_a_share_of_the_device() -> None:
    world = World(FakeHost(total_bytes=MOST_OF_DEVICE * (SHARED_ALLOCATION_BYTES + 1000)))
    assert world.lend(tensor_of(1)) is not None
    assert world.lent.lend(BOB, 0, [(0, 2 * SHARED_ALLOCATION_BYTES)]) is None
    assert world.lent.num_loans == 1
    assert world.lend(tensor_of(2)) is not None


def test_memory_that_nobody_uses_is_freed_when_its_readers_have_closed_it() -> None:
    world = World()
    loan = world.lend(tensor_of(1))
    world.copy(loan, 1000)
    assert world.alice.run() and world.bob.run()
    world.tell()
    world.now += IDLE_LIMIT_S + 1
    world.lent.clean()
    assert world.lent.kept_bytes() == SHARED_ALLOCATION_BYTES  # bob has it open
    world.borrowed.clean()
    assert not world.host.opened
    world.tell()
    world.lent.clean()
    assert world.lent.kept_bytes() == 0 and not world.host.allocations
    loan = world.lend(tensor_of(3))
    _, copied = world.copy(loan, 1000)
    assert world.alice.run() and world.bob.run() and all_are(copied, 3)


def test_what_is_closed_with_a_loan_under_way_is_not_freed() -> None:
    world = World()
    world.copy(world.lend(tensor_of(1)), 1000)
    assert world.alice.run() and world.bob.run()
    world.tell()
    loan = world.lend(tensor_of(2))
    world.now += IDLE_LIMIT_S + 1
    world.borrowed.clean()
    world.tell()
    world.lent.clean()
    assert world.lent.kept_bytes()
    _, copied = world.copy(loan, 1000)
    for _ in range(3):
        world.bob.run()
        world.alice.run()
    assert all_are(copied, 2)


def test_what_is_opened_again_before_its_end_is_reported_is_not_freed() -> None:
    world = World()
    world.copy(world.lend(tensor_of(1)), 1000)
    assert world.alice.run() and world.bob.run()
    world.tell()
    world.now += IDLE_LIMIT_S + 1
    world.borrowed.clean()
    assert not world.host.opened
    world.copy(world.lend(tensor_of(2)), 1000)  # one report has the end of the first use and the second loan
    world.tell()
    world.now += IDLE_LIMIT_S + 1
    world.lent.clean()
    assert world.lent.kept_bytes() and world.host.opened
    for _ in range(3):
        world.bob.run()
        world.alice.run()
    world.borrowed.clean()
    world.tell()
    world.lent.clean()
    assert not world.lent.kept_bytes()


def test_memory_of_loans_that_were_not_opened_is_freed() -> None:
    """Those of a call that was cancelled, for example."""
    world = World()
    world.borrowed.discard([world.lend(tensor_of(1)), world.lend(tensor_of(2, 10 << 20))], ALICE)
    world.tell()
    assert world.alice.run()
    world.now += IDLE_LIMIT_S + 1
    world.lent.clean()
    assert not world.lent.kept_bytes() and not world.host.allocations


def test_memory_that_cannot_be_named_for_others_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    handle = world.alice.handle

    def refuse(device: int, address: int) -> bytes:
        monkeypatch.setattr(world.alice, "handle", handle)
        raise GpuUnavailable("not supported here")

    monkeypatch.setattr(world.alice, "handle", refuse)
    with pytest.raises(GpuUnavailable, match="not supported here"):
        world.lend(tensor_of(1))
    assert not world.host.allocations and not world.lent.kept_bytes()


def test_a_report_to_an_earlier_process_of_a_worker_ends_no_loan_of_the_next() -> None:
    world, successor = World(), LentGpuMemory(FakeHost().process("alice again"))
    world.borrowed.discard([world.lend(tensor_of(1))], ALICE)
    assert successor.lend(BOB, 0, ()) is not None
    news = world.news()
    successor.release(news.copied, news.unwanted, BOB, news.closed)
    assert successor.num_loans == 1 and [list(each) for each in readers_of(successor)] == [[BOB]]


def test_the_loss_of_a_process_changes_nothing_of_the_one_in_its_place() -> None:
    """The loss is handled by the pool, perhaps after the first tensors of the new process."""
    world = World()
    memory = world.host.process("alice again")
    again, lent = ALICE._replace(incarnation=999), LentGpuMemory(memory, lambda: world.now)
    source = tensor_of(1)
    made = lent.lend(BOB, 0, [(source.data_ptr(), source.nbytes)])
    assert made is not None
    target = tensor_of(99)
    begun = world.borrowed.begin(made[0], again)
    world.borrowed.copy(begun, ALIGNMENT_BYTES, target, 1000)
    world.borrowed.finish(begun, again)
    world.borrowed.on_gone(ALICE)
    assert not world.bob.run() and world.host.opened  # its GPU has not written yet
    assert memory.run() and world.bob.run() and all_are(target, 1)
    assert world.borrowed.release(ALICE) is None
    news = world.borrowed.release(again)
    assert news is not None and list(news.gpu_release.copied) == [made[0].number]


def test_a_lender_that_is_lost_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    """Its GPU never came to the loan."""
    world = World()
    _, copied = world.copy(world.lend(tensor_of(1)), 1000)
    world.bob.enqueue(lambda: copied.add_(1))  # the next kernel
    assert not world.bob.run()
    world.borrowed.on_gone(ALICE)
    assert world.bob.run()
    assert (
        "worker 'alice' was lost before the GPU of the sender had computed tensors that came with 1 messages"
        in caplog.text
    )
    assert not world.host.opened and world.borrowed.release(ALICE) is None


@pytest.mark.parametrize("end", ["lost", "closed", "idle"])
def test_memory_from_which_a_thread_copies_now_is_not_closed(end: str) -> None:
    """The thread would give CUDA an address that is no memory any more."""
    world = World()
    loan = world.lend(tensor_of(1))
    assert world.alice.run()
    begun = world.borrowed.begin(loan, ALICE)
    if end == "lost":
        world.borrowed.on_gone(ALICE)
    elif end == "closed":
        world.borrowed.close(0.0)
    else:
        world.now += IDLE_LIMIT_S + 1
        world.borrowed.clean()
    assert world.host.opened
    target = tensor_of(0)
    world.borrowed.copy(begun, ALIGNMENT_BYTES, target, 1000)
    assert world.bob.run() and all_are(target, 1)
    world.borrowed.finish(begun, ALICE)
    world.borrowed.clean()
    assert not world.host.opened


@pytest.mark.parametrize("busy", ["allocate", "read", "open"])
def test_reports_wait_for_no_call_of_cuda(monkeypatch: pytest.MonkeyPatch, busy: str) -> None:
    """They are made and handled on the I/O loop, and a call of CUDA may take as long as a kernel of the program."""
    world = World()
    loans = [world.lend(tensor_of(number)) for number in range(3)]
    assert world.alice.run()
    begun, go_on = threading.Event(), threading.Event()
    memory = world.bob if busy == "open" else world.alice
    original = getattr(memory, busy)

    def slowly(*arguments: int) -> object:
        begun.set()
        assert go_on.wait(30.0)
        return original(*arguments)

    acts: dict[str, Callable[[], object]] = {
        "allocate": lambda: world.lent.lend(CAROL, 0, [(0, 0), (0, 100 << 10)] * 50),
        "read": lambda: world.lent.settle(Deadline.after(0.0)),
        "open": lambda: world.borrowed.begin(loans[0], ALICE),
    }
    monkeypatch.setattr(memory, busy, slowly)
    acting = threading.Thread(target=acts[busy])
    acting.start()
    assert begun.wait(30.0)
    world.borrowed.discard(loans[1:], ALICE)
    world.tell()
    world.lent.doubt([loans[0].number])
    world.lent.on_broken(BOB)
    assert world.lent.num_loans == 1 and not go_on.is_set()
    go_on.set()
    acting.join(30.0)
    assert not acting.is_alive()


def test_memory_for_which_a_stream_waits_is_not_closed(caplog: pytest.LogCaptureFixture) -> None:
    """Closing it would wait for the stream, and a loss of the lender could not end that any more."""
    world = World()
    world.copy(world.lend(tensor_of(1)), 1000)
    world.now += IDLE_LIMIT_S + 1
    world.borrowed.clean()
    assert world.host.opened
    world.borrowed.on_gone(ALICE)
    assert world.bob.run() and not world.host.opened
    assert "worker 'alice' was lost before" in caplog.text


def test_a_number_that_never_comes(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    first = world.lend(tensor_of(1))
    _, copied = world.copy(first, 1000)
    assert world.alice.run() and world.bob.run() and all_are(copied, 1)
    forged = value_pb2.GpuLoan()
    forged.CopyFrom(first)
    forged.sequence += 7
    world.copy(forged, 1000)
    world.bob.enqueue(lambda: copied.fill_(5))  # the next kernel
    world.now += GPU_WAIT_LIMIT_S - 1
    world.borrowed.clean()
    assert not world.bob.run() and "has not written it" not in caplog.text
    world.now += 2
    world.borrowed.clean()
    assert world.bob.run() and all_are(copied, 5)
    assert caplog.text.count("worker 'alice' has lent memory of a GPU, and has not written it within 600 s") == 1
    with pytest.raises(SerializationError, match=r"worker 'alice' has lent memory .* nothing more is borrowed"):
        world.borrowed.begin(world.lend(tensor_of(2)), ALICE)
    world.borrowed.on_gone(ALICE)  # another process in its place
    world.borrowed.begin(world.lend(tensor_of(2)), ALICE)


def test_numbers_that_came_late_are_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    _, copied = world.copy(world.lend(tensor_of(1)), 1000)
    world.now += GPU_WAIT_LIMIT_S - 1
    assert world.alice.run() and world.bob.run() and all_are(copied, 1)
    world.now += 100
    world.borrowed.clean()
    assert not world.host.opened and not caplog.text


def test_garbage_of_a_peer_changes_nothing_of_others() -> None:
    """Releases of loans that are not its own, of no loan and of memory that it did not open; loans that are none."""
    world = World()
    loans = [world.lend(tensor_of(number), to) for number, to in ((1, BOB), (2, CAROL))]
    readers = readers_of(world.lent)
    numbers = [loans[0].number, 0, 1 << 63, loans[0].number, *range(100, 200)]
    for sender in (CAROL, ALICE):
        world.lent.release(numbers, numbers, sender, [0, 1 << 63, loans[0].number])
    assert world.lent.num_loans == 2 and readers_of(world.lent) == readers
    for wrong in ({"memory": b"\xff" * 1000}, {"offset": (1 << 64) - 512}, {"size": (1 << 64) - 1}, {"gpu": b""}):
        forged = value_pb2.GpuLoan()
        forged.CopyFrom(loans[0])
        for name, value in wrong.items():
            setattr(forged, name, value)
        with pytest.raises(SerializationError):
            world.borrowed.begin(forged, ALICE)
    _, copied = world.copy(loans[0], 1000)
    assert world.alice.run() and world.bob.run() and all_are(copied, 1)


def test_a_lender_that_is_lost_when_all_was_computed(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    _, copied = world.copy(world.lend(tensor_of(1)), 1000)
    world.alice.run()
    world.borrowed.on_gone(ALICE)
    assert world.bob.run() and all_are(copied, 1)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_worker_that_ends_waits_for_what_was_sent_to_it(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    _, copied = world.copy(world.lend(tensor_of(1)), 1000)
    ending = threading.Thread(target=world.borrowed.close, args=(30.0,))
    ending.start()
    assert world.alice.run()
    ending.join()
    assert world.bob.run() and all_are(copied, 1)
    world.copy(world.lend(tensor_of(1)), 1000)
    world.borrowed.close(0.01)
    assert world.bob.run() and "RPC ended here before the GPU of the sender" in caplog.text


def test_a_receiver_that_is_lost_holds_nobody_up() -> None:
    """It was about to copy, and said so."""
    for is_used_again in (True, False):
        world = World()
        world.copy(world.lend(tensor_of(1)), 1000)
        world.tell()
        if is_used_again:
            world.lend(tensor_of(2), CAROL)
            assert not world.alice.run()
            world.lent.on_gone(BOB)
        else:
            world.lent.on_gone(BOB)
            world.lend(tensor_of(2), CAROL)
        assert world.alice.run()


def test_a_report_that_is_handled_after_the_loss_of_its_sender() -> None:
    world = World()
    world.lend(tensor_of(9, 5000), CAROL)  # the allocation stays
    world.copy(world.lend(tensor_of(1)), 1000)
    news = world.news()
    world.lent.on_gone(BOB)
    world.lent.release(news.copied, news.unwanted, BOB, news.closed)
    world.now += GPU_LOAN_DOUBT_S + 1
    world.lent.clean()
    assert world.lent.num_loans == 1 and world.host.num_made == 1
    world.lend(tensor_of(2), CAROL)
    assert world.alice.run()


def test_the_loss_of_an_earlier_receiver_whose_copy_is_still_awaited() -> None:
    """Two others have got the same slot meanwhile; the stream of the lender has reached neither of these loans."""
    world = World()
    world.copy(world.lend(tensor_of(1)), 1000)
    world.tell()
    second = world.lend(tensor_of(2), CAROL)
    carol = world.borrower(world.host.process("carol"))
    begun, target = carol.begin(second, ALICE), tensor_of(0)
    carol.copy(begun, ALIGNMENT_BYTES, target, 1000)
    carol.finish(begun, ALICE)
    world.lent.release([second.number], (), CAROL)
    world.lend(tensor_of(3), Identity("dave", 3, 103))
    assert not world.alice.run()
    world.lent.on_gone(BOB)
    memory = carol.memory()
    assert isinstance(memory, FakeGpuMemory)
    assert not world.alice.run() and memory.run() and world.alice.run()
    assert all_are(target, 2)


def test_a_copy_that_never_comes(caplog: pytest.LogCaptureFixture) -> None:
    """Bob says that he copies a loan, and his GPU does not come to it."""
    world = World()
    world.copy(world.lend(tensor_of(1)), 1000)
    world.tell()
    world.lend(tensor_of(2), CAROL)
    late = world.lend(tensor_of(3))
    world.now += GPU_WAIT_LIMIT_S - 1
    world.lent.clean()
    assert not world.alice.run() and "has not copied" not in caplog.text
    world.now += 2
    world.lent.clean()
    assert world.alice.run()
    assert caplog.text.count("worker 'bob' has not copied GPU memory that was lent to it within 600 s") == 1
    assert world.lent.lend(BOB, 0, ()) is None
    world.lent.release([late.number], (), BOB)
    world.lend(tensor_of(4), CAROL)
    assert world.alice.run()
    world.lent.on_gone(BOB)
    assert world.lent.lend(BOB, 0, ()) is not None


def test_copies_that_came_late_are_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.copy(world.lend(tensor_of(1)), 1000)
    world.tell()
    world.lend(tensor_of(2))
    for _ in range(2):
        world.bob.run()
        world.alice.run()
    world.now += GPU_WAIT_LIMIT_S + 1
    world.lent.clean()
    assert not caplog.text and not any(slot.awaited for slot in world.lent._slots())
    assert world.lent.lend(BOB, 0, ()) is not None


def test_a_lender_that_ends_waits_until_its_memory_was_read() -> None:
    world = World()
    _, copied = world.copy(world.lend(tensor_of(1)), 1000)
    world.tell()
    world.lent.settle(Deadline.after(0.01))
    ending = threading.Thread(target=world.lent.settle, args=(Deadline.after(30.0),))
    ending.start()
    assert world.alice.run()
    ending.join(0.05)
    assert ending.is_alive()
    assert world.bob.run() and all_are(copied, 1)
    ending.join(30.0)
    assert not ending.is_alive()


def test_a_loss_that_is_told_late_changes_no_newer_number() -> None:
    world = World()
    world.copy(world.lend(tensor_of(1)), 1000)
    world.tell()
    loan = world.lend(tensor_of(2), CAROL)
    for _ in range(2):
        world.bob.run()
        world.alice.run()
    carol = world.borrower(world.host.process("carol"))
    begun = carol.begin(loan, ALICE)
    target = torch.zeros(1000, dtype=torch.uint8)
    carol.copy(begun, ALIGNMENT_BYTES, target, 1000)
    carol.finish(begun, ALICE)
    assert carol.memory().run() and all_are(target, 2)  # type: ignore[attr-defined]
    world.lent.release([loan.number], (), CAROL)
    world.lent.on_gone(BOB)
    world.lend(tensor_of(3))
    assert world.alice.run()


@pytest.mark.parametrize(
    "damage",
    [
        {"offset": 1 << 40},
        {"offset": 100},
        {"size": 1 << 40},
        {"size": 0},
        {"memory": b"unknown"},
        {"gpu": b"another"},
    ],
    ids=str,
)
def test_damaged_loans_are_refused(damage: dict[str, int | bytes]) -> None:
    world = World()
    loan = world.lend(tensor_of(1))
    for name, wrong in damage.items():
        setattr(loan, name, wrong)
    with pytest.raises(SerializationError):
        world.borrowed.begin(loan, ALICE)
    assert world.borrowed.probe(loan, ALICE)
    world.tell()
    assert world.lent.num_loans == 0


def test_a_part_that_is_not_in_its_loan() -> None:
    world = World()
    loan = world.lend(tensor_of(1))
    begun = world.borrowed.begin(loan, ALICE)
    with pytest.raises(SerializationError, match="beyond the"):
        world.borrowed.copy(begun, ALIGNMENT_BYTES, torch.empty(5000, dtype=torch.uint8), 5000)
    world.borrowed.finish(begun, ALICE)
    world.tell()
    assert world.lent.num_loans == 0


def test_a_driver_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    loan = world.lend(tensor_of(1))

    def refuse(*arguments: object) -> None:
        raise GpuUnavailable("CUresult 999")

    monkeypatch.setattr(world.bob, "wait", refuse)
    begun = world.borrowed.begin(loan, ALICE)
    with pytest.raises(SerializationError, match="cannot be read: CUresult 999"):
        world.borrowed.copy(begun, ALIGNMENT_BYTES, tensor_of(0), 1000)
    world.borrowed.finish(begun, ALICE)
    world.tell()
    assert world.lent.num_loans == 0
    monkeypatch.setattr(world.alice, "write", refuse)
    with pytest.raises(GpuUnavailable, match="CUresult 999"):
        world.lend(tensor_of(1))
    world.now += GPU_LOAN_DOUBT_S + 1
    world.lent.clean()
    assert world.lent.num_loans == 0


def test_a_gpu_that_has_failed_keeps_no_use_of_a_loan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the memory would count as in use until the process ends."""
    world = World()
    begun = world.borrowed.begin(world.lend(tensor_of(1)), ALICE)
    world.borrowed.copy(begun, ALIGNMENT_BYTES, tensor_of(0), 1000)

    def fail(*arguments: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(world.bob, "write", fail)
    world.borrowed.finish(begun, ALICE)
    assert begun.opened.num_users == 0


def test_a_report_of_very_many_loans_takes_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The I/O loop handles it."""
    monkeypatch.setattr(lent_gpu_memory, "SHARED_ALLOCATION_BYTES", ALIGNMENT_BYTES)
    world = World()
    for _ in range(200):
        world.lent.lend(BOB, 0, [])
    assert world.host.num_made == 200
    began = time.thread_time()
    world.lent.release((), (), BOB, range(200_000))
    assert time.thread_time() - began < 1.0


def test_a_worker_that_lends_to_itself_opens_nothing() -> None:
    world = World()
    loan = world.lend(tensor_of(4), ALICE)
    borrowed = world.borrower(world.alice, world.lent)
    begun = borrowed.begin(loan, ALICE)
    target = torch.zeros(1000, dtype=torch.uint8)
    borrowed.copy(begun, ALIGNMENT_BYTES, target, 1000)
    borrowed.finish(begun, ALICE)
    assert world.alice.run() and all_are(target, 4)
    assert not world.host.opened
    borrowed.close(1.0)
    assert world.host.allocations


def test_threads_get_slots_of_their_own() -> None:
    world = World()
    source = tensor_of(1)
    loans: list[value_pb2.GpuLoan] = []

    def lend() -> None:
        for _ in range(50):
            loans.append(world.lend(source))

    threads = [threading.Thread(target=lend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({(loan.memory, loan.offset) for loan in loans}) == len({loan.number for loan in loans}) == 200
    world.borrowed.discard(loans, ALICE)
    world.tell()
    assert world.lent.num_loans == 0


@pytest.mark.parametrize("size", [1, 511, 512, 513, 10_000, 100_001, 4 << 20, (4 << 20) + 1, 1_000_000_007])
def test_slots_waste_an_eighth_at_most(size: int) -> None:
    slot = slot_size(size)
    assert size <= slot <= max(512, size * 9 // 8 + 512) and slot % 512 == 0


# ------------------------------------------------------------ where tensors go


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        (DeviceRoute(None), ("cuda:1", True, [1], True)),
        (DeviceRoute(lambda device: torch.device("cuda:3")), ("cuda:3", False, [3], True)),
        (DeviceRoute(lambda device: torch.device("cpu")), ("", False, [], False)),
        (DeviceRoute(None, back=True), ("cuda", False, [], True)),
    ],
    ids=["unmapped", "mapped", "to the CPU", "gradients"],
)
def test_where_a_tensor_goes(route: DeviceRoute, expected: tuple[str, bool, list[int], bool]) -> None:
    value, message = value_pb2.Value(), value_pb2.Tensor()
    stays_on_gpu = route.place(value, message, torch.device("cuda:1"))
    assert (message.device, message.unmapped, list(value.gpus), stays_on_gpu) == expected


def arriving(borrowed: BorrowedGpuMemory, value: value_pb2.Value | None = None) -> ValueOnGpus:
    return ValueOnGpus(value or value_pb2.Value(), ALICE, borrowed, "bob")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a worker without a GPU")
def test_a_worker_without_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    value = arriving(World().borrowed)
    for _ in range(2):
        place = value.device_of(value_pb2.Tensor(device="cuda:1", unmapped=True), None)
        assert place == torch.device("cpu")
    assert caplog.text.count("worker 'bob' has no GPU: tensors of GPUs that worker 'alice' sends") == 1
    assert value.device_of(value_pb2.Tensor(device="cuda"), None) == torch.device("cpu")  # a gradient
    with pytest.raises(SerializationError, match=r"tensor for cuda:1 arrived from worker 'alice', .*'bob' has no GPU"):
        value.device_of(value_pb2.Tensor(device="cuda:1"), None)


def test_a_value_for_more_gpus_than_there_are_anywhere() -> None:
    value = value_pb2.Value(gpus=[7] * 1000)
    arrived = ArrivedValue(value, (), None, ALICE, False, None, arriving(World().borrowed, value))  # type: ignore[arg-type]
    with pytest.raises(SerializationError, match="tensors for 1000 GPUs; the limit is 256"):
        arrived.gpus()
    del value.gpus[2:]
    assert arrived.gpus() == ([7] if torch.cuda.device_count() > 7 else [])


def test_loans_that_are_not_decoded_are_given_back() -> None:
    world = World()
    value = value_pb2.Value(gpu_loans=[world.lend(tensor_of(1)), world.lend(tensor_of(2))])
    arrived = arriving(world.borrowed, value)
    arrived.discard()
    arrived.discard()
    world.tell()
    assert world.lent.num_loans == 0
    with pytest.raises(SerializationError, match="loan 3 of 2"):
        arrived._loan_of(value_pb2.Buffer(size=1, gpu_loan=3))
