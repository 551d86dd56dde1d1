"""Parameter servers and sharded embeddings: numbers against one process, trainers that die, and what errors say."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from docs_programs import run_page
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rpcdist import autograd, rpc
from rpcdist.errors import ConfigError, DeadlineExceeded, WorkerLost
from rpcdist.optim import DistributedOptimizer
from rpcdist.parallel import ParameterServer, ShardedEmbedding
from rpcdist.parallel.parameter_server import _shard, _sharded_parameters
from rpcdist.parallel.parameter_server._shard import ParameterShard, ShardConfig
from rpcdist.parallel.parameter_server._sharded_parameters import ShardedParameters
from rpcdist.testing import InProcessCluster, eventually

LIMIT_S = 30.0
SERVERS = ("server0", "server1", "server2")
TRAINERS = ("trainer0", "trainer1")
NUM_STEPS = 6


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(*SERVERS, *TRAINERS) as cluster:
        yield cluster


def network() -> nn.Module:
    """Always the same; trainers are threads here, so the seed of the process is not used."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


def batch(trainer: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * trainer + step)
    return torch.randn(4, 5, generator=generator), torch.randint(3, (4,), generator=generator)


def train(server: ParameterServer, trainer: int, num_steps: int = NUM_STEPS) -> dict[str, Tensor]:
    model = network()
    server.load_into(model)
    for step in range(num_steps):
        inputs, labels = batch(trainer, step)
        cross_entropy(model(inputs), labels).backward()
        server.step(model)
    server.leave()
    return {name: value.detach() for name, value in model.named_parameters()}


def train_alone(
    optimizer_class: Callable[..., torch.optim.Optimizer], num_trainers: int, **defaults: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The same in one process: the mean of the trainers' gradients, added in their order."""
    model = network()
    optimizer = optimizer_class(model.parameters(), **defaults)
    for step in range(NUM_STEPS):
        for trainer in range(num_trainers):
            inputs, labels = batch(trainer, step)
            cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= num_trainers
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}, optimizer.state_dict()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.01}),
]


@pytest.mark.parametrize(("optimizer_class", "defaults"), OPTIMIZERS, ids=["sgd", "adam", "adagrad"])
@pytest.mark.parametrize("num_servers", [1, 3])
def test_synchronous_training_is_that_of_one_process_to_the_bit(
    cluster: InProcessCluster, optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any], num_servers: int
) -> None:
    with cluster.use(SERVERS[0]):
        server = ParameterServer(
            network(), SERVERS[:num_servers], optimizer_class, mode="sync", trainers=TRAINERS, **defaults
        )
        calls = [rpc.rpc_async(name, train, (server, number)) for number, name in enumerate(TRAINERS)]
        expected, state = train_alone(optimizer_class, len(TRAINERS), **defaults)
        for found in rpc.wait_all(calls):
            assert_equal(found, expected)
        whole = server.state_dict()
        assert_equal(whole["parameters"], expected)
        torch.testing.assert_close(whole["optimizer"], state, rtol=0, atol=0)


@pytest.mark.parametrize("staleness", [None, 0, 2])
def test_an_asynchronous_trainer_alone_is_one_process(cluster: InProcessCluster, staleness: int | None) -> None:
    with cluster.use("trainer0"):
        server = ParameterServer(
            network(), SERVERS, torch.optim.Adam, lr=0.01, staleness=staleness, trainers=["trainer0"]
        )
        assert_equal(train(server, 0), train_alone(torch.optim.Adam, 1, lr=0.01)[0])


def test_a_state_goes_on_with_another_number_of_servers(cluster: InProcessCluster) -> None:
    with cluster.use("trainer0"):
        first = ParameterServer(network(), SERVERS, torch.optim.Adam, lr=0.01)
        train(first, 0, NUM_STEPS)
        second = ParameterServer(nn.Sequential(*network().children()), SERVERS[:2], torch.optim.Adam, lr=0.5)
        second.load_state_dict(first.state_dict())
        alone = torch.optim.Adam((model := network()).parameters(), lr=0.5)
        model.load_state_dict(first.state_dict()["parameters"])
        alone.load_state_dict(first.state_dict()["optimizer"])
        gradients = {name: torch.ones_like(value) for name, value in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        alone.step()
        expected = {name: value.detach() for name, value in model.named_parameters()}
        assert_equal(first.push(gradients), expected)
        assert_equal(second.push(gradients), expected)
        second.set_options(lr=0.0)
        assert_equal(second.push(gradients), expected)
        with pytest.raises(ConfigError, match="belongs to other parameters"):
            second.load_state_dict({**first.state_dict(), "parameters": {"bias": torch.ones(1)}})


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_dead_trainer_holds_nobody_and_its_replacement_takes_part(cluster: InProcessCluster, mode: Any) -> None:
    """Trainer 1 dies before its first step: trainer 0 waits for it until its death is known, and goes on."""
    with cluster.use(SERVERS[0]):
        server = ParameterServer(
            network(), SERVERS, torch.optim.SGD, lr=0.1, mode=mode, staleness=None if mode == "sync" else 0,
            trainers=TRAINERS,
        )  # fmt: skip
        waiting = rpc.rpc_async("trainer0", train, (server, 0))
        eventually(lambda: "trainer1" in server._slowest(), "trainer 0 waits")
        cluster.kill("trainer1")
        alone = waiting.wait(LIMIT_S)
        if mode == "sync":
            assert_equal(alone, train_alone(torch.optim.SGD, 1, lr=0.1)[0])
        cluster.restart("trainer1")
        calls = [rpc.rpc_async(name, train, (server, number)) for number, name in enumerate(TRAINERS)]
        for found in rpc.wait_all(calls, LIMIT_S):
            assert not torch.equal(found["2.bias"], alone["2.bias"])


def test_a_trainer_that_leaves_holds_nobody(cluster: InProcessCluster) -> None:
    with cluster.use("trainer0"):
        server = ParameterServer(network(), SERVERS, torch.optim.SGD, lr=0.1, mode="sync", trainers=TRAINERS)
        rpc.rpc_sync("trainer1", leave, (server,))
        assert_equal(train(server, 0), train_alone(torch.optim.SGD, 1, lr=0.1)[0])


def leave(server: ParameterServer) -> None:
    server.leave()


def test_who_was_waited_for_is_in_the_error(cluster: InProcessCluster) -> None:
    with cluster.use("trainer0"):
        server = ParameterServer(network(), SERVERS, torch.optim.SGD, lr=0.1, mode="sync", trainers=TRAINERS)
        for server._timeout in (0.1, 1.0, 10.0):  # on a busy machine, the first may be over before anything arrives
            with pytest.raises(DeadlineExceeded) as caught:
                server.push({})
            if "trainer1" in str(caught.value):
                break
        assert "'trainer0' waited for other trainers until the timeout: 'trainer1' has taken 0 steps. A trainer" in str(
            caught.value
        )


def test_a_dead_server_is_an_error_that_names_it(cluster: InProcessCluster) -> None:
    with cluster.use("trainer0"):
        server = ParameterServer(network(), SERVERS[1:], torch.optim.SGD, lr=0.1)
        train(server, 0, 1)
        cluster.kill("server1")
        with pytest.raises(WorkerLost, match="server1"):
            train(server, 0, 1)


class Overflowing(torch.optim.SGD):
    """Fails with the first row that is not zero."""

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["params"][0].any():
            raise RuntimeError("the rows overflow")
        return super().step(closure)


def test_what_the_optimizer_raises_reaches_all_trainers_of_the_round(cluster: InProcessCluster) -> None:
    with cluster.use("trainer0"):
        table = ShardedEmbedding(6, 2, SERVERS, Overflowing, lr=0.1, mode="sync", trainers=TRAINERS)
        calls = [rpc.rpc_async(name, look_up, (table, [0, 1, 2])) for name in TRAINERS]
        for call in calls:
            with pytest.raises(RuntimeError, match="the rows overflow"):
                call.wait(LIMIT_S)


class Failing(torch.optim.SGD):
    """Fails in one step."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        Failing.num_steps += 1
        if Failing.num_steps == 2:
            raise RuntimeError("this step fails")
        return super().step(closure)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_step_after_one_that_failed_counts(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    monkeypatch.setattr(Failing, "num_steps", 0)
    with cluster.use("trainer0"):
        server = ParameterServer(
            {"a": torch.zeros(2)}, SERVERS[:1], Failing, lr=1.0, mode=mode, trainers=["trainer0"], staleness=None
        )
        ones = {"a": torch.ones(2)}
        assert server.push(ones)["a"].tolist() == [-1.0, -1.0]
        with pytest.raises(RuntimeError, match="this step fails"):
            server.push(ones)
        assert server.push(ones)["a"].tolist() == [-2.0, -2.0]


def push_of_type(server: ParameterServer, dtype: torch.dtype) -> list[float]:
    return server.push({"a": torch.ones(2, dtype=dtype)})["a"].tolist()


def test_a_gradient_of_the_wrong_type_is_nobody_elses_error(cluster: InProcessCluster) -> None:
    with cluster.use("server2"):
        server = ParameterServer(
            {"a": torch.zeros(2)}, SERVERS[:2], torch.optim.SGD, lr=1.0, mode="sync", trainers=TRAINERS
        )
        right = rpc.rpc_async("trainer0", push_of_type, (server, torch.float32))
        with pytest.raises(ConfigError, match=r"torch\.float16"):
            rpc.rpc_sync("trainer1", push_of_type, (server, torch.float16))
        assert rpc.rpc_sync("trainer1", push_of_type, (server, torch.float32)) == [-1.0, -1.0]
        assert right.wait(LIMIT_S) == [-1.0, -1.0]


@pytest.mark.parametrize(
    "pushed",
    [
        [None, None],
        [torch.ones(1, 2)],
        [(torch.tensor([3]), torch.ones(1, 2))],
        [(torch.tensor([-1]), torch.ones(1, 2))],
        [(torch.tensor([1.5]), torch.ones(1, 2))],
        [(torch.tensor([[0]]), torch.ones(1, 2))],
        [(torch.tensor([0]), torch.ones(2, 2))],
        [(torch.tensor([0]), torch.ones(1, 2, dtype=torch.float64))],
    ],
)
def test_nothing_is_written_beside_the_rows(pushed: list[Any]) -> None:
    shard = ParameterShard(ShardConfig(torch.optim.SGD, {"lr": 1.0}), [torch.zeros(3, 2)], [True])
    with pytest.raises(ConfigError):
        shard.push("trainer0", 1, True, pushed, True)
    assert not shard.pull()[0].any()


class Part:
    """A part of a gradient on a device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def cpu(self) -> str:
        return "on the CPU"


@dataclass
class Shard:
    """A reference to a server's part of the parameters, and the calls of its methods."""

    name: str
    of_server: str

    def owner_name(self) -> str:
        return self.name

    def rpc_async(self, timeout: float) -> Shard:
        return self

    def device(self) -> rpc.Future[str]:
        found = rpc.Future[str]()
        found.set_result(self.of_server)
        return found


@pytest.mark.parametrize(
    ("of_servers", "part", "goes_directly"),
    [
        (["cuda:1"] * 3, "cuda:1", [True, False, True]),
        (["cuda:1"] * 3, "cuda:0", [False, True, False]),
        (["cuda:0", "cuda:0", "cuda:1"], "cuda:0", [True, False, False]),
        (["cpu"] * 3, "cuda:1", [False] * 3),
        (["cpu"] * 3, "cpu", [False] * 3),
    ],
)
def test_gradients_go_to_the_gpu_of_their_server_if_the_way_leads_there(
    monkeypatch: pytest.MonkeyPatch, of_servers: list[str], part: str, goes_directly: list[bool]
) -> None:
    """The options have a device map for one of the servers. Each server tells its device, as `"cuda"` has no index."""
    maps = {"server1": {torch.device("cuda:0"): torch.device("cuda:1")}}
    agent = SimpleNamespace(options=SimpleNamespace(device_maps=maps))
    monkeypatch.setattr(_sharded_parameters, "current_agent", lambda: agent)
    shards: Any = [Shard(name, device) for name, device in zip(SERVERS, of_servers, strict=True)]
    parameters = ShardedParameters(shards, {}, [], ShardConfig(torch.optim.SGD, {}, device="cuda"), 0.0)
    parts: Any = [Part(part) for _ in SERVERS]
    assert [found is sent for found, sent in zip(parameters._sendable(parts), parts, strict=True)] == goes_directly


def test_a_server_on_a_gpu_takes_steps_on_its_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of several trainers run at the same time, each with a stream of its own, but their steps have an order."""
    entered: list[object] = []

    @contextmanager
    def noted(value: object) -> Iterator[None]:
        entered.append(value)
        yield
        entered.append("left")

    class OnGpu(Tensor):
        is_cuda = True

    monkeypatch.setattr(_shard, "in_default_streams", noted)
    shard = ParameterShard(ShardConfig(torch.optim.SGD, {"lr": 1.0}), [torch.zeros(3, 2)], [True])
    gradients = [torch.ones(3, 2)]
    assert shard.push("trainer0", 1, True, gradients, False).wait() == (True, None) and not entered
    shard._parameters[0] = shard._parameters[0].as_subclass(OnGpu)
    shard.push("trainer0", 2, True, gradients, False).wait()
    assert entered == [gradients, "left"]


def test_gradients_flow_through_distributed_autograd(cluster: InProcessCluster) -> None:
    with cluster.use("trainer0"):
        server = ParameterServer(network(), SERVERS, torch.optim.SGD, lr=0.1, staleness=1, trainers=["trainer0"])
        optimizer = DistributedOptimizer(torch.optim.SGD, server.parameter_rrefs(), lr=0.1)
        model = network()
        for step in range(NUM_STEPS):
            inputs, labels = batch(0, step)
            with autograd.context() as context_id:
                scores = torch.func.functional_call(model, server.pull(requires_grad=True), (inputs,))
                autograd.backward(context_id, [cross_entropy(scores, labels)])
                optimizer.step(context_id)
            server.tick()
        assert_equal(server.pull(), train_alone(torch.optim.SGD, 1, lr=0.1)[0])
        del optimizer


# ---- embeddings


def look_up(table: ShardedEmbedding, ids: list[int]) -> Tensor:
    """A step whose loss uses some rows, some of them twice, in two lookups."""
    first, second = table(torch.tensor(ids)), table(torch.tensor([ids[:2], ids[-2:]]))
    (first.pow(2).sum() + second.sum()).backward()
    table.step()
    return table(torch.tensor(ids)).detach()


def look_up_alone(table: nn.Embedding, ids: list[int]) -> None:
    (table(torch.tensor(ids)).pow(2).sum() + table(torch.tensor([ids[:2], ids[-2:]])).sum()).backward()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch's Adagrad itself
@pytest.mark.parametrize(
    ("optimizer_class", "defaults"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SparseAdam, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.1}),
    ],
    ids=["sgd", "sparse_adam", "adagrad"],
)
def test_a_sharded_embedding_is_one_embedding(
    cluster: InProcessCluster, optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]
) -> None:
    """To the last bits: the gradients of a row are added in another order."""
    weight = torch.randn(11, 4, generator=torch.Generator().manual_seed(1))
    batches = [([1, 5, 5, 7], [0, 1, 10, 1]), ([3, 3, 3, 3], [4, 6, 6, 8]), ([2, 9, 0, 0], [2, 9, 0, 0])]
    alone = nn.Embedding.from_pretrained(weight.clone(), freeze=False, sparse=True)
    optimizer = optimizer_class(alone.parameters(), **defaults)
    for ids in batches:
        for each in ids:
            look_up_alone(alone, each)
        assert alone.weight.grad is not None
        alone.weight.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    with cluster.use("trainer0"):
        table = ShardedEmbedding(
            11, 4, SERVERS, optimizer_class, weight=weight, mode="sync", trainers=TRAINERS, **defaults
        )
        for ids in batches:
            calls = [rpc.rpc_async(name, look_up, (table, each)) for name, each in zip(TRAINERS, ids, strict=True)]
            for found, each in zip(rpc.wait_all(calls), ids, strict=True):
                assert found.shape == (4, 4) and torch.equal(found, table(torch.tensor(each)))
        state = table.state_dict()
        torch.testing.assert_close(state["parameters"]["weight"], alone.weight.detach())
        torch.testing.assert_close(state["optimizer"]["state"], optimizer.state_dict()["state"])
        again = ShardedEmbedding(11, 4, SERVERS[:2], optimizer_class, seed=7, **defaults)
        again.load_state_dict(state)
        assert torch.equal(again.state_dict()["parameters"]["weight"], state["parameters"]["weight"])


def test_only_gradients_of_backward_passes_are_pushed(cluster: InProcessCluster) -> None:
    with cluster.use("trainer0"):
        table = ShardedEmbedding(5, 2, SERVERS, torch.optim.SGD, lr=1.0)
        before = table.state_dict()["parameters"]["weight"]
        assert not torch.equal(before[0], before[1])
        ids = torch.tensor([1, 4])
        with torch.no_grad():
            assert torch.equal(table(ids), before[ids])
        table(ids).sum()  # no backward
        table.step()
        assert torch.equal(table.state_dict()["parameters"]["weight"], before)
        table(ids).sum().backward()
        table.zero_grad()
        table.step()
        assert torch.equal(table.state_dict()["parameters"]["weight"], before)
        loss = table(ids).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        table.step()
        expected = before.clone()
        expected[ids] -= 2
        assert torch.equal(table.state_dict()["parameters"]["weight"], expected)
        assert table(torch.empty(0, 3, dtype=torch.long)).shape == (0, 3, 2)
        for wrong in (-1, 5):
            with pytest.raises(IndexError, match=rf"row {wrong} does not exist: this table has the rows 0 to 4"):
                table(torch.tensor([0, wrong]))


def test_the_page_runs(cluster: InProcessCluster) -> None:
    with cluster.use("trainer0"):
        run_page("docs/parameter_server.md")
        gc.collect()  # references in cycles of the page's names


# ---- what errors say


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"servers": "server0"}, "names of different workers"),
        ({"servers": []}, "names of different workers"),
        ({"servers": ["server0", "server0"]}, "names of different workers"),
        ({"mode": "both"}, "pass 'async' or 'sync'"),
        ({"mode": "sync"}, "name the trainers that wait for each other"),
        ({"staleness": 3}, "name the trainers that wait for each other"),
        ({"mode": "sync", "staleness": 3}, "with 'sync', no trainer is ahead"),
        ({"staleness": -1, "trainers": ["a"]}, "at least 0"),
        ({"trainers": "trainer0"}, "names of different workers"),
        ({"staleness": 1.5, "trainers": ["a"]}, "at least 0"),
        ({"parameters": nn.ReLU()}, "nothing to train"),
        ({"parameters": network().parameters()}, "got a generator: pass a module, or a dictionary"),
        ({"optimizer_class": torch.optim.SGD([torch.ones(1)])}, "optimizer_class is a SGD: pass the class"),
        ({"optimizer_class": "SGD"}, "optimizer_class is 'SGD': pass the class"),
    ],
)
def test_wrong_arguments_are_explained(arguments: dict[str, Any], message: str) -> None:
    right = {"parameters": network(), "servers": ["server0"], "optimizer_class": torch.optim.SGD, "lr": 0.1}
    with pytest.raises(ConfigError, match=message):
        ParameterServer(**{**right, **arguments})


def test_wrong_gradients_and_models_are_explained(cluster: InProcessCluster) -> None:
    with cluster.use("trainer0"):
        server = ParameterServer({"a": torch.zeros(2, 3), "b": torch.tensor(1.0)}, SERVERS, torch.optim.SGD, lr=1.0)
        assert repr(server) == "<ParameterServer of 7 elements on server0, server1, server2>"
        with pytest.raises(ConfigError, match=r"no parameters \['c'\]; they have \['a', 'b'\]"):
            server.push({"c": torch.zeros(1)})
        with pytest.raises(ConfigError, match=r"'a' has shape \(3, 2\), but its parameter has \(2, 3\)"):
            server.push({"a": torch.zeros(3, 2)})
        with pytest.raises(ConfigError, match="a ShardedEmbedding pushes sparse gradients"):
            server.push({"a": torch.zeros(2, 3).to_sparse()})
        with pytest.raises(
            ConfigError, match=r"'a' is torch\.float64: pass a tensor of its parameter's dtype, torch\.float32"
        ):
            server.push({"a": torch.zeros(2, 3, dtype=torch.float64)})
        with pytest.raises(ConfigError, match="'b' is a float: pass a tensor"):
            server.push({"b": 1.0})  # type: ignore[dict-item]
        with pytest.raises(ConfigError, match="gradients are a list: pass a dictionary"):
            server.push([torch.zeros(2, 3)])  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="got a Tensor: pass a module"):
            server.step(torch.zeros(1))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"SGD has no options \['learning_rate'\]; it has .*'lr'"):
            server.set_options(learning_rate=0.1)
        with pytest.raises(ConfigError, match=r"the option lr of SGD is a number, but not '0.1'"):
            server.set_options(lr="0.1")
        with pytest.raises(ConfigError, match="are not those of <ParameterServer"):
            server.load_into(network())
        found = server.push({"b": torch.tensor(0.5)})
        assert found["b"].item() == 0.5 and found["b"].shape == () and torch.equal(found["a"], torch.zeros(2, 3))
        with pytest.raises(ConfigError, match=r"2 rows are too few for 3 servers"):
            ShardedEmbedding(2, 2, SERVERS, torch.optim.SGD, lr=1.0)
        with pytest.raises(ConfigError, match=r"weight has the shape \(2, 2\)"):
            ShardedEmbedding(4, 2, SERVERS, torch.optim.SGD, lr=1.0, weight=torch.zeros(2, 2))
        with pytest.raises(ValueError, match="Invalid learning rate"):
            ParameterServer(network(), SERVERS, torch.optim.SGD, lr=-1.0)


def test_wrong_tables_and_ids_are_explained(cluster: InProcessCluster) -> None:
    with cluster.use("trainer0"):
        for shape in ((3.0, 2), (-3, 2), (3, 0)):
            with pytest.raises(ConfigError, match=rf"whole numbers of at least 1, but got \({shape[0]}, {shape[1]}\)"):
                ShardedEmbedding(shape[0], shape[1], SERVERS, torch.optim.SGD, lr=1.0)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"of a table are sparse: pass .*Adam does not support sparse gradients"):
            ShardedEmbedding(3, 2, SERVERS, torch.optim.Adam, lr=1.0)
        table = ShardedEmbedding(3, 2, SERVERS, torch.optim.SGD, lr=1.0, momentum=0.5)
        for ids, found in (([1], "a list"), (torch.ones(1), "torch.float32"), (torch.ones(1) > 0, "torch.bool")):
            with pytest.raises(TypeError, match=f"ids are {found}: pass a tensor of int64 or int32"):
                table(ids)  # type: ignore[arg-type]
