"""Remote modules on four workers: calls, what can be asked of them, how they travel, and what is refused."""

from __future__ import annotations

import copy
import pickle
import re
from types import SimpleNamespace
from typing import Any

import pytest
import remote_module_functions as functions
import torch
from docs_programs import run_page
from rpc_cluster import Cluster
from torch import nn

import rpcdist.autograd as autograd
import rpcdist.nn
import rpcdist.rpc as rpc
from rpcdist.errors import ConfigError, SerializationError, UnknownWorker
from rpcdist.nn import RemoteModule, _owner_functions
from rpcdist.nn.api.remote_module import _REMOTE_MODULE_PICKLED_ATTRIBUTES, REFUSED, _RemoteModule
from rpcdist.optim import DistributedOptimizer

pytestmark = pytest.mark.multiproc

X = torch.arange(6.0).reshape(2, 3)
rpc_sync: Any = rpc.rpc_sync


def net(remote_device: str = "worker1", **kwargs: Any) -> RemoteModule:
    return RemoteModule(remote_device, functions.Net, args=(1,), kwargs=kwargs)


@pytest.mark.parametrize(
    ("remote_device", "owner", "device"),
    [
        ("worker1", "worker1", "cpu"),
        ("worker2/cpu", "worker2", "cpu"),
        ("rank:3/cpu", "worker3", "cpu"),
        ("rank:1", "worker1", "cpu"),
        ("worker0", "worker0", "cpu"),
        ("cpu", "worker0", "cpu"),
        ("worker1/meta", "worker1", "meta"),
    ],
)
def test_places(cluster: Cluster, remote_device: str, owner: str, device: str) -> None:
    module = net(remote_device)
    assert module.get_module_rref().owner_name() == owner
    assert (module.device, module.is_device_map_set, module.is_scriptable) == (device, False, False)
    if device == "cpu":
        torch.testing.assert_close(module(X), functions.Net(1)(X))


def test_calls(cluster: Cluster) -> None:
    module, same = net(), functions.Net(1)
    expected = same(X)
    torch.testing.assert_close(module.forward(X), expected)
    torch.testing.assert_close(module(X, times=2), expected * 2)
    torch.testing.assert_close(module.forward_async(X, 3).wait(), expected * 3)
    word, result = module.forward(X, word="yes")
    assert word == "yes"
    torch.testing.assert_close(result, expected)


async def test_in_a_coroutine(running_cluster: Cluster) -> None:
    torch.testing.assert_close(await net().forward_async(X), functions.Net(1)(X))


def test_train_and_eval(cluster: Cluster) -> None:
    module = net()
    for call, expected in [(module.eval, False), (module.train, True), (lambda: module.train(False), False)]:
        assert call() is module
        assert module.training is expected
        assert functions.is_training_there(module) is expected


def test_parameters_are_references(cluster: Cluster) -> None:
    module, same = net(), functions.Net(1)
    names = [name for name, _ in same.named_parameters()]
    assert [name for name, _ in module.named_parameters()] == names
    assert [name for name, _ in module.named_parameters("net", recurse=False)] == ["net.scale"]
    rrefs = module.remote_parameters()
    assert [rref.owner_name() for rref in rrefs] == ["worker1"] * len(names)
    torch.testing.assert_close([rref.to_here() for rref in rrefs], list(same.parameters()))
    assert len(module.remote_parameters(recurse=False)) == 1


def test_state_goes_both_ways(cluster: Cluster) -> None:
    module, other = net(), functions.Net(2)
    assert list(module.state_dict()) == list(other.state_dict())
    assert module.load_state_dict(other.state_dict()).missing_keys == []
    torch.testing.assert_close(module(X), other(X))
    torch.testing.assert_close(dict(module.state_dict()), dict(other.state_dict()))
    assert module.load_state_dict({"more": X}, strict=False).unexpected_keys == ["more"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"inner.weight\""):
        module.load_state_dict({"scale": torch.ones(())})
    assert list(module.state_dict(prefix="p.")) == [f"p.{name}" for name in other.state_dict()]


def test_to_and_requires_grad(cluster: Cluster) -> None:
    module = net()
    rref = module.remote_parameters()[0]
    assert module.to(torch.float64) is module
    assert rref.to_here().dtype == torch.float64  # the same parameter
    assert module(X.double()).dtype == torch.float64
    assert module.requires_grad_(False) is module
    assert not rref.to_here().requires_grad
    assert module.to("meta").device == "meta"
    with pytest.raises(NotImplementedError, match="meta"):
        module.to("cpu")


def test_as_part_of_a_local_module(cluster: Cluster) -> None:
    hybrid = functions.Hybrid(net())
    assert [name for name, _ in hybrid.named_parameters()] == ["local.weight", "local.bias"]
    assert len(list(hybrid.parameters())) == 2
    state = copy.deepcopy(hybrid.state_dict())
    names = [f"remote.{name}" for name in functions.Net(1).state_dict()]
    assert list(state) == [*names, "local.weight", "local.bias"]
    assert state._metadata["remote.norm"] == {"version": 2}  # type: ignore[attr-defined]
    state["remote.scale"] = torch.tensor(5.0)
    hybrid.load_state_dict(state)
    assert hybrid.remote.state_dict()["scale"] == 5.0
    with pytest.raises(RuntimeError, match=r"remote\.more"):
        hybrid.load_state_dict({**state, "remote.more": X})
    with pytest.raises(RuntimeError, match="size mismatch for scale"):
        hybrid.load_state_dict({**state, "remote.scale": X})
    hybrid.eval()
    assert not functions.is_training_there(hybrid.remote)
    assert hybrid.to(torch.float32) is hybrid
    assert "remote): RemoteModule(on='worker1', device='cpu')" in repr(hybrid)


def test_it_travels_in_calls(cluster: Cluster) -> None:
    module = net()
    expected = functions.Net(1)(X)
    torch.testing.assert_close(rpc_sync("worker2", functions.call_it, (module, X)), expected)
    torch.testing.assert_close(rpc_sync("worker2", functions.call_it_async, (module, X)), expected)
    torch.testing.assert_close(rpc_sync("worker1", functions.call_it, (module, X)), expected)
    back = rpc_sync("worker3", functions.echo, (module,))
    assert type(back) is RemoteModule
    torch.testing.assert_close(back(X), expected)
    assert repr(back) == repr(module)
    names, training = rpc_sync("worker2", functions.in_hybrid, (module, X))
    assert (names, training) == (["local.weight", "local.bias"], False)
    child = functions.Child("worker1", functions.Net, (1,))
    assert type(rpc_sync("worker2", functions.echo, (child,))) is functions.Child


def test_own_attributes_stay_here(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    module: Any = net()
    module.note = "mine"
    arrived = rpc_sync("worker2", functions.attributes, (module,))
    assert arrived == [*_REMOTE_MODULE_PICKLED_ATTRIBUTES, "forward_async", "forward"]
    assert "are not sent: note" in caplog.text


def test_from_a_reference(cluster: Cluster) -> None:
    module = net()
    other = RemoteModule.init_from_module_rref("worker1", module.get_module_rref())
    torch.testing.assert_close(other(X), module(X))
    assert rpc_sync("worker2", functions.call_it, (other, X)).shape == (2, 3)


def test_no_cycle_keeps_the_module_alive(cluster: Cluster) -> None:
    import gc
    import weakref

    gc.collect()
    gc.disable()
    try:
        module = net()
        module(X)
        gone = weakref.ref(module)
        del module
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
def test_with_an_interface_the_owner_compiles_it(cluster: Cluster) -> None:
    module = _RemoteModule("worker1", functions.Scripted, _module_interface_cls=functions.ScriptedInterface)
    torch.testing.assert_close(module.forward(X, 3), X * 8)
    torch.testing.assert_close(module.forward_async(X, count=1).wait(), X * 2)
    assert rpc_sync("worker1", functions.is_scripted, (module.get_module_rref(),))
    torch.testing.assert_close(module.get_module_rref().to_here()(X, 1), X * 2)
    assert not module.is_scriptable
    with pytest.raises(RuntimeError, match="cannot be compiled by TorchScript"):
        torch.jit.script(module)


def test_training_equals_that_of_one_process(cluster: Cluster) -> None:
    here = [functions.Net(1), functions.Net(2)]
    there = [RemoteModule("worker1", functions.Net, (1,)), RemoteModule("worker2", functions.Net, (2,))]
    head = nn.Linear(3, 1)
    same_head = copy.deepcopy(head)
    single = torch.optim.SGD([p for m in (*here, same_head) for p in m.parameters()], lr=0.1)
    rrefs: list[Any] = [p for m in there for p in m.remote_parameters()] + [rpc.RRef(p) for p in head.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
    for _ in range(2):
        single.zero_grad()
        same_head(here[1](here[0](X))).sum().backward()
        single.step()
        with autograd.context() as context_id:
            hidden = there[0].forward_async(X).wait()
            autograd.backward(context_id, [head(there[1](hidden)).sum()])
            assert set(rpc_sync("worker1", functions.collected, (there[0].module_rref, context_id))) == {
                "inner.weight",
                "inner.bias",
                "scale",
            }
            optimizer.step(context_id)
    for module, expected in zip(there, here, strict=True):
        torch.testing.assert_close(dict(module.state_dict()), dict(expected.state_dict()))
    torch.testing.assert_close(head.state_dict(), same_head.state_dict())


def test_the_page_runs(cluster: Cluster) -> None:
    run_page("docs/remote_module.md")


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", REFUSED)
def test_refused_methods(name: str) -> None:
    module: Any = RemoteModule.__new__(RemoteModule)
    with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
        getattr(module, name)()


def test_each_method_works_here_or_is_refused() -> None:
    assert {"add_module", "cuda", "named_buffers", "register_forward_hook", "zero_grad"} <= set(REFUSED)
    assert not {"forward", "to", "train", "eval", "state_dict", "parameters", "named_parameters"} & set(REFUSED)


def test_more_refusals(cluster: Cluster) -> None:
    module = net()
    with pytest.raises(ValueError, match=r"``parameters`` not supported for RemoteModule. Please use ``remote_param"):
        module.parameters()
    with pytest.raises(ValueError, match="``named_modules`` not supported"):
        module.named_modules()
    with pytest.raises(SerializationError, match="can only be pickled when using RPC"):
        pickle.dumps(module)
    with pytest.raises(SerializationError, match="Cannot pickle RemoteModule in python pickler"):
        copy.deepcopy(module)


def test_what_goes_wrong_at_the_owner(cluster: Cluster) -> None:
    module = RemoteModule("worker1", functions.not_a_module, (1,))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=re.escape("returns an instance of <class nn.Module>, but it returns an insta")
    ):
        module.forward()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'seed'"):
        RemoteModule("worker1", functions.Net).remote_parameters()
    with pytest.raises(UnknownWorker, match="nobody"):
        RemoteModule("nobody/cpu", functions.Net)


@pytest.mark.parametrize("text", ["", "/cpu", "worker1/", "a/b/c", "rank:x/cpu", "rank:/cpu"])
def test_devices_that_cannot_be_read(cluster: Cluster, text: str) -> None:
    with pytest.raises(ConfigError, match="Could not parse remote_device"):
        net(text)


def test_devices_that_torch_does_not_know(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError, match=r"Expected one of .+ device type at start of device string"):
        net("worker1/foo")
    with pytest.raises(TypeError, match="Invalid type for remote_device: int"):
        net(3)  # type: ignore[arg-type]


def test_functional_is_found_late() -> None:
    with pytest.raises(AttributeError, match="no_such_function"):
        getattr(rpcdist.nn.functional, "no_such_function")  # noqa: B009
    with pytest.raises(AttributeError, match="no_such_function"):
        getattr(rpcdist.nn, "no_such_function")  # noqa: B009


def test_results_are_where_the_inputs_are() -> None:
    """Without a device map. The device meta stands for a GPU: nothing can be copied from it to the CPU."""
    module = nn.Linear(3, 2, device="meta")
    rref: Any = SimpleNamespace(local_value=lambda: module)
    inputs = torch.ones(1, 3, device="meta")
    assert _owner_functions.forward(rref, "meta", False, (inputs,), {}).device.type == "meta"
    assert _owner_functions.forward(rref, "meta", True, (torch.ones(1, 3),), {}).device.type == "meta"
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta"):
        _owner_functions.forward(rref, "meta", False, (torch.ones(1, 3),), {})
