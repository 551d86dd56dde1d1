"""The functions that workers run in the tests of calls with tensors on a GPU: the called functions, and the programs
that call.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rpcdist.autograd as dist_autograd
import rpcdist.rpc as rpc
from rpcdist.errors import RpcdistError, SerializationError
from rpcdist.nn import RemoteModule
from rpcdist.optim import DistributedOptimizer
from rpcdist.parallel.parameter_server import ParameterServer, ShardedEmbedding
from rpcdist.parallel.pipeline import Pipeline

GPU = torch.device("cuda", 0)
CYCLES = 50_000_000
"""How long the GPU is kept busy, about 30 ms: what is enqueued behind that has not run when a message is made of it."""


def same(got: Tensor, wanted: Tensor) -> None:
    assert got.device == GPU, got.device
    assert torch.equal(got.cpu(), wanted.cpu()), (got, wanted)


# ---------------------------------------------------------------- called from elsewhere


def device_of(value: Tensor) -> str:
    return str(value.device)


def twice(value: Tensor) -> Tensor:
    torch.cuda._sleep(CYCLES)
    return value * 2


def twice_each(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: twice(value) for name, value in values.items()}


async def twice_later(value: Tensor) -> Tensor:
    return twice(value)


def on_the_cpu(length: int) -> Tensor:
    return torch.ones(length)


def make_on_gpu(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32, device=GPU)


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(GPU)


class Model(nn.Module):
    """A layer that lives on the GPU of its owner."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.to(GPU)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def parameter_rrefs(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters()]


def make_stage(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), nn.Tanh())


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


# ------------------------------------------------------------ programs: each runs on alice, whose map knows bob only


def values() -> None:
    """A tensor that the GPU has not yet computed when a call is made, or answered, arrives all the same."""
    for length in (0, 1, 1000, 300_000, 5_000_000):
        value = torch.empty(length, device=GPU)
        torch.cuda._sleep(CYCLES)
        value.copy_(torch.arange(length, dtype=torch.float32))
        same(rpc.rpc_sync("bob", twice, (value,)), torch.arange(length) * 2.0)
        same(rpc.rpc_async("bob", twice_later, (value,)).wait(), torch.arange(length) * 2.0)
    cases = {
        "column": torch.arange(600.0, device=GPU).reshape(20, 30)[:, 3],
        "transposed": torch.arange(300_000.0, device=GPU).reshape(300, 1000).t(),
        "half": torch.ones(70_000, dtype=torch.float16, device=GPU),
        "scalar": torch.tensor(3, device=GPU),
    }
    for name, value in rpc.rpc_sync("bob", twice_each, (cases,)).items():
        same(value, cases[name] * 2)
    assert rpc.rpc_sync("bob", device_of, (torch.ones(1),)) == "cpu"


def other_streams() -> None:
    """A message is made on the caller's current stream."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        value = torch.zeros(1_000_000, device=GPU)
        torch.cuda._sleep(CYCLES)
        value.fill_(7)
        result = rpc.rpc_sync("bob", twice, (value,))
        assert result.eq(14).all()


def maps_of_one_call() -> None:
    value = torch.ones(3)
    for name, size in (("bob", 3), ("carol", 100_000)):
        assert rpc.rpc_sync(name, device_of, (value.expand(size),), device_map={"cpu": "cuda:0"}) == "cuda:0"
        result = rpc.rpc_sync(name, twice, (torch.ones(size),), device_map={"cpu": "cuda:0"})
        assert result.is_cpu and result.eq(2).all()
        assert rpc.rpc_sync(name, device_of, (torch.ones(size, device=GPU),), device_map={"cuda:0": "cpu"}) == "cpu"
        same(rpc.rpc_sync(name, on_the_cpu, (size,), device_map={"cuda:0": "cpu"}), torch.ones(size))
    with pytest.raises(SerializationError, match="tensor for cuda:7 arrived"):
        rpc.rpc_sync("bob", device_of, (value,), device_map={"cpu": "cuda:7"})
    with pytest.raises(RpcdistError, match="tensor on cuda:0 cannot be sent"):
        rpc.rpc_sync("bob", device_of, (value.to(GPU),), device_map={})


def without_a_map() -> None:
    """A tensor goes to the device of the same index, and a result comes from there."""
    value = torch.ones(3, device=GPU)
    assert rpc.rpc_sync("carol", device_of, (value,)) == "cuda:0"
    same(rpc.rpc_sync("carol", make_on_gpu, (3,)), torch.arange(3.0))
    assert rpc.rpc_sync("carol", device_of, (value.cpu(),)) == "cpu"
    with pytest.raises(SerializationError, match=r"tensor for cuda:7 arrived from .*'alice'.* 'dave' has cuda:0"):
        rpc.rpc_sync("dave", device_of, (value,))


def references() -> None:
    rref = rpc.remote("bob", make_on_gpu, (1000,))
    same(rref.to_here(), torch.arange(1000.0))
    assert rref.rpc_sync().sum().item() == 499_500
    mine = rpc.RRef(torch.ones(4, device=GPU))
    same(rpc.rpc_sync("bob", fetch_twice, (mine,)), torch.full((4,), 2.0))


def fetch_twice(rref: rpc.RRef[Tensor]) -> Tensor:
    return twice(rref.to_here())


def memory() -> None:
    """Tensors that were sent and received are freed."""
    before = allocated(), rpc.rpc_sync("bob", allocated)
    for _ in range(20):
        rpc.rpc_sync("bob", twice, (torch.ones(1_000_000, device=GPU),))
    after = allocated(), rpc.rpc_sync("bob", allocated)
    assert all(now - then < 4_000_000 for then, now in zip(before, after, strict=True)), (before, after)


def trained(step: Callable[[Tensor, Tensor], None]) -> None:
    for number in range(3):
        torch.manual_seed(100 + number)
        step(torch.rand(5, 8, dtype=torch.float64), torch.rand(5, 8, dtype=torch.float64))


def train(mode: Any, make_optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    """A model over three GPUs' worth of workers, alice, bob and alice again, against the same model in one piece."""
    first, last = Model(1), Model(3)
    middle = rpc.remote("bob", Model, (2,))
    rrefs = [*first.parameter_rrefs(), *middle.rpc_sync().parameter_rrefs(), *last.parameter_rrefs()]
    optimizer = DistributedOptimizer(make_optimizer, rrefs, lr=0.1)

    def step(inputs: Tensor, targets: Tensor) -> None:
        with dist_autograd.context() as context:
            hidden = first(inputs.to(GPU))
            output = last(middle.rpc_sync().forward(hidden))
            assert output.device == GPU
            dist_autograd.backward(context, [squared(output, targets.to(GPU))], mode=mode)
            gradients = dist_autograd.get_gradients(context)
            assert {gradient.device for gradient in gradients.values()} == {GPU}
            optimizer.step(context)

    trained(step)
    whole = nn.Sequential(Model(1), Model(2), Model(3))
    local = make_optimizer(whole.parameters(), lr=0.1)

    def local_step(inputs: Tensor, targets: Tensor) -> None:
        local.zero_grad()
        squared(whole(inputs.to(GPU)), targets.to(GPU)).backward()
        local.step()

    trained(local_step)
    found = [*first.weights(), *middle.rpc_sync().weights(), *last.weights()]
    torch.testing.assert_close(found, [parameter.detach() for parameter in whole.parameters()])


def autograd_smart() -> None:
    train("smart", torch.optim.SGD)


def autograd_fast() -> None:
    train("fast", torch.optim.Adam)


def remote_modules() -> None:
    for name, place in (("bob", GPU), ("carol", torch.device("cpu"))):
        module = RemoteModule(f"{name}/cuda:0", nn.Linear, args=(8, 2))
        parameter = module.remote_parameters()[0]
        assert rpc.rpc_sync(name, device_of_parameter, (parameter,)) == "cuda:0"
        output = module(torch.ones(3, 8))
        assert (output.device, output.shape) == (place, (3, 2))
    with dist_autograd.context() as context:
        module = RemoteModule("bob/cuda:0", nn.Linear, args=(8, 2))
        inputs = torch.ones(3, 8, device=GPU, requires_grad=True)
        dist_autograd.backward(context, [module(inputs).sum()])
        assert dist_autograd.get_gradients(context)[inputs].device == GPU


def device_of_parameter(rref: rpc.RRef[nn.Parameter]) -> str:
    return str(rref.local_value().device)


def pipelines() -> None:
    inputs, targets = torch.rand(2, 6, 8, dtype=torch.float64)
    for schedule, num_stages in (("gpipe", 2), ("1f1b", 2), ("interleaved", 4)):
        stages = [make_stage(seed) for seed in range(num_stages)]
        pipeline = Pipeline(
            stages,
            ["bob", "carol"],
            schedule=schedule,
            num_microbatches=2,
            loss_fn=squared,
            devices=["cuda:0", "cuda:0"],
        )
        result = pipeline.step(inputs, targets)
        whole = nn.Sequential(*stages).to(GPU)
        expected = squared(whole(inputs.to(GPU)), targets.to(GPU))
        expected.backward()
        assert result.loss == pytest.approx(expected.item())
        found = pipeline.gradients()
        for name, parameter in whole.named_parameters():
            gradient = found[name]
            assert gradient is not None and parameter.grad is not None
            torch.testing.assert_close(gradient.cpu(), parameter.grad.cpu())


def parameter_servers() -> None:
    """Trainer and servers on GPUs, against one process."""
    for device in ("cuda:0", "cuda"):
        train_at_servers(device)
    weight = torch.rand(9, 3)
    table = ShardedEmbedding(9, 3, ["bob", "carol"], torch.optim.SGD, lr=1.0, weight=weight, device="cuda:0")
    for place in (GPU, torch.device("cpu")):
        rows = table(torch.tensor([7, 2, 7], device=place))
        assert rows.device == place and torch.equal(rows.detach().cpu(), weight[[7, 2, 7]])
    table(torch.tensor([1], device=GPU)).sum().backward()
    table.step()
    torch.testing.assert_close(table(torch.tensor([1])).detach()[0], weight[1] - 1)


def train_at_servers(device: str) -> None:
    model, reference = nn.Linear(8, 4).to(GPU), nn.Linear(8, 4).to(GPU)
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    server = ParameterServer(model, ["bob", "carol"], torch.optim.SGD, lr=0.1, device=device)
    assert server._sendable([torch.ones(2, device=GPU)] * 2)[0].is_cuda
    for _ in range(3):
        inputs = torch.rand(5, 8, device=GPU)
        for each in (model, reference):
            each(inputs).square().mean().backward()
        server.step(model)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.weight, reference.weight)
    assert all(value.is_cpu for value in server.pull().values())
