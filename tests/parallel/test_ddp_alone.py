"""DistributedDataParallel in a world of one: names and texts of torch's class, and the compiler."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rpcdist.parallel import DistributedDataParallel, MixedPrecision, comm_hooks

pytestmark = pytest.mark.usefixtures("world_of_one")


def wrapped(module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(2, 2) if module is None else module, **options)


def test_logging_data_names_the_hook_that_the_program_registered() -> None:
    assert "comm_hook" not in wrapped()._get_ddp_logging_data()
    model = wrapped()
    model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    assert model._get_ddp_logging_data()["comm_hook"] == "fp16_compress_hook"
    model = wrapped()
    model._register_builtin_comm_hook(comm_hooks.BuiltinCommHookType.ALLREDUCE)
    assert model._get_ddp_logging_data()["comm_hook"] == str(comm_hooks.BuiltinCommHookType.ALLREDUCE)


def test_logging_data_tells_of_what_was_refused() -> None:
    model = wrapped()
    wrong: Any = {}
    with pytest.raises(TypeError, match="callable"):
        model.register_comm_hook(None, wrong)
    data = model._get_ddp_logging_data()
    assert data["has_error"] and "callable" in str(data["error"])
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="should be called before training loop starts"):
        model._set_static_graph()
    assert not model.static_graph and "training loop" in str(model._get_ddp_logging_data()["error"])


def test_logging_data_has_the_times_of_the_iterations_that_were_sampled() -> None:
    """The first ten, then one in so many; an iteration that has not ended, or did not synchronise, is none."""
    model = wrapped(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model._set_ddp_runtime_logging_sample_rate(4)
    times = ("forward_compute_time", "backward_compute_time", "backward_comm_time")
    assert "backward_comm_time" not in model._get_ddp_logging_data()
    sampled, shortest, longest = [], dict.fromkeys(times, 1 << 62), dict.fromkeys(times, 0)
    for _ in range(18):
        model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            model(torch.ones(1, 2))
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        data: dict[str, Any] = model._get_ddp_logging_data()
        sampled.append(data["iteration"])
        for name in times if sampled[-1] else ():
            shortest[name] = min(shortest[name], data[name])
            longest[name] = max(longest[name], data[name])
            assert 0 < shortest[name] <= data[f"avg_{name}"] <= longest[name]
    assert sampled == [*range(11), 10, 12, 12, 12, 12, 16, 16]
    assert data["prev_iteration_grad_ready_order_indices"] == "3, 2, 1, 0"
    assert data["rebuilt_per_bucket_param_indices"] == "3 2 1 0"
    model(torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert model._get_ddp_logging_data()["iteration"] == 16  # the 19th has two forward passes
    with pytest.raises(ValueError, match="sample rate should be equal or greater than 1"):
        model._set_ddp_runtime_logging_sample_rate(0)


def test_parameters_of_mixed_precision_can_be_told_by_their_attributes() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["1.weight"])
    module[1].weight.data = module[1].weight.data.bfloat16()  # it is left alone
    model = wrapped(module, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    for given in (model, pickle.loads(pickle.dumps(model))):
        given(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(given.parameters(), 0.5).step()
        parameters: dict[str, Any] = dict(given.module.named_parameters())
        ignored = parameters.pop("1.weight")
        assert not hasattr(ignored, "_mp_param") and not hasattr(ignored, "_fp_param")
        for parameter in parameters.values():
            assert parameter._mp_param.dtype is torch.bfloat16 and parameter._mp_param.shape == parameter.shape
            assert parameter._fp_param.data_ptr() == parameter.data_ptr() and parameter.dtype is torch.float32
    assert not hasattr(wrapped().module.weight, "_mp_param")


@pytest.mark.parametrize("find_unused", [False, True])
def test_logging_data_tells_whether_the_graph_could_be_static(find_unused: bool) -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

        def forward(self, inputs: torch.Tensor, used: slice) -> torch.Tensor:
            for part in self.parts[used]:
                inputs = part(inputs)
            return inputs

    model = wrapped(Either(), find_unused_parameters=find_unused)
    for used in [slice(0, 1 if find_unused else 2)] * 3:
        model(torch.ones(1, 2), used).sum().backward()
    assert model._get_ddp_logging_data()["can_set_static_graph"]
    assert model._get_ddp_logging_data()["unused_parameter_size"] == (24 if find_unused else 0)
    if find_unused:
        model(torch.ones(1, 2), slice(1, 2)).sum().backward()
        assert not model._get_ddp_logging_data()["can_set_static_graph"]


def test_parameters_that_are_averaged_have_names_by_their_places() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Embedding(2, 2, sparse=True), nn.Linear(2, 2))
    module[0].bias.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["2.weight"])
    model = wrapped(module)
    parameters, sparse = model._build_params_for_reducer()
    assert model._build_debug_param_to_name_mapping(parameters) == {0: "0.weight", 1: "1.weight", 2: "2.bias"}
    assert sparse == [False, True, False]
    with pytest.raises(ValueError, match=r"Param with name 2\.bias found in module parameters"):
        model._build_debug_param_to_name_mapping(parameters[:2])
    with pytest.raises(ValueError, match="Expected param to name mapping to cover all parameters: 4 are in this list"):
        model._build_debug_param_to_name_mapping([*parameters, nn.Parameter(torch.ones(1))])


def test_bucket_caps_in_bytes() -> None:
    listed = wrapped(bucket_cap_mb_list=[1, 2])
    assert (listed.bucket_bytes_cap_list, listed.bucket_bytes_cap) == ([1 << 20, 2 << 20], 2 << 20)
    plain = wrapped(bucket_cap_mb=3)
    assert (plain.bucket_bytes_cap_list, plain.bucket_bytes_cap) == ([], 3 << 20)


def test_outputs_are_not_copied() -> None:
    class Refuses(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func._overloadpacket != torch.ops.aten.clone
            return func(*args, **(kwargs or {}))

    model = wrapped(find_unused_parameters=True)
    model._set_ddp_sink_clone(False)
    with Refuses():  # type: ignore[no-untyped-call]
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize(("old", "new", "syncs"), [(True, None, True), (False, None, False), (False, True, True)])
def test_the_old_argument_for_buffers_warns(old: bool, new: bool | None, syncs: bool) -> None:
    with pytest.warns(FutureWarning, match="broadcast_buffers"):
        assert wrapped(broadcast_buffers=old, forward_sync_buffers=new).broadcast_buffers is syncs


class Branches(nn.Module):
    """Two layers in a row, and one beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.beside = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(given)))) + self.beside(given)  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_the_compiler_sees_the_module_inside_and_nothing_else(options: dict[str, bool]) -> None:
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _examples: object) -> Callable[..., Any]:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    torch.manual_seed(0)
    alone = Branches()
    model = wrapped(copy.deepcopy(alone), **options)
    compiled: Any = torch.compile(model, backend=backend)
    try:
        for step in range(4):
            given = torch.full((2, 3), 1.0 + step)
            compiled(given).sum().backward()
            alone(given).sum().backward()
    finally:
        torch.compiler.reset()
    assert len(graphs) == 1 and sum("linear" in target for target in graphs[0]) == 3, graphs
    for got, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert got.grad is not None and wanted.grad is not None
        torch.testing.assert_close(got.grad, wanted.grad)
