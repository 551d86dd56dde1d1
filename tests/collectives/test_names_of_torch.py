"""The names and signatures of torch, module by module: what is missing or differs here is listed, with the reason.

They are compared with the torch that is installed. Names that came after the oldest torch that the package takes are
listed with the version, so that the lists fit each of them.
"""

from __future__ import annotations

import importlib
import inspect
import pdb
import types
import warnings
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as torch_distributed
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel
from torch.utils.data import DistributedSampler as TorchSampler

from rpcdist import collectives, rpc
from rpcdist.collectives.torch_backend import TorchProcessGroup
from rpcdist.data import DistributedSampler
from rpcdist.errors import ConfigError
from rpcdist.parallel import DistributedDataParallel, SyncBatchNorm, ZeroRedundancyOptimizer

TORCH = "torch.distributed"

MISSING = {
    f"{TORCH} rpcdist.collectives": {
        "Logger": "the logger inside torch's DDP; ours has _get_ddp_logging_data",
        "RankType": "a type alias of torch's, of a number or a symbol of its compiler",
        "log": "torch's own logger",
        "timedelta": "of the standard library, imported there by accident",
    },
    f"{TORCH}.collective_utils rpcdist.collectives.collective_utils": {
        "all_gather_object_enforce_type": "what torch's all_gather checks types with; ours does it inside",
        "SyncPayload": "what torch's functions send inside",
    },
    f"{TORCH}.algorithms.join rpcdist.parallel.algorithms": {},
    f"{TORCH}.algorithms.ddp_comm_hooks rpcdist.parallel.comm_hooks": {},
    f"{TORCH}.algorithms.ddp_comm_hooks.default_hooks rpcdist.parallel.comm_hooks": {},
    f"{TORCH}.algorithms.ddp_comm_hooks.powerSGD_hook rpcdist.parallel.comm_hooks": {
        "batched_powerSGD_hook": "fails with torch 2.13, too",
    },
    f"{TORCH}.algorithms.ddp_comm_hooks.quantization_hooks rpcdist.parallel.comm_hooks": {},
    f"{TORCH}.algorithms.model_averaging.averagers rpcdist.parallel.model_averaging": {},
    f"{TORCH}.autograd rpcdist.autograd": {},
    f"{TORCH}.device_mesh rpcdist.collectives.device_mesh": {},
    f"{TORCH}.nn.functional rpcdist.nn.functional": {},
    f"{TORCH}.rpc rpcdist.rpc": {},
    f"{TORCH}.rpc.api rpcdist.rpc.api": {},
    f"{TORCH}.rpc.backend_registry rpcdist.rpc.backend_registry": {},
    f"{TORCH}.rpc.functions rpcdist.rpc.functions": {},
    f"{TORCH}.rpc.options rpcdist.rpc.options": {},
}

DIFFERENT_SIGNATURES = {
    f"{TORCH} rpcdist.collectives": {
        "rendezvous": "the keyword arguments have another name, which no caller sees",
    },
    f"{TORCH}.rpc.backend_registry rpcdist.rpc.backend_registry": {
        "init_backend": "the arguments of all backends are written out"
    },
}


def quietly_imported(name: str) -> Any:
    """A module of torch's, without what it says about itself being deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def public_names(module: types.ModuleType) -> list[str]:
    """The names that a module defines or lends: its `__all__`, or, in `torch.distributed`, all its attributes."""
    listed = getattr(module, "__all__", None)
    names = listed if listed is not None else [name for name in dir(module) if not name.startswith("_")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated names
        there = [name for name in names if hasattr(module, name)]  # `__all__` of torch's rpc has one too many
        found = [name for name in there if not isinstance(getattr(module, name), types.ModuleType)]
        own = module.__name__ == TORCH or listed is not None
        return [name for name in found if own or getattr(getattr(module, name), "__module__", "") == module.__name__]


def parameter_names(function: Any) -> list[str] | None:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of C++
        return None


@pytest.mark.parametrize("pair", sorted(MISSING))
def test_every_name_of_torch_is_here_or_listed(pair: str) -> None:
    theirs, ours = map(quietly_imported, pair.split())
    missing = {name for name in public_names(theirs) if not name.startswith("_") and not hasattr(ours, name)}
    assert missing == of_this_torch(pair, MISSING[pair])


@pytest.mark.parametrize("pair", sorted(MISSING))
def test_functions_take_the_arguments_of_torch(pair: str) -> None:
    theirs, ours = map(quietly_imported, pair.split())
    different = set()
    for name in public_names(theirs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function = getattr(theirs, name)
            if not inspect.isfunction(function) or not hasattr(ours, name):
                continue
        wanted, got = parameter_names(function), parameter_names(getattr(ours, name))
        if wanted is not None and got is not None and got[: len(wanted)] != wanted:
            different.add(name)
    assert different == set(DIFFERENT_SIGNATURES.get(pair, {}))


INSTALLED = tuple(map(int, torch.__version__.split(".")[:2]))

SINCE: dict[str, dict[str, tuple[int, int]]] = {
    f"{TORCH} rpcdist.collectives": {
        **dict.fromkeys(("all_gather_single", "reduce_scatter_single"), (2, 13)),
        **dict.fromkeys(("gather_into_tensor", "gather_single", "get_backend_impl", "set_timeout"), (2, 14)),
    },
    "ProcessGroup": dict.fromkeys(
        (
            *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "reduce_scatter_single"),
            *("reduce_scatter_single_coalesced", "use_pg_for_symm_mem_rendezvous"),
        ),
        (2, 13),
    )
    | dict.fromkeys(
        (
            *("gather_into_tensor", "gather_single", "get_backend", "get_reconfigure_handle", "new_window"),
            *("reconfigure", "register_abort_hook", "register_post_hook", "register_pre_hook", "supports_reconfigure"),
            *("supports_window", "unregister_abort_hook", "unregister_post_hook", "unregister_pre_hook"),
        ),
        (2, 14),
    )
    | dict.fromkeys(("supports_abort_hooks", "supports_completion_hooks"), (2, 15)),
    "Work": {"timeout": (2, 14)},
}
"""By the key of the lists, the version that brought a name."""


def of_this_torch(key: str, names: Iterable[str]) -> set[str]:
    """Those of the listed names that the installed torch should have."""
    since = SINCE.get(key, {})
    return {name for name in names if since.get(name, INSTALLED) <= INSTALLED}


CLASSES: dict[str, tuple[type, type, dict[str, str]]] = {
    "ProcessGroup": (
        torch_distributed.ProcessGroup,
        collectives.ProcessGroup,
        {
            **dict.fromkeys(("CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL"), "numbers"),
            **dict.fromkeys(("boxed", "unbox"), "torch's wrapping for its compiler"),
            "merge_remote_group": "torch's groups that grow; see grow_group",
            "use_pg_for_symm_mem_rendezvous": "symmetric memory of GPUs",
        },
    ),
    "Store": (torch_distributed.Store, collectives.Store, {}),
    "Work": (
        torch_distributed.Work,
        collectives.Work,
        dict.fromkeys(("boxed", "unbox"), "torch's wrapping for its compiler"),
    ),
    "DistributedDataParallel": (
        TorchDataParallel,
        DistributedDataParallel,
        {},
    ),
    "DistributedSampler": (TorchSampler, DistributedSampler, {}),
    "SyncBatchNorm": (torch.nn.SyncBatchNorm, SyncBatchNorm, {}),
    "ZeroRedundancyOptimizer": (
        quietly_imported("torch.distributed.optim").ZeroRedundancyOptimizer,
        ZeroRedundancyOptimizer,
        {},
    ),
}

ON_INSTANCES = {"bound_device_id", "host", "path", "prefix", "underlying_store"}
"""Attributes that the constructor sets."""


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_method_of_torch_is_here_or_listed(name: str) -> None:
    theirs, ours, listed = CLASSES[name]
    missing = {each for each in vars(theirs) if not each.startswith("_") and not hasattr(ours, each)} - ON_INSTANCES
    assert missing == of_this_torch(name, listed)


@pytest.mark.parametrize("key", sorted(SINCE))
def test_versions_of_names(key: str) -> None:
    theirs, ours = CLASSES[key][:2] if key in CLASSES else map(quietly_imported, key.split())
    listed = CLASSES[key][2] if key in CLASSES else MISSING[key]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated names
        assert {name for name in SINCE[key] if hasattr(theirs, name)} == of_this_torch(key, SINCE[key])
        assert {name for name in SINCE[key] if not hasattr(ours, name)} <= set(listed)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_methods_take_the_arguments_of_torch(name: str) -> None:
    theirs, ours, _ = CLASSES[name]
    for each, function in vars(theirs).items():
        if inspect.isfunction(function) and hasattr(ours, each) and (each == "__init__" or not each.startswith("_")):
            wanted, got = parameter_names(function), parameter_names(getattr(ours, each))
            assert wanted is not None and got is not None
            lacking = [parameter for parameter in wanted if parameter not in got]
            assert not lacking or any(text in got for text in ("kwargs", "_", "options")), (each, lacking)


def test_old_names_of_functions(world_of_one: None) -> None:
    one, all_ranks = torch.ones(2), torch.zeros(2)
    with pytest.warns(FutureWarning, match="all_gather_into_tensor"):
        collectives._all_gather_base(all_ranks, one)
    with pytest.warns(FutureWarning, match="reduce_scatter_tensor"):
        collectives._reduce_scatter_base(one, all_ranks * 3)
    with collectives._coalescing_manager(async_ops=True) as manager:
        manager.append(collectives.all_reduce(one, async_op=True))
        collectives.all_reduce(all_ranks)
    manager.wait()
    assert one.tolist() == [3.0, 3.0] and all_ranks.tolist() == [1.0, 1.0]


def test_members_of_enumerations_print_as_those_of_torch() -> None:
    for name in ("SUM", "AVG", "PREMUL_SUM"):
        own, theirs = getattr(collectives.ReduceOp, name), getattr(torch.distributed.ReduceOp, name)
        assert (str(own), repr(own), f"{own}") == (str(theirs), repr(theirs), f"{theirs}")
        assert collectives.ReduceOp(own).op is own
    assert str(collectives.DebugLevel.INFO) == str(torch.distributed.DebugLevel.INFO)
    for name in ("ALLREDUCE", "FP16_COMPRESS"):
        own, theirs = (getattr(module.BuiltinCommHookType, name) for module in (collectives, torch.distributed))
        assert (int(own), own.value, own.name) == (int(theirs), theirs.value, theirs.name)


def test_the_configuration_of_a_group(world_of_one: None) -> None:
    own = collectives.new_group([0], group_desc="of the test")
    assert isinstance(own, collectives.ProcessGroup)
    config = collectives._get_pg_config(own)
    assert config["ranks"] == [0] and config["pg_size"] == 1 and config["pg_desc"] == "of the test"
    assert config["pg_name"] == own.group_name and "tcp" in str(config["backend_config"])
    assert collectives._get_pg_config()["pg_name"] != own.group_name


def test_a_group_by_the_name_of_torchs_class(world_of_one: None) -> None:
    make: Any = collectives.ProcessGroupGloo  # type checkers do not see what its metaclass takes
    group = make(collectives.HashStore(), 0, 1)
    one = torch.ones(2)
    group.allreduce([one]).wait()
    group.shutdown()
    assert one.tolist() == [1.0, 1.0]
    assert isinstance(group, collectives.ProcessGroupGloo) and not isinstance(3, collectives.ProcessGroupGloo)
    assert isinstance(collectives.group.WORLD, collectives.ProcessGroupGloo)


def test_a_group_without_a_world_is_made_by_hand() -> None:
    """As vLLM makes the groups that it shares with others; the processes have no default group."""
    store, kind = collectives.PrefixStore("engine", collectives.HashStore()), collectives.ProcessGroup.BackendType.GLOO
    make: Any = collectives.ProcessGroupGloo
    group, backend = collectives.ProcessGroup(store, 0, 1), make(store, 0, 1)
    with pytest.raises(ConfigError, match="No backend type associated with device type cpu"):
        collectives.all_reduce(torch.ones(1), group=group)
    others: tuple[Any, ...] = (None, backend, object())
    for other in others:
        with pytest.raises(ConfigError, match="must be a group of as many ranks"):
            collectives.ProcessGroup(store, 1, 2)._register_backend(torch.device("cpu"), kind, other)
    group._set_default_backend(kind)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), kind, backend)
    del backend
    assert not collectives.is_initialized() and collectives.get_world_size(group) == 1 and group.name() == "gloo"
    objects: list[Any] = [None]
    collectives.all_gather_object(objects, "one", group=group)
    collectives.broadcast(torch.ones(2), group_src=0, group=group)
    collectives.barrier(group=group)
    assert objects == ["one"] and group.backend_config == "cpu:gloo"
    with pytest.raises(ConfigError, match="made by its class"):
        group.split_group([0])
    group._set_group_name("engine")
    collectives._register_process_group("engine", group)
    assert group.group_name == "engine" and collectives._resolve_process_group("engine") is group
    with pytest.raises(ConfigError, match="keeps its name"):
        group._set_group_name("another")
    group.shutdown()
    collectives._unregister_process_group("engine")
    with pytest.raises(ConfigError, match="Could not resolve"):
        collectives._resolve_process_group("engine")


def test_a_group_is_found_by_further_names(world_of_one: None) -> None:
    world, own = collectives._get_default_group(), collectives.new_group([0])
    collectives._register_process_group("trainers", world)
    collectives._register_process_group("trainers", world)
    assert collectives._resolve_process_group("trainers") is world and list(collectives._pg_map) == [world, own]
    for taken in ("trainers", world.group_name):
        with pytest.raises(ConfigError, match="choose another name"):
            collectives._register_process_group(taken, own)
    collectives.destroy_process_group()
    collectives.init_process_group("tcp", store=collectives.HashStore(), rank=0, world_size=1)
    with pytest.raises(ConfigError, match="Could not resolve"):
        collectives._resolve_process_group("trainers")


class OneRank(collectives.ProcessGroup):
    """A group of a program, as torch's tests and torchft have some."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)

    def allreduce(self, tensors: Any, *_: object, **__: object) -> DoneWork:
        return DoneWork(tensors)


class DoneWork(collectives.Work):
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def wait(self, timeout: object = None) -> bool:
        return len(self.tensors) == 1


def test_classes_of_programs_derive_from_groups_and_works(world_of_one: None) -> None:
    group = OneRank(1, 3)
    assert (group.rank(), group.size(), collectives.get_rank(group)) == (1, 3, 1)
    assert group.allreduce([torch.ones(1)]).wait() and "of a program" in repr(group.allreduce([]))
    with pytest.raises(ConfigError, match="OneRank is a class of the program: call its methods, such as allreduce"):
        collectives.all_reduce(torch.ones(1), group=group)
    with pytest.raises(ConfigError, match="without a store"):
        group.get_group_store()


def test_a_registered_function_returns_a_backend(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives.Backend, "_plugins", {"GLOO": (lambda *_: OneRank(0, 1), False)})
    with pytest.raises(
        ConfigError, match=r"returned <ProcessGroup .*; return an object of rpcdist.collectives.Backend"
    ):
        collectives.new_group([0], backend="gloo")


def test_options_of_torchs_gloo(world_of_one: None) -> None:
    torchs: Any = collectives.ProcessGroupGloo
    options = torchs._Options()
    assert (options._timeout, options._threads) == (torch_distributed.default_pg_timeout, 2)
    options._timeout, options._devices = timedelta(seconds=7), [torchs.create_device(interface="lo")]
    group = torchs(collectives.HashStore(), 0, 1, options)
    assert group.options._timeout == group.timeout == timedelta(seconds=7)
    group._set_group_desc("of the test")
    assert group.group_desc == "of the test"
    group.shutdown()
    own = collectives.new_group([0], pg_options=options, timeout=timedelta(seconds=9))
    assert isinstance(own, collectives.ProcessGroup) and own.options is options and own.timeout_s == 9
    world = collectives._get_default_group()._get_backend(torch.device("cpu"))
    world.set_timeout(timedelta(seconds=3))
    assert getattr(world.options, "_timeout") == timedelta(seconds=3)  # noqa: B009  (only programs know the type)


def test_what_torchs_rpc_exports_without_meaning_to() -> None:
    assert rpc.AllGatherStates().gathered_objects == {} and not rpc.AllGatherStates().proceed_signal.is_set()
    assert rpc.method_factory("upper", "Upper case.")("a") == "A"  # of any object
    assert rpc.new_method.__doc__ == rpc.RRef.to_here.__doc__


def test_keywords_of_the_methods_of_groups(world_of_one: None) -> None:
    group, one = collectives.group.WORLD, torch.ones(2)
    assert isinstance(group, collectives.ProcessGroup)
    group.allreduce([one], op=collectives.ReduceOp.MAX).wait()
    group.broadcast(one, root=0).wait()
    group.reduce(one, root=0, op=collectives.ReduceOp.SUM).wait()
    group.reduce_scatter(one, [one + 1], op=collectives.ReduceOp.MIN).wait()
    group.gather([[torch.zeros(2)]], [one], root=0).wait()
    group.scatter(one, [one + 1], root=0).wait()
    assert one.tolist() == [3.0, 3.0]
    with pytest.raises(TypeError, match="pass one of them"):
        group.broadcast(one, 0, root=0)
    for method, keyword in (("send", "dstRank"), ("recv", "srcRank")):
        with pytest.raises(ConfigError, match="should not be the same"):
            getattr(group, method)([one], **{keyword: 0})


def test_the_debugger_stops_in_the_callers_frame(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[str] = []
    monkeypatch.setattr(pdb.Pdb, "set_trace", lambda self, frame: stops.append(frame.f_code.co_name))
    for _ in range(3):
        collectives.breakpoint(skip=2, timeout_s=50)
    assert stops == ["test_the_debugger_stops_in_the_callers_frame"]
    group = collectives.group.WORLD
    assert isinstance(group, collectives.ProcessGroup) and group.timeout_s == 50
    collectives.breakpoint(rank=1, timeout_s=None)
    assert len(stops) == 1


def test_arguments_are_cut_and_moved_as_by_torch(world_of_one: None) -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    [[moved]], [named] = model.to_kwargs((torch.ones(2),), {"scale": 2}, 0)
    assert moved.tolist() == [1.0, 1.0] and named == {"scale": 2}


def test_the_type_of_reduce_operations_has_torchs_name() -> None:
    assert collectives.ReduceOp.RedOpType is collectives.ReduceOp  # type: ignore[attr-defined]  # see there
    assert issubclass(TorchProcessGroup, torch_distributed.ProcessGroup)
