"""Training and saving in coroutines: the forms that the errors of the blocking ones name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from blocking_refused import refuses
from torch import Tensor, nn

from rpcdist import checkpoint
from rpcdist.errors import BlockingInLoop
from rpcdist.nn import RemoteModule
from rpcdist.parallel import ParameterServer, Pipeline, ShardedEmbedding
from rpcdist.testing import InProcessCluster


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("a", "b") as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True)
async def end_of_threads() -> AsyncIterator[None]:
    """Of `asyncio.to_thread`."""
    yield
    await asyncio.get_running_loop().shutdown_default_executor()


def squared(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


async def test_parameter_server(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        net = nn.Linear(2, 1)
        with pytest.raises(BlockingInLoop, match=r"await asyncio\.to_thread\(ParameterServer, \.\.\.\)"):
            ParameterServer(net, ["b"], torch.optim.SGD, lr=0.5)
        server = await asyncio.to_thread(ParameterServer, net, ["b"], torch.optim.SGD, lr=0.5)
        before = net.weight.detach().clone()
        net(torch.ones(2)).sum().backward()
        for name, args in {
            "step": (net,), "push": ({},), "pull": (), "load_into": (net,), "tick": (), "leave": (),
            "state_dict": (), "load_state_dict": ({},), "set_options": (),
        }.items():  # fmt: skip
            refuses(f"await server.{name}_async(...)", getattr(server, name), *args)
        await server.step_async(net)
        assert torch.allclose(net.weight, before - 0.5)
        assert torch.equal((await server.pull_async())["weight"], net.weight)
        await server.push_async({"weight": torch.ones(1, 2)})
        await server.load_into_async(net)
        assert torch.allclose(net.weight, before - 1.0)
        await server.set_options_async(lr=1.0)
        state = await server.state_dict_async()
        await server.push_async({"weight": torch.ones(1, 2)})
        await server.load_state_dict_async(state)
        assert torch.allclose((await server.pull_async())["weight"], before - 1.0)
        await server.tick_async()
        await server.leave_async()


async def test_sharded_embedding(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        with pytest.raises(BlockingInLoop, match=r"await asyncio\.to_thread\(ShardedEmbedding, \.\.\.\)"):
            ShardedEmbedding(4, 2, ["b"], torch.optim.SGD, lr=1.0)
        weight = torch.arange(8.0).reshape(4, 2)
        table = await asyncio.to_thread(ShardedEmbedding, 4, 2, ["b"], torch.optim.SGD, weight=weight, lr=1.0)
        ids = torch.tensor([1, 3])
        refuses("await table.look_up_async(...)", table, ids)
        refuses("await table.step_async(...)", table.step)
        rows = await table.look_up_async(ids)
        assert torch.equal(rows, weight[ids])
        rows.sum().backward()
        await table.step_async()
        with torch.no_grad():
            rows = await table.look_up_async(ids)
        assert torch.equal(rows, weight[ids] - 1) and not rows.requires_grad


async def test_pipeline(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        with pytest.raises(BlockingInLoop, match=r"await asyncio\.to_thread\(Pipeline, \.\.\.\)"):
            Pipeline([nn.Linear(2, 2)], ["b"])
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        pipe = await asyncio.to_thread(Pipeline, list(net), ["a", "b"], loss_fn=squared, num_microbatches=2)
        x, y = torch.randn(4, 2), torch.randn(4, 1)
        for name, args in {
            "step": (x, y), "evaluate": (x, y), "forward": (x,), "make_optimizer": (torch.optim.SGD,), "zero_grad": (),
            "clip_grad_norm": (1.0,), "train": (), "eval": (), "state_dict": (), "gradients": (),
            "load_state_dict": ({},),
        }.items():  # fmt: skip
            refuses(f"await pipe.{name}_async(...)", getattr(pipe, name), *args)
        refuses("await pipe.forward_async(...)", pipe, x)
        optimizer = await pipe.make_optimizer_async(torch.optim.SGD, lr=0.1)
        for name, args in {
            "step": (), "zero_grad": (), "change": (), "state_dict": (), "load_state_dict": ({},),
        }.items():  # fmt: skip
            refuses(f"await optimizer.{name}_async(...)", getattr(optimizer, name), *args)
        result = await pipe.step_async(x, y)
        assert result.loss == pytest.approx(squared(net(x), y).item())
        before = await pipe.state_dict_async()
        await optimizer.step_async()
        assert not torch.equal((await pipe.state_dict_async())["1.bias"], before["1.bias"])
        await pipe.load_state_dict_async(before)
        assert torch.allclose(await pipe.forward_async(x), net(x))
        await pipe.eval_async()
        assert (await pipe.evaluate_async(x, y)).loss == pytest.approx(result.loss)


async def test_remote_module(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        module = RemoteModule("b", nn.Linear, (2, 1))
        refuses("await module.forward_async(...)", module, torch.ones(2))
        assert (await module.forward_async(torch.ones(2))).shape == (1,)
        for name, args in {
            "train": (), "eval": (), "requires_grad_": (), "to": ("cpu",), "remote_parameters": (),
            "named_parameters": (), "state_dict": (), "load_state_dict": ({},),
        }.items():  # fmt: skip
            blocking = getattr(module, name)
            expected = "train" if name == "eval" else name
            with pytest.raises(BlockingInLoop, match=rf"await asyncio\.to_thread\(module\.{expected}, \.\.\.\)"):
                blocking(*args)
        assert len(await asyncio.to_thread(module.remote_parameters)) == 2


async def test_checkpoint(cluster: InProcessCluster, tmp_path: Path) -> None:
    with cluster.use("a"):
        net, path = nn.Linear(2, 1), tmp_path / "checkpoint"
        refuses("await checkpoint.save_async(...)", checkpoint.save, path, {"net": net})
        assert not path.exists()
        await checkpoint.save_async(path, {"net": net})
        saved = net.weight.detach().clone()
        with torch.no_grad():
            net.weight.zero_()
        refuses("await checkpoint.load_async(...)", checkpoint.load, path, {"net": net})
        await checkpoint.load_async(path, {"net": net})
        assert torch.equal(net.weight, saved)
