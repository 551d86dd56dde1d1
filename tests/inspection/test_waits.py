"""Explanations, as tables: facts in, chains out."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from rpcdist.errors import ProtocolViolation
from rpcdist.inspection import (
    CallMade,
    CallServed,
    ChannelFacts,
    Frame,
    GatheringFacts,
    GroupFacts,
    Holder,
    MemberFacts,
    OperationFacts,
    PassFacts,
    PoolFacts,
    ReferenceFacts,
    SilentWorker,
    StreamFacts,
    ThreadState,
    WorkerFacts,
    describe,
    explain,
    facts_from_json,
    facts_to_json,
)

USERS_LINE = Frame("/home/me/train.py", 7, "step")


def facts(worker: str, **fields: object) -> WorkerFacts:
    plain = WorkerFacts(worker, int(worker[1:]), "1", "default/1", "", "host", 1, f"{worker}:1", 0, 9.0, "working")
    return replace(plain, **fields)  # type: ignore[arg-type]


def made(id: int, to: str, session: str, function: str = "m:f", age_s: float = 5.0) -> CallMade:
    return CallMade(id, session, function, to, "waiting", age_s)


def served(id: int, session: str, caller: str, thread: int | None = 1, phase: str = "running") -> CallServed:
    return CallServed(id, session, "m:f", caller, phase, 5.0, 5.0, thread=thread)


def thread(id: int, *waits_for: int, name: str = "worker") -> ThreadState:
    return ThreadState(id, name, (USERS_LINE,), waits_for)


def test_a_chain_ends_at_the_call_that_waits_for_nothing() -> None:
    workers = [
        facts("w0", calls_made=(made(1, "w1", "aa"),), threads=(thread(10, 1, name="MainThread"),)),
        facts("w1", calls_served=(served(1, "aa", "w0"),), calls_made=(made(4, "w2", "bb"),), threads=(thread(1, 4),)),
        facts("w2", calls_served=(served(4, "bb", "w1"),), threads=(thread(1),)),
    ]
    found = explain(workers)
    [chain] = found.chains
    assert [link.worker for link in chain.links] == ["w0", "w0", "w1", "w1", "w1", "w2", "w2"]
    assert found.culprits == (("w2's m:f on thread worker, is at /home/me/train.py:7 in step", 1),)
    assert found.deadlocks == ()


@pytest.mark.parametrize("age_s", [0.1, 5.0])
def test_a_long_call_that_makes_short_calls_goes_on(age_s: float) -> None:
    """Training is one call of minutes that makes calls of milliseconds: it is no reason for waiting."""
    workers = [
        facts("w0", calls_made=(made(1, "w1", "aa"),), threads=(thread(10, 1, name="MainThread"),)),
        facts(
            "w1",
            calls_served=(served(1, "aa", "w0"),),
            calls_made=(made(4, "w0", "bb", age_s=age_s),),
            threads=(thread(1, 4),),
        ),
    ]
    found = explain(workers)
    assert [link.worker for link in found.chains[0].links] == ["w0", "w0", "w1", "w1", "w1"]
    assert len(found.culprits) == (age_s > 1.0)
    assert ("makes progress" in describe(found).splitlines()[0]) == (age_s < 1.0)
    stopped = explain(workers[1:], [SilentWorker("w0", "w0:1", "stopped", "it was stopped")])
    assert "it was stopped" in stopped.culprits[0][0], "a worker that says nothing is told of at once"


def test_a_circle_is_a_deadlock() -> None:
    workers = [
        facts("w0", calls_served=(served(9, "bb", "w1"),), calls_made=(made(1, "w1", "aa"),), threads=(thread(1, 1),)),
        facts("w1", calls_served=(served(1, "aa", "w0"),), calls_made=(made(9, "w0", "bb"),), threads=(thread(1, 9),)),
    ]
    # Nothing begins the circle; a thread of w0 that waits for it does.
    workers[0] = replace(
        workers[0],
        calls_made=(*workers[0].calls_made, made(2, "w1", "aa")),
        threads=(*workers[0].threads, thread(10, 2, name="MainThread")),
    )
    workers[1] = replace(workers[1], calls_served=(*workers[1].calls_served, served(2, "aa", "w0")))
    found = explain(workers)
    assert found.deadlocks == ("w1's m:f waits for w0's m:f, which waits for w1's m:f",)
    assert "DEADLOCK" in describe(found).splitlines()[0]


def test_a_deadlock_names_its_locks() -> None:
    def waits_for(holder: int, id: int) -> ThreadState:
        return replace(thread(id), lock=f"lock{holder}", lock_holder=holder)

    calls = (served(1, "aa", "w1"), served(2, "bb", "w2", 2))
    both = facts("w0", calls_served=calls, threads=(waits_for(2, 1), waits_for(1, 2)))
    assert explain([both]).deadlocks == (
        "w0's m:f (called by w1) waits for the lock `lock2`, held by w0's m:f (called by w2), which waits for the lock "
        "`lock1`, held by w0's m:f (called by w1)",
    )
    itself = facts("w0", calls_served=calls[:1], threads=(waits_for(1, 1),))
    assert explain([itself]).deadlocks == ("w0's m:f waits for the lock `lock1`, which it holds itself",)
    assert "waits for the lock `lock1`, which it holds itself" in explain([itself]).chains[0].links[1].text


def test_a_circle_that_nothing_outside_waits_for_is_found() -> None:
    workers = [
        facts("w0", calls_served=(served(9, "bb", "w1"),), calls_made=(made(1, "w1", "aa"),), threads=(thread(1, 1),)),
        facts("w1", calls_served=(served(1, "aa", "w0"),), calls_made=(made(9, "w0", "bb"),), threads=(thread(1, 9),)),
    ]
    assert len(explain(workers).deadlocks) == 1


def test_actors_that_call_each_other_in_turn_are_a_deadlock() -> None:
    running = replace(served(1, "aa", "w1"), on="0.1", phase="running")
    in_line = replace(served(2, "bb", "w1", None, "in line"), on="0.1")
    workers = [
        facts("w0", calls_served=(running, in_line), calls_made=(made(5, "w1", "cc"),), threads=(thread(1, 5),)),
        facts("w1", calls_served=(served(5, "cc", "w0"),), calls_made=(made(2, "w0", "bb"),), threads=(thread(1, 2),)),
    ]
    assert len(explain(workers).deadlocks) == 1


def test_a_pool_whose_threads_wait_for_the_queue_is_a_deadlock() -> None:
    pool = PoolFacts(1, 0, 1, 0, 1, 0, 1)
    queued = served(2, "bb", "w1", None, "queued")
    workers = [
        facts(
            "w0",
            pool=pool,
            calls_served=(served(1, "aa", "w1"), queued),
            calls_made=(made(5, "w1", "cc"),),
            threads=(thread(1, 5),),
        ),
        facts("w1", calls_served=(served(5, "cc", "w0"),), calls_made=(made(2, "w0", "bb"),), threads=(thread(1, 2),)),
    ]
    assert len(explain(workers).deadlocks) == 1


def test_a_silent_worker_ends_the_chain() -> None:
    workers = [facts("w0", calls_made=(made(1, "w1", "aa"),), threads=(thread(10, 1),))]
    silent = SilentWorker("w1", "w1:1", "stopped", "process 7 is stopped by SIGSTOP", "Thread 1\n  File x")
    text = describe(explain(workers, [silent]))
    assert "w1: did not answer: process 7 is stopped by SIGSTOP" in text
    assert "| Thread 1" in text


def test_what_is_young_goes_well() -> None:
    workers = [facts("w0", calls_made=(made(1, "w1", "aa", age_s=0.5),), threads=(thread(10, 1),))]
    assert explain(workers).chains == ()
    assert len(explain(workers, older_than_s=0.1).chains) == 1


def test_a_rank_that_has_not_called_is_named() -> None:
    operation = OperationFacts(3, "all_reduce", "running", 4.0)
    group = GroupFacts("0", 0, (0, 1), "cpu:tcp", 3, "all_reduce", (operation,))
    workers = [
        facts("w0", groups=(group,)),
        facts("w1", groups=(replace(group, rank=1, last_sequence=2, operations=()),), threads=(_main(),)),
    ]
    text = describe(explain(workers))
    assert "rank 0 is in all_reduce #3 of group '0' for 4.0 s, which w1 has not called" in text
    assert "w1: thread MainThread" in text


def _main() -> ThreadState:
    return ThreadState(10, "MainThread", (USERS_LINE,))


def test_a_backward_pass_is_followed() -> None:
    hook = ThreadState(3, "w", (Frame("/x/autograd/_general_part.py", 1, "run"), USERS_LINE))
    workers = [
        facts("w0", backward_passes=(PassFacts(7, 1, "", (("w1", "owes a gradient"),)),)),
        facts("w1", backward_passes=(PassFacts(7, 1, "w0"),), threads=(hook,)),
    ]
    found = explain(workers)
    [chain] = found.chains
    assert [link.worker for link in chain.links] == ["w0", "w1", "w1"]
    assert chain.links[-1].stack[-1] == USERS_LINE


def test_text_of_other_processes_cannot_steer_a_terminal() -> None:
    call = CallMade(1, "", "\x1b[31mred\x9b0m", "w1", "waiting", 5.0)
    text = describe(explain([facts("w0", calls_made=(call,), threads=(thread(1, 1),))]))
    assert "\x1b" not in text and "\x9b" not in text and "red" in text


# ---------------------------------------------------------------- JSON


def test_facts_come_back_from_json() -> None:
    full = facts(
        "w3",
        members=(MemberFacts("w3", 3, "h:1", "ps"),),
        calls_made=(made(1, "w1", "aa"),),
        calls_served=(replace(served(1, "aa", "w0"), stack=(USERS_LINE,), waits_for=(1, 2)),),
        threads=(thread(1, 2),),
        streams=(StreamFacts(1, "aa", "m:g", "w1", "reads", 3, 2.5),),
        references=(ReferenceFacts("0.1", "w0", "ready", "Counter", (Holder("w1", 3.0), Holder("w3"))),),
        backward_passes=(PassFacts(7, 1, "", (("w1", "owes a gradient"),)),),
        gatherings=(GatheringFacts("barrier", ("w0",), ("w1",)),),
        pool=PoolFacts(1, 1, 0, 0, 0, 0, 8),
        channels=(ChannelFacts("aa", "w1", True, "tcp", True, 10, 20, round_trip_s=0.001),),
        omitted={"threads": 3},
    )
    assert facts_from_json(facts_to_json(full)) == full


def test_fields_of_a_newer_version_are_left_out() -> None:
    text = facts_to_json(facts("w0")).replace('{"worker"', '{"unknown":{"deep":[1]},"worker"', 1)
    assert facts_from_json(text) == facts("w0")


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "null",
        "{",
        "[" * 100_000,
        '{"worker": "w"}',
        facts_to_json(facts("w0")).replace('"pid":1', '"pid":"1"'),
        facts_to_json(facts("w0")).replace('"pid":1', '"pid":true'),
        facts_to_json(facts("w0")).replace('"host"', '"' + "x" * 5000 + '"', 1),
        facts_to_json(facts("w0")).replace('"threads":[]', '"threads":[{}]'),
        facts_to_json(facts("w0")).replace('"members":[]', '"members":{"a":1}'),
        facts_to_json(facts("w0")).replace('"calls_made":[]', '"calls_made":[' + ",".join(["1"] * 20_000) + "]"),
        facts_to_json(facts("w0")).replace('"host":"host"', '"host":"' + "x" * 5000 + '"'),
        "1" * (4 << 20),
        *[
            facts_to_json(facts("w0", age_s=0.5)).replace('"age_s":0.5', f'"age_s":{number}')
            for number in ("NaN", "1e999", "-Infinity", "1e20", "1" + "0" * 400)
        ],
        facts_to_json(facts("w0")).replace('"pid":1', '"pid":1' + "0" * 400),
    ],
)
def test_what_a_hostile_worker_sends_is_refused(text: str) -> None:
    with pytest.raises(ProtocolViolation):
        facts_from_json(text)


MANY = 3000


@pytest.mark.parametrize(
    "fields",
    [
        {"calls_served": tuple(replace(served(id, "aa", "w0", id), is_coroutine=True) for id in range(MANY))},
        {
            "calls_served": (
                replace(served(0, "aa", "w0"), on="x"),
                *(replace(served(id, "aa", "w0", None, "in line"), on="x") for id in range(1, MANY)),
            )
        },
        {
            "calls_served": tuple(served(id, "aa", "w0", id, "running" if id % 2 else "queued") for id in range(MANY)),
            "pool": PoolFacts(1, 0, 1, 0, 0, 0, 1),
        },
        {
            "calls_made": tuple(made(id, "w0", "aa") for id in range(200)),
            "calls_served": tuple(
                replace(served(id, "aa", "w0"), waits_for=tuple(range(200)), thread=None) for id in range(200)
            ),
        },
        {
            "threads": (thread(1, *range(MANY)),),
            "streams": tuple(StreamFacts(id, "aa", "m:f", "w0", "reads", 0) for id in range(MANY)),
        },
    ],
    ids=["coroutines", "in-line", "pool", "everything", "streams"],
)
def test_everything_that_waits_for_everything_is_explained_in_bounded_time(fields: dict[str, object]) -> None:
    """5,000 coroutines that wait for each other took more than seven minutes."""
    began = time.process_time()
    found = explain([facts("w0", **fields)])
    describe(found)
    assert time.process_time() - began < 20.0  # mostly below 2 s
    assert len(found.chains) < 2 * MANY


def test_a_lock_whose_holder_is_not_listed_ends_the_chain() -> None:
    waits = replace(thread(1, 7, name="MainThread"), lock="lock", lock_holder=99)
    [chain] = explain([facts("w0", threads=(waits,), calls_made=(made(7, "w1", "aa"),))]).chains
    assert "w1 was not queried" in chain.links[-1].text


def test_text_that_cannot_be_written_is_replaced() -> None:
    read = facts_from_json(facts_to_json(facts("w0")).replace('"host":"host"', '"host":"a\\ud800b"'))
    assert read.host == "a?b"


def test_workers_that_serve_until_the_shutdown_come_last_and_are_not_counted() -> None:
    """In a cluster all workers but one wait in `shutdown` all the time."""
    depart = made(7, "w0", "cc", "rpcdist.rpc._membership.shutdown:depart", age_s=500.0)
    workers = [
        facts("w0", calls_made=(made(1, "w2", "aa"),), threads=(thread(10, 1, name="MainThread"),)),
        facts("w1", calls_made=(depart,), threads=(thread(11, 7, name="MainThread"),)),
        facts("w2", calls_served=(served(1, "aa", "w0"),), threads=(thread(1),)),
    ]
    found = explain(workers)
    assert [chain.links[0].worker for chain in found.chains] == ["w0", "w1"]
    assert [number for _, number in found.culprits] == [1] and "w2's m:f" in found.culprits[0][0]
    alone = explain(workers[1:2])
    assert len(alone.chains) == 1 and len(alone.culprits) == 1  # where nothing else waits, it is said
