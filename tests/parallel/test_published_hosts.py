"""Published tensors between hosts, and under faults: a ledger of what every consumer had."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import published_functions as there
import pytest
from full_sets import num_examples
from inside_published import host_copies_of, hosts_of, origin_of
from network_cable import HOST_ADDRESSES, cable_between_hosts, enter_namespace
from torch import Tensor

from rpcdist import rpc
from rpcdist.errors import DeadlineExceeded, TransportError
from rpcdist.parallel import Published
from rpcdist.parallel._published import _source
from rpcdist.testing import LIMIT_S, InProcessCluster, WorkerPool, eventually
from rpcdist.testing.worker import Pending
from rpcdist.testing.worker_pool import join

HOSTS = ("g0", "g1", "g2")


class Job:
    """Workers that share no memory, each a host of its own."""

    def __init__(self, cluster: InProcessCluster) -> None:
        self.cluster = cluster
        self.held = {name: Published("policy") for name in cluster.names}

    def publish(self, name: str, value: float, **options: float) -> int:
        return self.cluster.run(name, lambda: self.held[name].publish(there.filled(value), **options))  # type: ignore[arg-type]

    def pull(self, name: str, newer_than: int = 0) -> tuple[int, list[float]]:
        target = there.filled(-1)
        wait = newer_than > 0
        version = self.cluster.run(name, lambda: self.held[name].pull_into(target, newer_than, wait=wait))
        return version, there.values_in(target)

    def close(self) -> None:
        for name in self.cluster.names:
            self.cluster.run(name, self.held[name].close)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(_source, "CHUNK_BYTES", 100_000)
    monkeypatch.setattr("rpcdist.parallel._published._hosts.CHUNK_BYTES", 100_000)
    with InProcessCluster("boss", "trainer", *HOSTS, elastic=True) as cluster:
        job = Job(cluster)
        yield job
        job.close()


def chunks_sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts the chunks that each worker passes on."""
    counts: dict[str, int] = defaultdict(int)
    original = _source.VersionSource.chunk

    def counted(self: _source.VersionSource, *args: object) -> Tensor:
        counts[_source.worker_of(self.source_name)] += 1
        return original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(_source.VersionSource, "chunk", counted)
    return counts


def test_each_host_gets_the_bytes_once_from_the_one_before(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    assert job.publish("trainer", 1) == 1
    assert [job.pull(name) for name in HOSTS] == [(1, [1.0])] * 3
    counts = chunks_sent(monkeypatch)
    assert job.publish("trainer", 2) == 2
    assert [job.pull(name, 1) for name in HOSTS] == [(2, [2.0])] * 3
    num_chunks = -(-there.layout_bytes() // 100_000)
    assert num_chunks > 20
    assert counts == {"trainer": num_chunks, "g0": num_chunks, "g1": num_chunks}  # g2 passes nothing on


def test_consumers_that_are_freed_and_not_closed_are_forgotten(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    assert job.publish("trainer", 1) == 1
    origin = origin_of(job.held["trainer"])
    for _ in range(_source.MAX_SOURCES_OF_WORKER + 1):
        job.held["g0"] = Published("policy")
        assert job.pull("g0") == (1, [1.0])
    assert len(hosts_of(origin)) == 1
    job.held["g0"] = Published("policy")
    caplog.clear()
    assert job.publish("trainer", 2) == 2
    eventually(lambda: not hosts_of(origin), "it is forgotten")
    assert not caplog.records
    assert job.pull("g0") == (2, [2.0])


def test_the_bound_on_staleness_holds_between_hosts(job: Job) -> None:
    job.publish("trainer", 1)
    for name in HOSTS:
        job.pull(name)
    pulling = [job.cluster.begin(name, job.pull, name, 1) for name in HOSTS]
    assert job.publish("trainer", 2, within=0) == 2
    assert [call.result(LIMIT_S) for call in pulling] == [(2, [2.0])] * 3
    with pytest.raises(DeadlineExceeded, match=r"'g0' \(2\), 'g1' \(2\), 'g2' \(2\)"):
        job.publish("trainer", 3, within=0, timeout=0.1)


def test_a_host_that_dies_in_the_chain_holds_up_nobody_for_long(job: Job) -> None:
    job.publish("trainer", 1)
    for name in HOSTS:
        job.pull(name)
    job.cluster.kill("g1")
    assert job.publish("trainer", 2) == 2
    assert [job.pull(name, 1) for name in ("g0", "g2")] == [(2, [2.0])] * 2
    job.held["g1"] = Published("policy")
    job.cluster.restart("g1")
    assert job.pull("g1") == (2, [2.0])
    assert job.publish("trainer", 3) == 3
    assert [job.pull(name, 2) for name in HOSTS] == [(3, [3.0])] * 3


def test_a_host_that_passes_on_something_else_is_passed_over(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of one byte became all bytes of a chunk; one that was no tensor left the next hosts without a version."""
    original = _source.VersionSource.chunk
    broken: list[Any] = [lambda chunk: chunk[:1], lambda chunk: chunk.float(), lambda chunk: None]

    def changed(self: _source.VersionSource, *args: object) -> Any:
        chunk = original(self, *args)  # type: ignore[arg-type]
        return broken[-1](chunk) if _source.worker_of(self.source_name) == "g0" else chunk

    job.publish("trainer", 1)
    for name in HOSTS:
        job.pull(name)
    monkeypatch.setattr(_source.VersionSource, "chunk", changed)
    for version in (2, 3, 4):
        assert job.publish("trainer", version) == version
        assert [job.pull(name, version - 1) for name in HOSTS] == [(version, [float(version)])] * 3
        broken.pop()


def test_another_publisher_takes_the_hosts_over(job: Job) -> None:
    job.publish("trainer", 1)
    for name in HOSTS:
        job.pull(name)
    job.cluster.kill("trainer")
    assert job.publish("boss", 2) == 2
    assert [job.pull(name, 1) for name in HOSTS] == [(2, [2.0])] * 3


def test_a_pull_that_waits_in_vain_names_the_lost_publisher(job: Job) -> None:
    """It said that no worker had published, and to check the name."""
    job.publish("trainer", 1)
    job.pull("g0")
    target = there.filled(-1)

    def pull(seconds: float) -> object:
        return job.held["g0"].pull_into(target, 1, wait=True, timeout=seconds)

    with pytest.raises(DeadlineExceeded, match=r"no worker published a version of 'policy' that is newer than 1 in"):
        job.cluster.run("g0", pull, 0.05)
    job.cluster.kill("trainer")
    with job.cluster.use("g0") as agent:
        eventually(lambda: "trainer" in agent.directory.losses(), "the others know that it is lost")
    newer = "'g0' did not get a version of 'policy' that is newer than 1 in time from its publisher 'trainer': "
    with pytest.raises(DeadlineExceeded, match=newer) as raised:
        job.cluster.run("g0", pull, 1.0)
    assert "worker 'trainer' was lost (" in str(raised.value) and "no other worker has published" in str(raised.value)


def test_a_publisher_that_is_the_coordinator_is_replaced(job: Job) -> None:
    job.publish("boss", 1)
    job.publish("boss", 2)
    for name in HOSTS:
        job.pull(name)
    job.cluster.kill("boss")
    job.held["boss"] = Published("policy")
    job.cluster.restart("boss")
    job.publish("boss", 3)  # it may be 1 to itself at first, as nobody may have come back to this coordinator yet
    found = [job.pull(name, 2) for name in HOSTS]
    assert all(version > 2 and values == [3.0] for version, values in found)


def test_a_publisher_that_dies_in_the_middle_leaves_the_old_version(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.publish("trainer", 1)
    for name in HOSTS:
        job.pull(name)
    original = _source.VersionSource.chunk

    def dying(self: _source.VersionSource, fetcher: str, version: int, index: int, timeout: float) -> Tensor:
        if index > 10:
            raise TransportError("the publisher is gone")
        return original(self, fetcher, version, index, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(_source.VersionSource, "chunk", dying)
        assert job.publish("trainer", 2) == 2
        copies = [host_copies_of(job.held[name])[0] for name in HOSTS]
        eventually(lambda: all(copy is not None and copy._given_up == 2 for copy in copies), "all hosts have given up")
        assert [job.pull(name) for name in HOSTS] == [(1, [1.0])] * 3
    assert job.publish("trainer", 3) == 3
    assert [job.pull(name, 1) for name in HOSTS] == [(3, [3.0])] * 3


# ---------------------------------------------------------------- two hosts


def join_on_host(namespace: str, host: str, name: str, rank: int, url: str) -> None:
    enter_namespace(namespace)
    join(name, rank, None, url, host=host)


@pytest.mark.multiproc
def test_consumers_of_another_host_share_one_copy(worker_pool: WorkerPool) -> None:
    with cable_between_hosts("published") as (_, namespaces):
        url = f"tcp://{HOST_ADDRESSES[0]}:29571"
        names = ("trainer", "here", "there0", "there1")
        workers = {name: worker_pool.start(name) for name in names}
        joining = [
            workers[name].begin(join_on_host, namespaces[rank // 2], HOST_ADDRESSES[rank // 2], name, rank, url)
            for rank, name in enumerate(names)
        ]
        for pending in joining:
            pending.result()
        assert workers["trainer"].run(there.publish, 1) == 1
        assert [workers[name].run(there.pull) for name in names] == [(1, [1.0])] * 4
        assert [workers[name].run(there.has_copy) for name in names] == [False, False, True, False]
        assert workers["trainer"].run(there.publish, 2) == 2
        assert [workers[name].run(there.pull, 1, wait=True) for name in names] == [(2, [2.0])] * 4
        workers["there0"].kill()  # it had the copy of its host
        assert workers["trainer"].run(there.publish, 3) == 3
        assert workers["there1"].run(there.pull, 2, wait=True) == (3, [3.0])
        assert workers["there1"].run(there.has_copy)
        for name in ("trainer", "here", "there1"):
            workers[name].run(there.close)


# ---------------------------------------------------------------- the ledger


def judge(ledger: Path) -> int:
    """Compares what consumers had with what was published; how many versions they had."""
    lines = [line.split() for line in ledger.read_text().splitlines()]
    begun = {words[1] for words in lines if words[0] == "begins"}
    value_of: dict[int, str] = {}
    last: dict[str, int] = {}
    num = 0
    for words in lines:
        if words[0] != "has":
            continue
        process, version, values = words[1], int(words[2]), words[3:]
        assert len(values) == 1, f"a mixture of {values} in version {version}"
        assert values[0] in begun
        assert value_of.setdefault(version, values[0]) == values[0], f"version {version} has two values"
        assert version >= last.get(process, 0), f"{process} went back from {last[process]} to {version}"
        last[process] = version
        num += 1
    return num


@pytest.mark.multiproc
@pytest.mark.parametrize("seed", range(num_examples(1, 20)))
def test_no_version_is_ever_mixed_or_older_whoever_dies(worker_pool: WorkerPool, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    ledger = tmp_path / "ledger"
    ledger.touch()
    ranks = {"boss": 0, "trainer": 1, "g0": 2, "g1": 3, "g2": 4}
    world = worker_pool.world(*ranks, world_size=None)

    running: dict[str, Pending[None]] = {}

    def begin(name: str) -> None:
        function = there.publish_for_ever if name == "trainer" else there.consume_for_ever
        running[name] = world[name].begin(function, str(ledger))

    def num_had() -> int:
        return ledger.read_text().count("has")

    def wait_for_more(what: str) -> None:
        before = num_had()

        def are_there() -> bool:
            for name, pending in running.items():
                if not world[name].stopped and pending.done():
                    pending.result()  # an error: none of them returns
            return num_had() > before + 20

        eventually(are_there, what)

    for name in list(ranks)[1:]:
        begin(name)
    for _ in range(num_examples(4, 10)):
        wait_for_more("consumers have further versions")
        name = chance.choice(list(ranks)[1:])
        worker = world[name]
        if name != "trainer" and chance.random() < 0.4:
            worker.stop()
            wait_for_more("others go on beside a stopped consumer")
            worker.resume()
            continue
        time.sleep(chance.random() * 0.02)  # in the middle of something
        worker.kill()
        world.join(name, ranks[name])
        begin(name)
    wait_for_more("consumers have further versions")
    for name in list(ranks)[1:]:
        world[name].kill()
    assert judge(ledger) > 100
    assert world["boss"].run(rpc.get_worker_info).name == "boss"
