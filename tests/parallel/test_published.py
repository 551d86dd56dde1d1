"""Published tensors on one host: whole versions in shared memory, who may write to it, and what errors say."""

from __future__ import annotations

import errno
import gc
import signal
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import published_functions as there
import pytest
import torch
from docs_programs import run_page
from inside_published import origin_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rpcdist import checkpoint
from rpcdist.deadline import Deadline
from rpcdist.errors import BlockingInLoop, ConfigError, DeadlineExceeded, TransportError
from rpcdist.parallel import Published
from rpcdist.parallel._published._hosts import HostCopy
from rpcdist.parallel._published._reader import VersionReader
from rpcdist.parallel._published._shard_connection import ShardConnection
from rpcdist.testing import LIMIT_S, InProcessCluster, RpcWorld, WorkerEnded, WorkerPool, eventually
from rpcdist.time_limits import ATTEMPT_LIMIT_S
from rpcdist.transport.shared_memory import Segment, SegmentError

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def lasting_world(module_pool: WorkerPool) -> RpcWorld:
    return module_pool.world("trainer", "g0", "g1", world_size=None)


@pytest.fixture
def world(lasting_world: RpcWorld, request: pytest.FixtureRequest) -> RpcWorld:
    """Workers that survive the test, and publish under a name of their own in each."""
    for worker in lasting_world:
        worker.run(there.use, request.node.name)
    return lasting_world


@pytest.fixture
def mortal_world(worker_pool: WorkerPool) -> RpcWorld:
    """Workers of one test."""
    return worker_pool.world("trainer", "g0", "g1", world_size=None)


def test_consumers_get_the_newest_version_whole(world: RpcWorld) -> None:
    waiting = world["g0"].begin(there.pull)  # nobody has published yet
    assert world["trainer"].run(there.publish, 7) == 1
    assert waiting.result() == (1, [7.0])
    assert world["trainer"].run(there.publish, 8) == 2
    assert world["trainer"].run(there.publish, 9) == 3
    assert world["g0"].run(there.pull, 1) == (3, [9.0])
    assert world["g0"].run(there.pull, 3) == (3, [-1.0])  # nothing newer, and nothing was copied
    assert world["g1"].run(there.view) == (3, [9.0])
    assert world["trainer"].run(there.pull) == (3, [9.0])
    waiting = world["g1"].begin(there.pull, 3, wait=True)
    in_coroutine = world["g0"].begin(there.pull_in_coroutine, 3)
    assert world["trainer"].run(there.publish, 10) == 4
    assert waiting.result() == (4, [10.0])
    assert in_coroutine.result() == 4


def test_a_version_that_comes_just_before_the_wait_ends_it(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster.use("trainer"):
        weights, consumer = Published("policy"), Published("policy")
        weights.publish({"a": torch.ones(3)})
        assert consumer.pull_into(into := {"a": torch.zeros(3)}) == 1
        has_come = []
        wait_for, wait_for_newer = Published._wait_for, VersionReader.wait_for_newer

        def publish_and_wait(pulling: Published, *args: Any) -> None:
            weights.publish({"a": torch.full((3,), 2.0)})
            wait_for(pulling, *args)

        def noted(reader: VersionReader, version: int, deadline: Deadline) -> bool:
            has_come.append(wait_for_newer(reader, version, deadline))
            return has_come[-1]

        monkeypatch.setattr(Published, "_wait_for", publish_and_wait)
        monkeypatch.setattr(VersionReader, "wait_for_newer", noted)
        assert consumer.pull_into(into, 1, wait=True) == 2
        assert has_come == [True], "not found by another look, when the time of a wait is over"
        assert into["a"].eq(2).all()
        consumer.close()
        weights.close()


def test_each_version_ends_the_waits_of_all_readers(mortal_world: RpcWorld) -> None:
    assert mortal_world["trainer"].run(there.waits_that_each_version_ends, 3, 20) == [True] * 60 + [False] * 3


def test_each_version_ends_the_waits_of_all_readers_in_its_process(cluster: InProcessCluster) -> None:
    assert cluster.run("trainer", there.waits_that_each_version_ends, 3, 20) == [True] * 60 + [False] * 3


def test_all_on_a_host_share_the_memory_of_the_publisher(world: RpcWorld) -> None:
    world["trainer"].run(there.publish, 1)
    for name in ("g0", "g1"):
        world[name].run(there.pull)
        assert not world[name].run(there.has_copy)
    size_bytes = sum(torch.Size(shape).numel() * 4 for shape in there.SHAPES.values())
    assert world["g0"].run(there.descriptors_and_maps)[1] >= 3 * size_bytes  # three segments, mapped and not copied


def test_modules_with_buffers_and_tied_weights(world: RpcWorld) -> None:
    published = world["trainer"].run(there.publish_module, 1)
    torch.testing.assert_close(world["g0"].run(there.pull_module), published, rtol=0, atol=0)


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes_are_converted_by_the_publisher_and_by_the_consumer(world: RpcWorld, wanted: torch.dtype) -> None:
    world["trainer"].run(there.publish_as, torch.bfloat16)
    found = world["g0"].run(there.pull_as, wanted)
    expected = torch.linspace(-1, 1, 100, dtype=torch.float64).to(torch.bfloat16).to(wanted)
    torch.testing.assert_close(found, {"w": expected, "n": torch.arange(5)}, rtol=0, atol=0)


def test_a_view_stays_what_it_was_until_the_next_one(world: RpcWorld) -> None:
    world["trainer"].run(there.publish, 1)
    assert world["g0"].run(there.view) == (1, [1.0])
    assert [world["trainer"].run(there.publish, value) for value in range(2, 12)] == list(range(2, 12))
    assert world["g0"].run(there.look_at_view) == [1.0]
    assert world["g0"].run(there.view) == (11, [11.0])


def test_a_version_is_left_out_when_all_memory_is_being_read(world: RpcWorld, request: pytest.FixtureRequest) -> None:
    name = request.node.name
    world["trainer"].run(there.publish, 1)
    world["g0"].run(there.view)
    world["trainer"].run(there.publish, 2)
    world["g1"].run(there.view)
    assert world["trainer"].run(there.publish, 3) == 3
    assert world["trainer"].run(there.publish, 4) == 3
    assert (
        f"version 4 of {name!r} was left out: 2 other versions are still read, by g0, g1" in world["trainer"].output()
    )
    error = world["trainer"].begin(there.publish, 4, within=9, timeout=0.1).error(DeadlineExceeded)
    assert f"version 4 of {name!r} was not published in time: 2 other versions are still read, by g0, g1" in str(error)
    waiting = world["trainer"].begin(there.publish, 5, within=9)
    world["g1"].run(there.close)  # lets go of its view
    assert waiting.result() == 4
    assert world["g0"].run(there.view) == (4, [5.0])


def test_a_reader_that_is_killed_gives_its_version_back(mortal_world: RpcWorld) -> None:
    world = mortal_world
    world["trainer"].run(there.publish, 1)
    world["g0"].run(there.view)
    world["trainer"].run(there.publish, 2)
    world["g1"].run(there.view)
    assert world["trainer"].run(there.publish, 3) == 3
    before = world["trainer"].run(there.descriptors_and_maps)
    world["g0"].kill()
    world["g1"].kill()
    assert world["trainer"].run(there.publish, 4) == 4
    after = world["trainer"].run(there.descriptors_and_maps)
    assert after[0] < before[0] and after[1] < before[1]  # what it had for them is freed


def test_a_stopped_reader_holds_up_nobody(world: RpcWorld) -> None:
    world["trainer"].run(there.publish, 1)
    world["g0"].run(there.view)
    world["g0"].stop()
    assert world["trainer"].run(there.publish_many, 21) == 21
    assert world["g1"].run(there.pull)[0] == 21
    world["g0"].resume()
    assert world["g0"].run(there.look_at_view) == [1.0]


def test_the_limit_of_a_pull_holds_where_the_publisher_stands_still(mortal_world: RpcWorld) -> None:
    world = mortal_world
    world["g1"].run(there.publish, 1)
    world["g1"].stop()
    began = time.monotonic()
    error = world["g0"].begin(there.pull, timeout=0.2).error(DeadlineExceeded)
    assert "from its publisher" in str(error) and time.monotonic() - began < ATTEMPT_LIMIT_S
    world["g1"].resume()


def test_consumers_cannot_write_to_what_they_share(mortal_world: RpcWorld) -> None:
    world = mortal_world
    world["trainer"].run(there.publish, 1)
    with pytest.raises(WorkerEnded, match=f"status {-signal.SIGSEGV}"):
        world["g0"].run(there.write_to_view)
    assert world["g1"].run(there.pull) == (1, [1.0])
    segment = Segment.create(4096, is_for_readers=True)
    ours = segment.map()
    segment.forbid_writing()
    ours[0] = 7
    with pytest.raises(SegmentError, match="not permitted"):
        segment.map()
    assert segment.map(is_writable=False)[0] == 7
    segment.close()


def test_the_bound_on_staleness_waits_for_all_consumers(mortal_world: RpcWorld) -> None:
    world = mortal_world
    world["trainer"].run(there.publish, 1)
    assert world["g0"].run(there.pull) == (1, [1.0])
    assert world["g1"].run(there.pull) == (1, [1.0])
    assert world["trainer"].run(there.publish, 2, within=1) == 2
    waiting = world["trainer"].begin(there.publish, 3, within=0)
    assert world["g0"].run(there.pull, 2, wait=True) == (3, [3.0])
    assert not waiting.done()
    assert world["g1"].run(there.view) == (3, [3.0])
    assert waiting.result() == 3
    error = world["trainer"].begin(there.publish, 4, within=0, timeout=0.1).error(DeadlineExceeded)
    assert "version 4 of 'policy' is published" in str(error)
    assert "'g0' (3), 'g1' (3)" in str(error)
    assert world["g0"].run(there.pull) == (4, [4.0])
    waiting = world["trainer"].begin(there.publish, 5, within=0)
    world["g0"].kill()
    world["g1"].kill()
    assert waiting.result() == 5  # the dead do not count


def test_a_publisher_that_dies_is_replaced_and_the_numbers_go_on(mortal_world: RpcWorld) -> None:
    world = mortal_world
    world["g0"].run(there.publish, 1)
    world["g0"].run(there.publish, 2)
    assert world["g1"].run(there.pull) == (2, [2.0])
    world["g0"].kill()
    assert world["g1"].run(there.pull) == (2, [2.0])  # what is mapped stays
    assert world["g1"].run(there.pull, 2) == (2, [-1.0])
    waiting = world["g1"].begin(there.pull, 2, wait=True)
    assert world["trainer"].run(there.publish, 3) == 3  # another worker
    assert waiting.result() == (3, [3.0])
    world["trainer"].run(there.publish, 4, version=10)
    assert world["g1"].run(there.pull) == (10, [4.0])
    error = world["trainer"].begin(there.publish, 5, version=10).error(ConfigError)
    assert "version=10 of 'policy': the next number is 11" in str(error)
    world.shutdown("trainer", "g1")  # without `close` before it


def test_a_version_that_was_chosen_before_the_publisher_died_keeps_its_number(mortal_world: RpcWorld) -> None:
    world = mortal_world
    world["g0"].run(there.publish, 1)
    assert world["g1"].run(there.pull) == (1, [1.0])
    world["g0"].run(there.publish, 2)
    world["g1"].run(there.begin_held_pull)
    world["g0"].kill()
    version = world["trainer"].run(there.publish, 3)
    found = world["g1"].run(there.end_held_pull)
    # The tensors of the dead publisher do not have a number of the new one.
    assert found == (version, [3.0]) or (found == (2, [2.0]) and version > 2)
    assert world["g1"].run(there.pull, 0) == (version, [3.0])


def test_a_publisher_waits_for_workers_that_may_have_seen_more(mortal_world: RpcWorld) -> None:
    world = mortal_world
    for value in (1, 2):
        world["g0"].run(there.publish, value)
    assert world["g1"].run(there.pull) == (2, [2.0])
    world["g0"].kill()
    world["trainer"].run(there.wait_until_nobody_publishes)
    world["g1"].stop()
    error = world["trainer"].begin(there.publish, 3, timeout=0.5).error(DeadlineExceeded)
    assert "worker 'g1' did not report in time which versions it has seen" in str(error)
    waiting = world["trainer"].begin(there.publish, 3)
    world["g1"].resume()
    assert waiting.result() == 3
    assert world["g1"].run(there.pull, 2, wait=True) == (3, [3.0])


def test_memory_and_descriptors_stay_as_they_are(world: RpcWorld) -> None:
    world["trainer"].run(there.publish_many, 5)
    for name in ("g0", "g1"):
        world[name].run(there.pull)
    before = {worker.name: worker.run(there.descriptors_and_maps) for worker in world}
    pulling = [world[name].begin(there.pull_until, 1005) for name in ("g0", "g1")]
    assert world["trainer"].run(there.publish_many, 1005) == 1005
    for pending in pulling:
        assert pending.result() >= 1
    assert {worker.name: worker.run(there.descriptors_and_maps) for worker in world} == before


def test_consumers_that_have_gone_keep_no_descriptors_of_a_publisher_that_is_done(world: RpcWorld) -> None:
    world["trainer"].run(there.publish, 1)
    found = []
    for _ in range(10):
        assert world["g0"].run(there.pull) == (1, [1.0])
        world["g0"].run(there.close)
        found.append(world["trainer"].run(there.descriptors_and_maps)[0])
    # The last ones close after the answer to their consumer.
    eventually(lambda: world["trainer"].run(there.descriptors_and_maps)[0] <= found[0], f"as at first: {found}")


# ---------------------------------------------------------------- bad input


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("trainer", "g0") as cluster:
        yield cluster


def test_bad_input_is_an_error_that_names_tensor_shapes_and_workers(cluster: InProcessCluster) -> None:
    with cluster.use("trainer"):
        weights = Published("policy")
        for bad, text in [
            ({}, "no tensor to publish"),
            ([torch.ones(2)], "are a list: pass a module"),
            ({"a": 3}, "'a' of the values of 'policy' is a int"),
            ({3: torch.ones(2)}, "the name 3, which is not a string"),
            ({"a": torch.ones(2).to_sparse()}, "'a' of the values of 'policy' is sparse"),
            ({"a": torch.ones(2, device="meta")}, "'a' of the values of 'policy' is on the meta device"),
        ]:
            with pytest.raises(ConfigError, match=text):
                weights.publish(bad)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"'a' is torch\.float32, which torch cannot convert to torch\.float4"):
            weights.publish({"a": torch.ones(2)}, dtype=torch.float4_e2m1fn_x2)
        with pytest.raises(ConfigError, match=r"dtype=torch\.int32"):
            weights.publish({"a": torch.ones(2)}, dtype=torch.int32)
        weights.publish({"a": torch.ones(2, 3), "b": torch.ones(4)})
        for further, text in [
            ({"a": torch.ones(3, 2), "b": torch.ones(4)}, r"'a' of 'policy' has shape \(3, 2\) .* but \(2, 3\) in"),
            ({"a": torch.ones(2, 3)}, "'b' of 'policy' is missing"),
            ({"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(1)}, "did not have c"),
        ]:
            with pytest.raises(ConfigError, match=text):
                weights.publish(further)
        for number in (0, -1, True, "3", 1.5):
            with pytest.raises(ConfigError, match="version numbers are 1 to"):
                weights.publish({"a": torch.ones(2, 3), "b": torch.ones(4)}, version=number)  # type: ignore[arg-type]
        for have in (-1, True, "1", None):
            with pytest.raises(
                ConfigError, match=f"newer_than must be the number of a version of 'policy', .* not {have!r}"
            ):
                weights.pull_into({"b": torch.ones(4)}, have)  # type: ignore[arg-type]
        assert weights.publish({"b": torch.full((4,), 2.0), "a": torch.ones(2, 3)}) == 2  # in another order
        with pytest.raises(ConfigError, match="within must be a number of versions"):
            weights.publish({"a": torch.ones(2, 3), "b": torch.ones(4)}, within=-1)
    with cluster.use("g0"):
        mine = Published("policy")
        a, b = torch.zeros(2, 3), torch.zeros(4)
        targets: list[tuple[nn.Module | dict[str, torch.Tensor], str]] = [
            (
                {"a": torch.zeros(2, 4)},
                r"'a' of 'policy' has shape \(2, 3\) at its publisher 'trainer', but \(2, 4\) at 'g0'",
            ),
            ({"a": a, "x": b}, "'g0' wants 'x' in 'policy', which 'trainer' did not publish: it has 'a', 'b'"),
            ({"b": torch.zeros(4, dtype=torch.int32)}, r"float32 at its publisher 'trainer', .* torch\.int32 at 'g0'"),
            ({}, "nothing to pull 'policy' into"),
            (nn.ParameterDict({"a": a}), "'trainer' publishes 'b' in 'policy', which the module of 'g0' does not have"),
        ]
        for target, text in targets:
            with pytest.raises(ConfigError, match=text):
                mine.pull_into(target)
        assert not a.any() and not b.any()
        assert mine.pull_into({"b": b}) == 2  # some of them
        assert b.eq(2).all()
        with pytest.raises(ConfigError, match=r"'trainer' already publishes under the name 'policy'"):
            mine.publish({"a": torch.ones(1)})
        with pytest.raises(DeadlineExceeded, match="no worker published 'polcy' in time"):
            Published("polcy").pull_into({"b": b}, timeout=0.05)
        for keep in (0, 8, True):
            with pytest.raises(ConfigError, match="keep must be the number of versions"):
                Published("policy", keep=keep)
        with pytest.raises(ConfigError, match="name of published tensors"):
            Published("")
        mine.close()


def test_a_later_version_has_values_of_the_kinds_of_the_first(cluster: InProcessCluster) -> None:
    with cluster.use("trainer"):
        weights, into = Published("policy"), {"a": torch.zeros(1), "n": torch.zeros(1, dtype=torch.int64)}
        weights.publish({"a": torch.ones(1), "n": torch.tensor([7])})
        for a, n, text in [
            (torch.ones(1), torch.tensor([0.5]), r"'n' of 'policy' is torch\.float32 in this version, .*torch\.int64"),
            (torch.tensor([1j]), torch.tensor([8]), r"'a' of 'policy' is torch\.complex64 in this version"),
        ]:
            with pytest.raises(ConfigError, match=text):
                weights.publish({"a": a, "n": n})
        assert weights.publish({"a": torch.ones(1, dtype=torch.float64), "n": torch.tensor([8])}) == 2
        with pytest.raises(ConfigError, match=r"which cannot be converted to torch\.int32"):
            weights.pull_into(into | {"a": torch.zeros(1, dtype=torch.int32)})
        assert weights.pull_into(into) == 2 and into["n"].item() == 8
        weights.close()


def test_tensors_that_lose_their_memory_are_an_error(cluster: InProcessCluster) -> None:
    """In torch, and where small tensors are copied at once, they are the end of the process."""
    values = {f"t{n}": torch.ones(10) for n in range(100)} | {"large": torch.ones(10_000)}
    into = {name: torch.zeros_like(value) for name, value in values.items()}
    with cluster.use("trainer"):
        weights = Published("policy")
        for version in (1, 2):
            assert weights.publish(values) == weights.pull_into(into) == version
        for name in ("t7", "large"):
            for tensors in (values, into):
                storage, size_bytes = tensors[name].untyped_storage(), tensors[name].nbytes
                storage.resize_(0)
                others = torch.cat([tensor for other, tensor in into.items() if other != name])
                with pytest.raises(ConfigError, match=r"a tensor of shape \(10(000)?,\) has lost its memory"):
                    if tensors is values:
                        weights.publish(values)
                    else:
                        weights.pull_into(into)
                assert torch.cat([tensor for other, tensor in into.items() if other != name]).equal(others)
                storage.resize_(size_bytes)
                tensors[name].fill_(1)
            assert weights.publish({key: value.mul_(2) for key, value in values.items()}) > 2
            weights.pull_into(into)
            assert all(into[key].equal(value) for key, value in values.items())
        weights.close()


def test_a_checkpoint_has_the_number_of_the_version(cluster: InProcessCluster, tmp_path: Path) -> None:
    values = {"a": torch.ones(3)}
    with cluster.use("trainer"):
        weights = Published("first run")
        for _ in range(3):
            weights.publish(values)
        checkpoint.save(tmp_path / "saved", {"model": values, "weights": weights})
        again = Published("second run")
        checkpoint.load(tmp_path / "saved", {"weights": again})
        assert again.version == 3
        assert again.publish(values) == 4
        with pytest.raises(ConfigError, match="already has version 4"):
            again.load_state_dict({"version": 9})
        with pytest.raises(ConfigError, match="the state of 'third' must be"):
            Published("third").load_state_dict({"step": 9})
    with cluster.use("g0"):
        mine = Published("second run")
        assert mine.pull_into({"a": torch.zeros(3)}) == 4
        mine.close()


def test_the_page_runs(cluster: InProcessCluster) -> None:
    with cluster.use("trainer"):
        run_page("docs/weights.md")


async def test_an_event_loop_is_not_blocked() -> None:
    weights = Published("policy")
    with pytest.raises(BlockingInLoop, match="publish_async"):
        weights.publish({})
    with pytest.raises(BlockingInLoop, match="pull_into_async"):
        weights.pull_into({})
    with pytest.raises(BlockingInLoop, match="view_async"):
        weights.view()


def test_many_small_tensors_are_copied_as_torch_would(cluster: InProcessCluster) -> None:
    with cluster.use("trainer"):
        weights = Published("small")
        source = {f"t{n}": torch.full((n % 7 + 1, 3), float(n)) for n in range(100)} | {"large": torch.ones(9000)}
        into = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
        versions = [tensor._version for tensor in into.values()]
        for round in range(1, 4):
            assert weights.publish(source) == round
            assert weights.pull_into(into) == round
            torch.testing.assert_close(into, source, rtol=0, atol=0)
            for tensor in source.values():
                tensor += 1
        assert all(tensor._version > before for tensor, before in zip(into.values(), versions, strict=True))
        source["t5"] = torch.arange(36.0).reshape(3, 12)[:, ::2].t()  # strided, as are targets
        into["t8"] = torch.zeros(3, 2).t()
        for _ in range(2):
            weights.publish(source)
            weights.pull_into(into)
            torch.testing.assert_close(into, source, rtol=0, atol=0)
            source["t9"].t_()  # the same objects, memory and shapes
            into["t16"].t_()
        with torch.inference_mode():
            weights.publish(source)
            weights.pull_into(into)
        torch.testing.assert_close(into, source, rtol=0, atol=0)
        weights.pull_into(converted := {name: tensor.double() for name, tensor in into.items()})
        torch.testing.assert_close(converted, {name: tensor.double() for name, tensor in source.items()})
        weights.close()


def test_a_module_of_many_small_tensors(cluster: InProcessCluster) -> None:
    source, into = (nn.Sequential(*[nn.Linear(3, 3) for _ in range(40)]) for _ in range(2))
    with cluster.use("trainer"):
        weights = Published("small")
        for version in range(1, 4):
            assert weights.publish(source) == weights.pull_into(into) == version
            torch.testing.assert_close(into.state_dict(), source.state_dict(), rtol=0, atol=0)
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.add_(1)
        source.half()
        with torch.no_grad():
            list(source.parameters())[6].t_()
        weights.publish(source)
        into.double()
        weights.pull_into(into)
        torch.testing.assert_close(into.state_dict(), source.double().state_dict(), rtol=0, atol=0)
        list(source.parameters())[11].data = torch.zeros(5)
        with pytest.raises(ConfigError, match=r"'5.bias' of 'small' has shape \(5,\) in this version, but \(3,\)"):
            weights.publish(source)
        weights.close()


def test_small_targets_may_get_other_memory_while_a_pull_waits(cluster: InProcessCluster) -> None:
    into = {f"t{n}": torch.zeros(10) for n in range(100)}
    with cluster.use("trainer"):
        weights = Published("small")
        assert weights.publish({name: torch.ones(10) for name in into}) == 1
        assert weights.pull_into(into) == 1
        before = [tensor.data for tensor in into.values()]
        consumer = Published("small")
        pulling = cluster.begin("trainer", partial(consumer.pull_into, into, 1, wait=True, timeout=LIMIT_S))
        eventually(lambda: consumer._whole[0] is not None, "it has looked at its targets")
        for tensor in into.values():
            tensor.data = torch.zeros(10)
        weights.publish({name: torch.full((10,), 7.0) for name in into})
        assert pulling.result(LIMIT_S) == 2
        assert all(tensor.eq(7).all() for tensor in into.values())
        assert all(tensor.eq(1).all() for tensor in before), "nobody writes to what they had"
        consumer.close()
        weights.close()


@pytest.mark.parametrize("consumer", ["trainer", "g0"])  # g0 shares no memory with it, and fetches
def test_generators_pull_in_inference_mode(cluster: InProcessCluster, consumer: str) -> None:
    with cluster.use("trainer"):
        weights = Published("policy")
        with torch.inference_mode():
            assert weights.publish({"a": torch.ones(3)}) == 1
    with cluster.use(consumer):
        mine = Published("policy")
        with torch.inference_mode():
            into = {"a": torch.zeros(3)}  # only inference mode may write to it, torch says
            assert mine.pull_into(into) == 1
    with cluster.use("trainer"):
        assert weights.publish({"a": torch.full((3,), 2.0)}) == 2
    with cluster.use(consumer):
        assert mine.pull_into(into, 1, wait=True) == 2
        assert into["a"].eq(2).all()
        parameter = nn.Parameter(torch.zeros(3))
        before = parameter._version
        with torch.inference_mode():
            assert mine.pull_into({"a": parameter}) == 2
        assert parameter.eq(2).all() and parameter.requires_grad and parameter._version > before
        mine.close()


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:Accessing the data pointer of FakeTensor"
)
def test_targets_that_cannot_be_written_leave_the_others_as_they_are(cluster: InProcessCluster) -> None:
    with cluster.use("trainer"):
        weights = Published("policy")
        weights.publish({"a": torch.ones(4), "b": torch.ones(4)})
        a = torch.zeros(4)
        for b, text in [
            (torch.zeros(1).expand(4), "'b' of the targets for 'policy' is expanded"),
            (
                torch.zeros(4, dtype=torch.complex64).conj().imag,
                "'b' of the targets for 'policy' is a conjugate or neg",
            ),
            (nn.UninitializedParameter(), "'b' of the targets for 'policy' gets its shape in the first forward pass"),
            (torch.nested.nested_tensor([torch.ones(4)]), "'b' of the targets for 'policy' is nested"),
            (without_memory(), r"'b' of the targets for 'policy' has no memory of its own \(it is a Tensor\)"),
            (fake(), r"'b' of the targets for 'policy' has no memory of its own \(it is a FakeTensor\)"),
        ]:
            with pytest.raises(ConfigError, match=text):
                weights.pull_into({"a": a, "b": b})
            assert not a.any()
        weights.close()
        many = {"b": torch.zeros(1).expand(4)} | {f"t{n}": torch.zeros(4) for n in range(100)}  # checked at first sight
        weights = Published("many")
        weights.publish(many)
        for _ in range(2):
            with pytest.raises(ConfigError, match="'b' of the targets for 'many' is expanded"):
                weights.pull_into(many)
        weights.close()


def without_memory() -> torch.Tensor:
    """As parameters that FSDP has given back."""
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4)


def test_a_process_that_joins_another_job_publishes_and_pulls_there() -> None:
    weights, mine = Published("policy"), Published("policy")
    for job in (1, 2):
        with InProcessCluster("trainer", "g0") as cluster:
            with cluster.use("trainer"):
                assert weights.publish({"a": torch.full((3,), float(job))}) == job  # the numbers go on
            with cluster.use("g0"):
                into = {"a": torch.zeros(3)}
                assert mine.pull_into(into) == job
                assert into["a"].eq(job).all()
                new = Published("policy")
                assert new.pull_into(into) == job
                new.close()
    mine.close()


def test_the_memory_of_a_publisher_goes_with_its_job() -> None:
    weights = Published("policy")
    with InProcessCluster("trainer") as cluster, cluster.use("trainer"):
        weights.publish({"a": torch.ones(3)})
        origin = weakref.ref(origin_of(weights))
    with InProcessCluster("trainer") as cluster, cluster.use("trainer"):
        weights.publish({"a": torch.ones(3)})
        gc.collect()
        assert origin() is None


@pytest.mark.parametrize("consumer", ["trainer", "g0"])
def test_a_consumer_of_another_job_gets_the_first_version_of_this_one(consumer: str) -> None:
    mine, into = Published("policy"), {"a": torch.zeros(3)}
    for job, num in ((1, 3), (2, 1)):
        with InProcessCluster("trainer", "g0") as cluster:
            with cluster.use("trainer"):
                weights = Published("policy")  # of a trainer that was started for this job
                for _ in range(num):
                    weights.publish({"a": torch.full((3,), float(job))})
            with cluster.use(consumer):
                assert mine.pull_into(into, mine.version, wait=True) == (3 if job == 1 else 4)
                assert into["a"].eq(job).all()
                mine.close()


def test_a_pull_that_fails_for_want_of_descriptors_can_be_repeated(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_reader(source: HostCopy) -> VersionReader:
        raise OSError(errno.EMFILE, "Too many open files")

    limits_s: list[float] = []

    def no_connection(connection: ShardConnection, wanted: object, earlier: object, limit_s: float) -> None:
        limits_s.append(limit_s)
        raise TransportError("there is no way to it")

    with cluster.use("trainer"):
        Published("policy").publish({"a": torch.ones(3)})
    with cluster.use("g0"):
        mine, into = Published("policy"), {"a": torch.zeros(3)}
        with monkeypatch.context() as patch:
            patch.setattr(HostCopy, "reader", no_reader)
            with pytest.raises(OSError, match="Too many open files"):
                mine.pull_into(into)
        with monkeypatch.context() as patch:
            patch.setattr(ShardConnection, "_connect", no_connection)
            with pytest.raises(DeadlineExceeded, match=r"'g0' did not get 'policy' .* reached: there is no way"):
                mine.pull_into(into, timeout=1.0)  # in which it tries, also on a busy machine
        assert 1.0 == limits_s[0] > limits_s[-1], (
            "the last attempt took as long as the first, beyond the limit of the pull"
        )
        assert mine.pull_into(into) == 1
        mine.close()


def test_a_publisher_that_gets_no_memory_can_try_again(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise RuntimeError("can't allocate memory")

    with cluster.use("trainer"):
        weights = Published("policy")
        with monkeypatch.context() as patch:
            patch.setattr("rpcdist.parallel._published._source._Memory", no_memory)
            with pytest.raises(RuntimeError, match="can't allocate memory"):
                weights.publish({"a": torch.ones(3)})
        assert weights.publish({"a": torch.ones(3)}) == 1
