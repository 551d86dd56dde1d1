"""Published tensors in parts: shards of several publishers, slices that consumers take, and what did not change."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from full_sets import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from inside_published import extracts_of, origin_of
from test_published_hosts import chunks_sent
from torch import Tensor, nn

from rpcdist.errors import ConfigError, DeadlineExceeded, TransportError
from rpcdist.parallel import Published, TensorPart
from rpcdist.parallel._published import _hosts, _source
from rpcdist.parallel._published._layout import Selection, VersionLayout, copies_for
from rpcdist.parallel._published._parts import pieces_of
from rpcdist.testing import LIMIT_S, InProcessCluster, RpcWorld, WorkerPool, eventually

WHOLE = (8, 12)


def values_of(version: int) -> Tensor:
    return torch.arange(96.0).reshape(WHOLE) + 1000 * version


def rows(version: int, shard: int) -> TensorPart:
    """Half of the rows."""
    return TensorPart(values_of(version)[4 * shard : 4 * shard + 4], (4 * shard, 0), WHOLE)


def columns(number: int) -> TensorPart:
    """A quarter of the columns, to pull into."""
    return TensorPart(torch.full((8, 3), -1.0), (0, 3 * number), WHOLE)


# ---------------------------------------------------------------- which bytes


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes in a tensor of shape (4, 5)."""
    offsets = tuple(draw(st.integers(0, n - 1)) for n in (4, 5))
    return offsets, tuple(draw(st.integers(0, n - o)) for n, o in zip((4, 5), offsets, strict=True))


@settings(max_examples=num_examples(200, 5000), deadline=None)
@given(st.lists(boxes(), min_size=1, max_size=5), boxes())
def test_each_index_is_copied_once_or_named_as_missing(
    published: list[tuple[tuple[int, ...], tuple[int, ...]]], wanted: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    whole = torch.arange(20.0).reshape(4, 5)

    def part_of(tensor: Tensor, box: tuple[tuple[int, ...], tuple[int, ...]]) -> Tensor:
        return tensor[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))]

    shards = [pieces_of({"w": TensorPart(part_of(whole, box), box[0], (4, 5))}, "values", []) for box in published]
    target = torch.full(wanted[1], -1.0)
    into = pieces_of({"w": TensorPart(target, wanted[0], (4, 5))}, "targets", [])
    covered = torch.zeros(4, 5)
    for box in published:
        part_of(covered, box).fill_(1)
    layouts = [VersionLayout.from_plain(VersionLayout.of(shard).plain()) for shard in shards]
    try:
        copies = copies_for(layouts, into, False, "policy", ["trainer"] * len(shards), "g0")
    except ConfigError as exc:
        assert "no worker has" in str(exc)
        assert not part_of(covered, wanted).all()
        return
    assert part_of(covered, wanted).all()
    num_copied = 0
    for shard, plan in zip(shards, copies, strict=True):
        for (index, slices), to in zip(plan.sources, plan.targets, strict=True):
            source = shard.tensors[index] if slices is None else shard.tensors[index][slices]
            to.copy_(source)
            num_copied += to.numel()
    assert num_copied == target.numel()
    assert torch.equal(target, part_of(whole, wanted))


@pytest.mark.parametrize(
    "plain",
    [
        None,
        ([], [], [], []),
        (["a"], ["float32"], [[-1]], []),
        (["a"], ["float32"], [[1 << 50]], []),
        (["a"], ["float32"], [[True]], []),
        (["a"], ["nn"], [[1]], []),
        ([3], ["float32"], [[1]], []),
        (["a", "b"], ["float32"], [[1]], []),
        (["a"], ["float32"], [[4]], [[[0], [3], [6]]]),
        (["a"], ["float32"], [[4]], [[[1], [0], [4]]]),
        (["a"], ["float32"], [[4]], [[[-1], [0], [4]]]),
        (["a"], ["float32"], [[4]], [[[0], [0, 0], [4, 4]]]),
    ],
    ids=lambda _: "",
)
def test_a_layout_of_a_peer_that_makes_no_sense_is_refused(plain: object) -> None:
    with pytest.raises(TransportError, match="an invalid layout"):
        VersionLayout.from_plain(plain)  # type: ignore[arg-type]


# ---------------------------------------------------------------- shards of several workers


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcessCluster]:
    """Workers that share no memory, each a host of its own."""
    monkeypatch.setattr(_source, "CHUNK_BYTES", 128)
    monkeypatch.setattr("rpcdist.parallel._published._hosts.CHUNK_BYTES", 128)
    with InProcessCluster("boss", "t0", "t1", "g0", elastic=True) as cluster:
        yield cluster


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each chunk that a worker gives to another one."""
    found: list[int] = []
    original = _source.VersionSource.chunk

    def counted(self: _source.VersionSource, *args: object) -> Tensor:
        chunk = original(self, *args)  # type: ignore[arg-type]
        found.append(chunk.nbytes)
        return chunk

    monkeypatch.setattr(_source.VersionSource, "chunk", counted)
    return found


class Job:
    """The trainers `t0` and `t1` publish a shard each, and the others pull."""

    def __init__(self, cluster: InProcessCluster) -> None:
        self.cluster = cluster
        self.held = {name: Published("policy") for name in cluster.names}

    def publish(self, shard: int, value: int, **options: int) -> int:
        name = f"t{shard}"
        values = {"w": rows(value, shard), f"own{shard}": torch.full((2,), float(value))}
        return self.cluster.run(name, lambda: self.held[name].publish(values, shard=(shard, 2), **options))  # type: ignore[arg-type]

    def pull(self, target: dict[str, object], newer_than: int = 0, name: str = "g0", **options: float) -> int:
        return self.cluster.run(name, lambda: self.held[name].pull_into(target, newer_than, **options))  # type: ignore[arg-type]

    def close(self) -> None:
        for name in self.cluster.names:
            self.cluster.run(name, self.held[name].close)


@pytest.fixture
def job(cluster: InProcessCluster) -> Iterator[Job]:
    job = Job(cluster)
    yield job
    job.close()


def test_consumers_take_columns_of_rows_that_two_workers_publish(job: Job) -> None:
    assert job.publish(0, 1) == job.publish(1, 1) == 1
    for number in range(4):
        part, own = columns(number), torch.zeros(2)
        assert job.pull({"w": part, "own1": own}, name=("boss", "g0")[number % 2]) == 1
        assert torch.equal(part.tensor, values_of(1)[:, 3 * number : 3 * number + 3])
        assert own.eq(1).all()
    whole = torch.zeros(WHOLE)
    assert job.pull({"w": whole}) == 1
    assert torch.equal(whole, values_of(1))
    ranges = [TensorPart(torch.zeros(2, 5), (row, 4), WHOLE) for row in (6, 3, 0)]
    assert job.pull({"w": ranges}) == 1
    for part in ranges:
        assert torch.equal(part.tensor, values_of(1)[part.offsets[0] : part.offsets[0] + 2, 4:9])


def test_a_version_is_there_when_all_shards_have_it(job: Job) -> None:
    first, own = columns(1), torch.zeros(2)
    waiting = job.cluster.begin("g0", job.pull, {"w": first, "own1": own}, timeout=LIMIT_S)
    job.publish(0, 1)
    job.publish(1, 1)
    assert waiting.result(LIMIT_S) == 1
    job.publish(0, 2)
    part = columns(1)
    assert job.pull({"w": part}) == 1  # shard 1 has no 2
    assert torch.equal(part.tensor, values_of(1)[:, 3:6])
    with pytest.raises(DeadlineExceeded, match=r"shards have these versions: 0 \(2\), 1 \(1\); a version is"):
        job.pull({"w": part}, 1, wait=True, timeout=0.2)
    assert job.pull({"w": part}, 1) == 1
    waiting = job.cluster.begin("g0", job.pull, {"w": part}, 1, wait=True)
    job.publish(1, 2)
    assert waiting.result(LIMIT_S) == 2
    assert torch.equal(part.tensor, values_of(2)[:, 3:6])
    assert torch.equal(first.tensor, values_of(1)[:, 3:6])
    only_own = torch.zeros(2)
    job.publish(1, 3)
    assert job.pull({"own1": only_own}, 1) == 2  # a version of the name is one that all have
    assert only_own.eq(2).all()


def test_a_view_has_the_parts_of_all_shards(job: Job) -> None:
    for version in (1, 2):
        job.publish(0, version)
        job.publish(1, version)
    held = job.held["g0"]
    found = job.cluster.run("g0", held.view)
    assert held.version == 2
    assert sorted(found) == ["own0", "own1", "w"]
    assert isinstance(found["own0"], Tensor) and found["own0"].eq(2).all()
    assert [(tuple(part.tensor.shape), part.offsets, part.whole) for part in found["w"]] == [
        ((4, 12), (0, 0), WHOLE),
        ((4, 12), (4, 0), WHOLE),
    ]
    assert torch.equal(torch.cat([part.tensor for part in found["w"]]), values_of(2))
    job.publish(0, 3)
    job.publish(1, 3)
    part = columns(0)
    other = Published("policy")  # of another consumer of the same worker
    assert job.cluster.run("g0", lambda: other.pull_into({"w": part}, 2, wait=True)) == 3
    job.cluster.run("g0", other.close)
    assert torch.equal(torch.cat([part.tensor for part in found["w"]]), values_of(2))  # it is kept
    assert job.pull({"w": part}, 2, wait=True) == 3
    with job.cluster.use("t0"):
        alone = Published("alone")
        alone.publish({"w": rows(1, 1)})
        assert torch.equal(alone.view()["w"].tensor, values_of(1)[4:])
        alone.close()


def test_the_owner_of_a_shard_is_replaced(job: Job) -> None:
    for version in (1, 2):
        for shard in (0, 1):
            job.publish(shard, version)
    part = columns(2)
    assert job.pull({"w": part}) == 2
    job.cluster.kill("t1")
    job.held["t1"] = Published("policy")
    job.cluster.restart("t1")
    assert job.publish(0, 3) == 3
    assert job.publish(1, 3, version=3) == 3
    assert job.pull({"w": part}, 2, wait=True) == 3
    assert torch.equal(part.tensor, values_of(3)[:, 6:9])


def test_bad_parts_are_errors_that_name_them(job: Job) -> None:
    job.publish(0, 1)
    with pytest.raises(ConfigError, match="other parts of its tensors in this version"):
        moved: dict[str, Tensor | TensorPart] = {
            "w": TensorPart(values_of(1)[:4], (1, 0), WHOLE),
            "own0": torch.zeros(2),
        }
        job.cluster.run("t0", lambda: job.held["t0"].publish(moved))
    with pytest.raises(ConfigError, match=r"'t0' already publishes under the name 'policy'"):
        job.cluster.run("t1", lambda: job.held["t1"].publish({"w": rows(1, 1)}, shard=(0, 2)))
    job.publish(1, 1)
    for target, text in [
        (TensorPart(torch.zeros(2, 2), (7, 0), WHOLE), r"part of shape \(2, 2\) at \(7, 0\), which is not inside"),
        (TensorPart(torch.zeros(2, 2), (-1, 0), WHOLE), r"at \(-1, 0\), which is not inside"),
        (TensorPart(torch.zeros(2, 2), (0,), WHOLE), "which is not inside"),
        (TensorPart(3, (0,), (1,)), "a part with a int"),  # type: ignore[arg-type]
        (TensorPart(torch.zeros(2, 2), (0, 0), (8, 11)), r"has shape \(8, 12\) at its publisher 't0', but \(8, 11\)"),
    ]:
        with pytest.raises(ConfigError, match=text):
            job.pull({"w": target})
    with pytest.raises(ConfigError, match="shard must be the number of this publisher"):
        job.cluster.run("g0", lambda: job.held["g0"].publish({"w": torch.zeros(1)}, shard=(2, 2)))
    with pytest.raises(ConfigError, match="'t0' and 't1' publishes 'own0', 'own1'"):
        job.cluster.run("g0", lambda: job.held["g0"].pull_into(nn.ParameterDict({"w": torch.zeros(WHOLE)})))


def test_indices_that_nobody_publishes_are_named(cluster: InProcessCluster) -> None:
    cluster.run("t0", lambda: Published("half").publish({"w": rows(1, 1)}))
    with cluster.use("g0"):
        mine = Published("half")
        with pytest.raises(ConfigError, match=r"no worker has \[0:4, 0:3\] of tensor 'w' of 'half', which 'g0' want"):
            mine.pull_into({"w": columns(0)})
        mine.close()


def test_another_host_gets_the_parts_alone_that_it_needs(cluster: InProcessCluster, sent: list[int]) -> None:
    """Columns of rows that two workers publish, beside tensors that nobody wants."""
    job = Job(cluster)
    mine = columns(1)
    for shard in (0, 1):
        job.publish(shard, 1)
    assert job.pull({"w": mine}) == 1
    for version in (2, 3):
        sent.clear()
        for shard in (0, 1):
            job.publish(shard, version)
        assert job.pull({"w": mine}, version - 1, wait=True) == version
        assert torch.equal(mine.tensor, values_of(version)[:, 3:6])
        assert sum(sent) == mine.tensor.nbytes
    sent.clear()
    assert job.pull({"own1": (own := torch.zeros(2))}) == 3  # of one shard, and another selection: all of it comes
    assert own.eq(3).all()
    assert sum(sent) > mine.tensor.nbytes
    job.close()


def test_several_hosts_that_want_the_same_parts_form_a_chain(
    cluster: InProcessCluster, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(cluster)
    targets = {name: columns(2) for name in ("boss", "g0", "t1")}
    values = {"w": rows(1, 0), "unwanted": torch.zeros(5000)}
    for version in (1, 2):
        sent.clear()
        cluster.run("t0", lambda: job.held["t0"].publish(values))
        for name, target in targets.items():
            top = TensorPart(target.tensor[:4], target.offsets, WHOLE)
            assert job.pull({"w": top}, version - 1, name=name, wait=version > 1) == version
            assert torch.equal(top.tensor, values_of(1)[:4, 6:9])
        assert sum(sent) == 3 * 4 * 3 * 4
    origin = origin_of(job.held["t0"])
    assert len(extracts_of(origin)) == 1
    job.close()
    monkeypatch.setattr(_hosts, "IDLE_LIMIT_S", 0.05)

    def is_dropped() -> bool:
        cluster.run("t0", lambda: job.held["t0"].publish(values))
        return not extracts_of(origin)

    eventually(is_dropped, "nobody wants the parts any more")


def test_a_dtype_of_consumers_is_made_once_before_it_travels(cluster: InProcessCluster, sent: list[int]) -> None:
    model = {"w": torch.linspace(-3, 3, 1000), "n": torch.arange(3)}
    target = {"w": torch.zeros(1000), "n": torch.zeros(3, dtype=torch.int64)}
    theirs = Published("model")
    cluster.run("t0", lambda: theirs.publish(model))
    mine = Published("model", dtype=torch.bfloat16)
    with cluster.use("g0"):
        assert mine.pull_into(target) == 1
        assert torch.equal(target["w"], model["w"].bfloat16().float())
        assert torch.equal(target["n"], model["n"])
        assert sum(sent) < 2.1 * 1000
        view = mine.view()
        assert view["w"].dtype is torch.bfloat16 and view["n"].dtype is torch.int64
        assert torch.equal(view["w"], model["w"].bfloat16())
    with cluster.use("t0"):  # the publisher's own host
        beside = Published("model", dtype=torch.bfloat16)
        assert beside.view()["w"].dtype is torch.bfloat16
        half = Published("model", dtype=torch.float16)
        assert half.view()["w"].dtype is torch.float16
        same = Published("model", dtype=torch.float32)
        assert same.view()["w"].dtype is torch.float32
        assert [each.dtype for each in extracts_of(origin_of(theirs))] == ["bfloat16", "float16"]
        half.close()
        same.close()
    model["w"].neg_()
    cluster.run("t0", lambda: theirs.publish(model, skip_unchanged="value"))
    with cluster.use("t0"):
        assert eventually(lambda: beside.view()["w"].eq(model["w"].bfloat16()).all(), "the new version is converted")
        beside.close()
    pulling = cluster.begin("g0", lambda: mine.pull_into(target, 2, wait=True))
    model["n"].add_(1)
    assert cluster.run("t0", lambda: theirs.publish(model, skip_unchanged="value", within=0, timeout=LIMIT_S)) == 3
    assert pulling.result(LIMIT_S) == 3
    assert torch.equal(target["w"], model["w"].bfloat16().float())
    assert torch.equal(target["n"], model["n"])
    with pytest.raises(DeadlineExceeded, match=r"'g0' \(3\)"):
        cluster.run("t0", lambda: theirs.publish(model, within=0, timeout=0.2))
    cluster.run("g0", mine.close)


def test_a_consumer_with_a_dtype_goes_on_with_another_publisher(cluster: InProcessCluster) -> None:
    mine = Published("model", dtype=torch.float16)
    target = {"w": torch.zeros(100)}
    cluster.run("t0", lambda: Published("model").publish({"w": torch.ones(100)}))
    assert cluster.run("g0", lambda: mine.pull_into(target)) == 1
    cluster.kill("t0")
    assert cluster.run("t1", lambda: Published("model").publish({"w": torch.full((100,), 2.0)})) == 2
    assert cluster.run("g0", lambda: mine.pull_into(target, 1, wait=True)) == 2
    assert target["w"].eq(2).all()
    cluster.run("g0", mine.close)


def test_a_dtype_that_cannot_be_had_is_an_error(cluster: InProcessCluster) -> None:
    with pytest.raises(ConfigError, match=r"dtype=torch\.int8 of 'model': pass a floating-point dtype"):
        Published("model", dtype=torch.int8)
    cluster.run("t0", lambda: Published("model").publish({"w": torch.ones(3)}))
    packed = Published("model", dtype=torch.float4_e2m1fn_x2)
    with cluster.use("g0"):
        with pytest.raises(
            ConfigError, match=r"'g0' wants 'model' of 't0' in another dtype: tensor 'w' is torch.float32, which torch"
        ):
            packed.pull_into({"w": torch.zeros(3)})
        packed.close()


@pytest.mark.parametrize(
    "plain",
    [
        None,
        ("int8", []),
        ("nothing", []),
        ("", [[[0], [0]]]),
        ("", [[[9], [0, 0], [1, 1]]]),
        ("", [[[0], [0, 0], [5, 12]]]),
        ("", [[[0], [-1, 0], [1, 1]]]),
        ("", [[[0], [0, 0], [0, 1]]]),
        ("", [[[0], [0], [1]]]),
        ("", [[["0"], [0, 0], [1, 1]]]),
    ],
    ids=lambda _: "",
)
def test_a_selection_of_a_peer_that_makes_no_sense_is_refused(plain: object) -> None:
    layout = VersionLayout.of(pieces_of({"w": rows(1, 0)}, "values", []))
    with pytest.raises(TransportError, match="an invalid selection"):
        Selection.from_plain(plain, layout)  # type: ignore[arg-type]


# ---------------------------------------------------------------- what did not change


@pytest.mark.parametrize("how", ["counter", "value"])
def test_what_did_not_change_is_not_sent(cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    model = {"base": torch.arange(1000.0), "adapter": torch.zeros(100)}
    trainer, mine = Published("policy"), Published("policy")
    into = {name: torch.zeros_like(tensor) for name, tensor in model.items()}

    def publish() -> int:
        return cluster.run("t0", lambda: trainer.publish(model, skip_unchanged=how))  # type: ignore[arg-type]

    def pull(have: int) -> int:
        return cluster.run("g0", lambda: mine.pull_into(into, have, wait=have > 0))

    publish()
    assert pull(0) == 1
    model["adapter"] += 1
    publish()
    assert pull(1) == 2  # into memory that was empty there
    counts = chunks_sent(monkeypatch)
    num_chunks = 0
    for version in range(3, 9):
        model["adapter"] += 1
        assert publish() == version
        assert pull(version - 1) == version
        assert {name: tensor.tolist() for name, tensor in into.items()} == {n: t.tolist() for n, t in model.items()}
        num_chunks += 5  # the last 400 bytes lie in this many pieces of 128
    assert counts["t0"] <= num_chunks
    model["base"][500] = -1.0
    publish()
    assert pull(8) == 9
    assert into["base"][500] == -1
    model["base"] = torch.full((1000,), 7.0)  # other memory
    publish()
    assert pull(9) == 10
    assert into["base"].eq(7).all() and into["adapter"].eq(model["adapter"]).all()
    cluster.run("g0", mine.close)


def test_a_counter_does_not_take_other_memory_for_the_same(cluster: InProcessCluster) -> None:
    """A new tensor often gets the memory, and the count of writes, of one that was freed."""
    with cluster.use("t0"):
        trainer = Published("policy")
        into = torch.zeros(1000)
        for value in range(1, 30):
            trainer.publish({"a": torch.full((1000,), float(value))}, skip_unchanged="counter")
            trainer.pull_into({"a": into})
            assert into.eq(value).all()
        with pytest.raises(ConfigError, match="skip_unchanged must be 'counter' or 'value'"):
            trainer.publish({"a": into}, skip_unchanged="hash")  # type: ignore[arg-type]
        trainer.close()


# ---------------------------------------------------------------- DTensors, in processes of one host

held: dict[str, Published] = {}


def publish_dtensor(rank: int, size: int, store: str, placements: str) -> int:
    """A rank of two trainers, which shard by rows, as FSDP2 does."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        mesh = init_device_mesh("cpu", (size,))
        placement = Shard(0) if placements == "rows" else Replicate()
        weight = distribute_tensor(torch.arange(70.0).reshape(7, 10), mesh, [placement])
        held["policy"] = Published("policy")
        version = held["policy"].publish({"w": weight, "b": torch.ones(3)}, shard=(rank, size))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return version


def pull_dtensor(rank: int, size: int, store: str) -> list[list[float]]:
    """A rank of two generators, which shard by columns, as tensor parallelism does: its columns."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        mesh = init_device_mesh("cpu", (size,))
        weight = distribute_tensor(torch.zeros(7, 10), mesh, [Shard(1)])
        mine = Published("policy")
        mine.pull_into({"w": weight})
        mine.close()
        columns: list[list[float]] = weight.to_local().tolist()
    finally:
        dist.destroy_process_group()
    return columns


@pytest.mark.multiproc
@pytest.mark.parametrize("placements", ["rows", "replicas"])
def test_dtensors_are_published_and_pulled_with_other_placements(
    worker_pool: WorkerPool, tmp_path: Path, placements: str
) -> None:
    world: RpcWorld = worker_pool.world("t0", "t1", "g0", "g1", world_size=None)
    publishing = [
        world[f"t{rank}"].begin(publish_dtensor, rank, 2, str(tmp_path / "trainers"), placements) for rank in (0, 1)
    ]
    assert [pending.result() for pending in publishing] == [1, 1]
    pulling = [world[f"g{rank}"].begin(pull_dtensor, rank, 2, str(tmp_path / "generators")) for rank in (0, 1)]
    left, right = (pending.result() for pending in pulling)
    assert [a + b for a, b in zip(left, right, strict=True)] == torch.arange(70.0).reshape(7, 10).tolist()


def test_a_reader_can_connect_while_an_extract_is_made(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open the listener of a source takes the loop that lets readers in."""
    theirs = Published("model")
    cluster.run("t0", lambda: theirs.publish({"w": torch.ones(1000)}))
    origin = origin_of(theirs)
    was_free: list[bool] = []
    original = _source.VersionSource.__init__

    def checked(self: _source.VersionSource, *arguments: Any) -> None:
        with ThreadPoolExecutor(1) as other:
            was_free.append(other.submit(_is_free, origin._changed).result(LIMIT_S))
        original(self, *arguments)

    monkeypatch.setattr(_source.VersionSource, "__init__", checked)
    with cluster.use("g0"):
        half = Published("model", dtype=torch.bfloat16)
        assert half.pull_into({"w": (target := torch.zeros(1000))}) == 1
        half.close()
    assert target.eq(1).all() and was_free and all(was_free)
    cluster.run("t0", theirs.close)


def _is_free(lock: threading.Condition) -> bool:
    if lock.acquire(timeout=1):
        lock.release()
        return True
    return False


def test_a_pull_of_more_parts_waits_while_the_publisher_is_away(cluster: InProcessCluster) -> None:
    theirs = Published("model")
    cluster.run("t0", lambda: theirs.publish({"a": torch.ones(10), "b": torch.ones(1000)}))
    with cluster.use("g0"):
        mine = Published("model", dtype=torch.bfloat16)
        assert mine.pull_into({"a": torch.zeros(10)}) == 1
        cluster.kill("t0")
        with pytest.raises(DeadlineExceeded, match="no other worker has published"):
            mine.pull_into({"a": torch.zeros(10), "b": torch.zeros(1000)}, timeout=0.5)
        mine.close()
