"""A peer asks for answers and does not read them: what waits for it is bounded, and ends with its session."""

from __future__ import annotations

from typing import Any

import pytest
import unread_answers_functions as functions
from peer_timeouts import CALM_S

from rpcdist import rpc
from rpcdist.testing import RpcWorld, WorkerPool, eventually

pytestmark = pytest.mark.multiproc

LIMIT_BYTES = 8 << 20
NUM_THREADS = 4
MOST_BYTES = LIMIT_BYTES + (NUM_THREADS + 1) * functions.ANSWER_BYTES


def world_of(pool: WorkerPool, limit_bytes: int = LIMIT_BYTES, **options: Any) -> RpcWorld:
    """The attacker "a" has stopped reading what the victim "b" answers; "c" asks the victim how it is."""
    pool.environment.update(RPCDIST_CHANNELS="local")
    options |= {"max_incoming_bytes": limit_bytes, "max_worker_threads": NUM_THREADS}
    world = pool.world("a", "b", "c", peer_timeout=CALM_S, **options)
    world["a"].run(functions.stop_reading, "b")
    return world


@pytest.mark.parametrize("share_payloads", [True, False], ids=["shared memory", "socket"])
def test_answers_that_are_not_read_are_bounded(worker_pool: WorkerPool, share_payloads: bool) -> None:
    world = world_of(worker_pool, share_payloads=share_payloads)
    num_calls = 60
    world["a"].run(functions.ask, "b", functions.make_bytes, num_calls)
    eventually(lambda: world["b"].run(functions.num_served)[0] >= num_calls)
    eventually(lambda: world["b"].run(functions.num_served)[1] <= 0)
    num_bytes, num_mapped = world["b"].run(functions.account_of, "a")
    # Each thread of the pool may be sending one when there is no more room.
    assert LIMIT_BYTES // 2 < num_bytes + num_mapped and max(num_bytes, num_mapped) <= MOST_BYTES
    assert world["c"].run(rpc.rpc_sync, "b", functions.make_bytes).numel() == functions.ANSWER_BYTES
    world["a"].run(functions.read_on, "b")
    outcomes = world["a"].run(functions.outcomes)
    refused = [outcome for outcome in outcomes if outcome]
    most_kept = 2 * LIMIT_BYTES // functions.ANSWER_BYTES + 4  # some lie in the socket
    assert num_calls - most_kept <= len(refused) < num_calls
    # The last ones may be too many for the caller, which has the same limit, when it reads them all at once.
    assert not [refusal for refusal in refused if f"accepts {LIMIT_BYTES} from one peer at a time" not in refusal]
    assert any("are the answer to a call" in refusal for refusal in refused) and "max_incoming_bytes" in refused[0]
    eventually(lambda: world["b"].run(functions.account_of, "a")[0] == 0)
    assert world["a"].run(rpc.rpc_sync, "b", functions.make_bytes).numel() == functions.ANSWER_BYTES
    world.shutdown()


def test_answers_without_buffers_are_counted(worker_pool: WorkerPool) -> None:
    world = world_of(worker_pool)
    world["a"].run(functions.ask, "b", functions.many_numbers, 80)
    eventually(lambda: world["b"].run(functions.num_served)[0] >= 80)
    eventually(lambda: world["b"].run(functions.num_served)[1] <= 0)
    assert LIMIT_BYTES // 2 < world["b"].run(functions.account_of, "a")[0] <= MOST_BYTES
    world["a"].run(functions.read_on, "b")
    outcomes = world["a"].run(functions.outcomes)
    assert 8 < sum(outcome.startswith("Overloaded") for outcome in outcomes) < 80
    eventually(lambda: world["b"].run(functions.account_of, "a")[0] == 0)
    world.shutdown()


def test_a_stream_whose_items_are_not_read_fails(worker_pool: WorkerPool) -> None:
    world = world_of(worker_pool)
    world["a"].run(functions.ask, "b", functions.stream_of, 8, 16)
    eventually(lambda: sum(world["b"].run(functions.account_of, "a")) > LIMIT_BYTES - 2 * functions.ANSWER_BYTES)
    assert max(world["b"].run(functions.account_of, "a")) <= MOST_BYTES
    world["a"].run(functions.read_on, "b")
    assert any(outcome.startswith("Overloaded") for outcome in world["a"].run(functions.read_streams))
    eventually(lambda: world["b"].run(functions.account_of, "a")[0] == 0)
    world.shutdown()


def test_a_peer_that_reads_no_refusals_is_cut_off(worker_pool: WorkerPool) -> None:
    """Each refusal is an answer, too."""
    world = world_of(worker_pool, 1 << 20)
    for _ in range(100):
        world["a"].run(functions.ask, "b", functions.fail_at_length, 500)
        if not world["b"].run(functions.account_of, "a"):
            break
    eventually(lambda: not world["b"].run(functions.account_of, "a"))
    assert {error.partition(":")[0] for error in world["a"].run(functions.outcomes)} == {"WorkerLost"}
    assert world["c"].run(rpc.rpc_sync, "b", functions.make_bytes).numel() == functions.ANSWER_BYTES
