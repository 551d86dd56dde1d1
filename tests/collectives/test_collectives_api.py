"""The public names of torch.distributed exist here, with the same parameters and defaults."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as theirs

import rpcdist.collectives as ours
from rpcdist.collectives import ReduceOp
from rpcdist.errors import ConfigError

FUNCTIONS = """
    all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single all_reduce
    all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv broadcast broadcast_object_list
    destroy_process_group gather gather_object get_backend get_backend_config get_default_backend_for_device
    get_global_rank get_group_rank get_node_local_rank get_pg_count get_process_group_ranks get_rank get_world_size
    init_process_group irecv is_available is_backend_available is_gloo_available is_initialized is_mpi_available
    is_nccl_available is_torchelastic_launched is_ucc_available is_xccl_available isend monitored_barrier new_group
    new_subgroups new_subgroups_by_enumeration record_comm recv recv_object_list reduce reduce_scatter
    reduce_scatter_single reduce_scatter_tensor register_rendezvous_handler rendezvous scatter scatter_object_list send
    send_object_list shrink_group split_group supports_complex
""".split()
FUNCTIONS += "gather_into_tensor gather_single get_backend_impl set_timeout".split()
FUNCTIONS = [name for name in FUNCTIONS if hasattr(theirs, name)]  # test_names_of_torch.py has the versions

OTHERS = """
    AllreduceOptions AllreduceCoalescedOptions AllToAllOptions BarrierOptions BroadcastOptions GatherOptions
    ReduceOptions ReduceScatterOptions ScatterOptions Backend BackendConfig DebugLevel GroupMember P2POp ProcessGroup
    ReduceOp Store TCPStore FileStore HashStore PrefixStore Work DistError DistBackendError DistNetworkError
    DistStoreError QueueEmptyError default_pg_timeout get_debug_level set_debug_level set_debug_level_from_env group
    reduce_op
""".split()

# Left out: what belongs to torch's compiler, its C++ logging, other backends and other modules of this package.
ABSENT = {
    "Logger": "of DistributedDataParallel",
    "RankType": "a type for torch's compiler",
    "timedelta": "imported there",
}

# `barrier` takes GroupMember.WORLD for the default group, as it is when torch is imported: None.
DEFAULTS_BY_NAME = {"op"}  # ReduceOp.SUM of each
RENAMED_PARAMETERS = {("rendezvous", "kwargs"): "options"}
LATER_PARAMETERS = {
    ("barrier", "timeout"): (2, 12),
    ("new_group", "sort_ranks"): (2, 12),
    ("split_group", "backend"): (2, 13),
    ("init_process_group", "enable_reconfigure"): (2, 14),
    **{(name, "weights_only"): (2, 14) for name in FUNCTIONS if "object" in name},
}
"""The torch that brought them; here they are with every torch."""
INSTALLED = tuple(map(int, torch.__version__.split(".")[:2]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_parameters_of_torch(name: str) -> None:
    every = inspect.signature(getattr(ours, name)).parameters
    mine = {each: own for each, own in every.items() if LATER_PARAMETERS.get((name, each), INSTALLED) <= INSTALLED}
    other = inspect.signature(getattr(theirs, name)).parameters
    assert list(mine) == [RENAMED_PARAMETERS.get((name, each), each) for each in other]
    for own, given in zip(mine.values(), other.values(), strict=True):
        assert own.kind is given.kind, own.name
        if own.name in DEFAULTS_BY_NAME:
            assert isinstance(own.default, ReduceOp) and own.default.name == given.default.name
        else:
            assert own.default == given.default, own.name


NAMES: list[str] = vars(ours)["__all__"]  # type checkers read the imports instead


def test_every_public_name_of_torch_is_here_or_explained() -> None:
    public = {
        name
        for name in dir(theirs)
        if not name.startswith("_") and type(getattr(theirs, name)) is not ModuleType and name not in ("log", "config")
    }
    assert public - set(NAMES) - {"TYPE_CHECKING", "Any"} == set(ABSENT) & public
    assert set(FUNCTIONS) | set(OTHERS) <= set(NAMES)
    for name in NAMES:
        assert getattr(ours, name) is not None or name == "group"


def test_type_checkers_see_the_names_that_exist() -> None:
    """A module that the package imports whole, for them, has no public name beside those that are imported lazily."""
    whole = re.findall(r"from (rpcdist\.\S+) import \*", Path(ours.__file__).read_text())
    assert len(whole) > 10
    assert {name for module in whole for name in import_module(module).__all__} <= set(NAMES)


@pytest.mark.parametrize(
    "name", [each for each in OTHERS if each.endswith("Options") and each != "AllreduceCoalescedOptions"]
)
def test_options_have_the_fields_of_torch(name: str) -> None:
    mine, other = getattr(ours, name)(), getattr(theirs, name)()
    fields = {each for each in dir(other) if not each.startswith("_")} - {"sparseIndices"}
    assert set(vars(mine)) == fields
    for each in fields - {"reduceOp"}:
        assert getattr(mine, each) == getattr(other, each), each


@pytest.mark.parametrize("name", [each for each in NAMES if each.endswith("Options")])
def test_options_have_a_class_of_their_own(name: str) -> None:
    """As in torch: errors and `repr` have the name that the program wrote, and `isinstance` tells them apart."""
    others = [getattr(ours, each) for each in NAMES if each.endswith("Options") and each != name]
    options = getattr(ours, name)()
    assert repr(options).startswith(f"{name}(")
    assert not isinstance(options, tuple(others)) and options not in [other() for other in others]


def test_process_group_has_the_methods_of_torch() -> None:
    wanted = """
        rank size name group_name group_desc abort shutdown set_timeout split_group get_group_store bound_device_id
        allreduce allreduce_coalesced reduce broadcast allgather all_gather_single _allgather_base gather scatter
        reduce_scatter reduce_scatter_single _reduce_scatter_base alltoall alltoall_base all_to_all_single send recv
        recv_anysource barrier monitored_barrier
    """.split()
    group = ours.ProcessGroup(ours.HashStore(), 0, (0,), name="0")
    for name in wanted:
        assert INSTALLED < (2, 13) or hasattr(theirs.ProcessGroup, name), name
        assert hasattr(group, name), name


def test_reduce_operations_are_those_of_torch() -> None:
    members = theirs.ReduceOp.RedOpType.__members__
    assert [(op.name, op.value) for op in ReduceOp] == [(name, op.value) for name, op in members.items()]
    for op in ReduceOp:
        assert ours.supports_complex(op) == theirs.supports_complex(getattr(theirs.ReduceOp, op.name))
        assert ours.supports_complex(getattr(theirs.ReduceOp, op.name)) == ours.supports_complex(op)


def test_deprecated_reduce_op_warns() -> None:
    with pytest.warns(FutureWarning, match="please use `ReduceOp`"):
        assert ours.reduce_op.SUM is ReduceOp.SUM
    with pytest.raises(AttributeError):
        ours.reduce_op.NOTHING  # noqa: B018


def test_backend_names() -> None:
    assert ours.Backend("GLOO") == ours.Backend.GLOO == "gloo"
    assert ours.Backend("tcp") == ours.Backend.TCP
    with pytest.raises(ValueError):
        ours.Backend(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp", {"cpu": "tcp", "cuda": "tcp"}),
        ("gloo", {"cpu": "gloo", "cuda": "gloo"}),
        ("nccl", {"cuda": "nccl"}),
        ("cpu:tcp,cuda:nccl", {"cpu": "tcp", "cuda": "nccl"}),
        ("CPU:gloo", {"cpu": "gloo"}),
    ],
)
def test_backend_config(text: str, expected: dict[str, str]) -> None:
    config = ours.BackendConfig(ours.Backend(text))
    assert config.get_device_backend_map() == expected
    assert repr(config) == ",".join(f"{device}:{name}" for device, name in expected.items())


@pytest.mark.parametrize("text", ["cpu:", "cpu:tcp,cpu:gloo", "cpu:tcp:x", "nope", "cpu:nope"])
def test_wrong_backend_config(text: str) -> None:
    with pytest.raises(ConfigError):
        ours.BackendConfig(text)


def test_availability() -> None:
    assert ours.is_available() and ours.is_gloo_available() and ours.is_backend_available("tcp")
    assert ours.is_backend_available("cpu:tcp") and not ours.is_backend_available("nope")
    assert not ours.is_ucc_available() and not ours.is_xccl_available()
    for module in (ours, torch.distributed):
        assert module.get_default_backend_for_device("cpu") == "gloo"
    assert ours.get_default_backend_for_device(torch.device("cuda", 0)) == "nccl"
    with pytest.raises(ValueError):
        ours.get_default_backend_for_device("meta")


def test_registering_without_devices_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_plugins", "backend_capability", "default_device_backend_map"):
        monkeypatch.setattr(ours.Backend, name, dict(getattr(ours.Backend, name)))
    monkeypatch.setattr(ours.Backend, "backend_list", list(ours.Backend.backend_list))
    monkeypatch.setattr(ours.Backend, "STRANGE", "strange", raising=False)
    with pytest.warns(UserWarning, match="Device capability of strange unspecified"):
        ours.Backend.register_backend("strange", lambda *_: pytest.fail("not made here"))
    assert ours.is_backend_available("strange") and ours.Backend.backend_capability["strange"] == ["cpu", "cuda"]


def test_timeouts() -> None:
    assert ours.default_pg_timeout == theirs.default_pg_timeout == timedelta(minutes=30)
    assert ours.default_pg_nccl_timeout == timedelta(minutes=10)


@pytest.mark.parametrize(("text", "level"), [("", 0), ("off", 0), ("INFO", 1), ("DETAIL", 2)])
def test_debug_level(text: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ours.get_debug_level()
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", text)
    ours.set_debug_level_from_env()
    assert ours.get_debug_level() == ours.DebugLevel(level)
    ours.set_debug_level(before)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "LOUD")
    with pytest.raises(ConfigError, match="OFF, INFO or DETAIL"):
        ours.set_debug_level_from_env()


def test_import_is_lazy(tmp_path: Path) -> None:
    program = (
        "import sys, rpcdist.collectives; "
        "print({'torch', 'grpc', 'subprocess', 'rpcdist._launch.launching'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"
