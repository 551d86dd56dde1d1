"""The statements of docs/coming_from_torch.md about private names that programs use, for `names_under_compat.py`."""

import importlib
import re
import sys
import tempfile
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_rpc import PyRRef, _is_current_rpc_agent_set
from torch.distributed import rpc
from torch.nn.parallel.distributed import DistributedDataParallel, _BufferCommHookLocation

ROW = re.compile(r"^\| `(torch\.[\w.]+)` \|[^|]*\| (ours|torch's|refused)\b.*\|$", re.MULTILINE)


def check(true: bool, text: str) -> None:
    if not true:
        sys.exit(text)


def find(name: str) -> Any:
    """A name as a program finds it: modules as far as there are modules, and then attributes."""
    found: Any = torch
    done = "torch"
    for part in name.split(".")[1:]:
        done += f".{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(done)
    return found


def as_torch_finds(expression: str) -> Any:
    """The object that a module of torch finds under a name."""
    return eval(expression, {"torch": torch, "__name__": "torch.somewhere"})


def home_of(found: Any) -> str:
    """The module that a class or function, or the class of an object, comes from."""
    return str(getattr(found, "__module__", None) or type(found).__module__)


def refuses(function: Any, *args: Any) -> bool:
    try:
        function(*args)
    except RuntimeError as error:
        return type(error).__name__ == "ConfigError" and ("compat" in str(error) or "group_name" in str(error))
    return False


def check_names(page: str) -> None:
    """Each row of the table."""
    group, two = dist.group.WORLD, torch.ones(2)
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (two, "sum", group),
        "distribute_tensor": (two, dist.init_device_mesh("cpu", (1,))),
        "fully_shard": (torch.nn.Linear(1, 1),),
    }
    rows = ROW.findall(page)
    check(len(rows) == page.partition("## Private names")[2].partition("## The same")[0].count("| `torch."), "rows")
    for name, verdict in rows:
        found = find(name)
        if verdict == "refused":
            check(refuses(found, *arguments.get(name.rpartition(".")[2], ())), f"{name} is not refused")
        else:
            check(home_of(found).startswith("rpcdist.") == (verdict == "ours"), f"{name}: {found}, not {verdict}")


def check_groups() -> None:
    """The private functions say of our groups what torch's say of torch's."""
    c10d: Any = dist.distributed_c10d
    world = dist.group.WORLD
    assert world is not None
    check(c10d._get_default_group() is world is c10d._world.default_pg, "the default group")
    check(list(c10d._pg_map) == [world] and c10d._pg_names[world] == world.group_name, "tables of groups")
    check(c10d._world.pg_backend_config[world] == "cpu:gloo,cuda:gloo", "the table of backends")
    check(int(c10d.ReduceOp.PRODUCT) == 2, "the number of a reduction")
    check(torch._C._distributed_c10d._resolve_process_group(world.group_name) is world, "a group by its name")
    c10d._register_process_group("trainers", world)
    check(c10d._resolve_process_group("trainers") is world, "a group by a registered name")
    c10d._unregister_process_group("trainers")
    optim: Any = importlib.import_module("torch.distributed.optim")
    check(optim._FunctionalAdam([torch.ones(2)], lr=0.1).defaults["lr"] == 0.1, "an optimizer")
    other = dist.new_group([0])
    check(other in c10d._pg_map and c10d._pg_group_ranks[other] == {0: 0}, "a second group")
    configs = [config["pg_name"] for config in c10d._get_all_pg_configs()]
    check(configs == [world.group_name, other.group_name], "the description of all groups")
    c10d._set_pg_timeout(timedelta(seconds=7), other)
    backend = other._get_backend(torch.device("cpu"))
    check((backend.rank(), backend.size(), backend.name()) == (0, 1, "gloo"), "the backend of a group")
    backend._set_default_timeout(timedelta(seconds=7))
    timeouts: list[Any] = [getattr(group, "timeout") for group in (other, world)]  # noqa: B009  (torch's has none)
    check(timeouts[0] == timedelta(seconds=7) != timeouts[1], "the timeout of a group")
    c10d._abort_process_group(other)
    check(other not in c10d._pg_map and c10d._get_process_group_name(other) == "None", "a group that was destroyed")
    check(c10d._get_default_store() is not None and c10d._get_object_coll_device() == "cpu", "store and device")
    elastic: Any = importlib.import_module("torch.distributed.elastic.utils.data")
    check(len(elastic.ElasticDistributedSampler(range(3))) == 3, "torch's sampler that begins anywhere")
    store, rank, size = next(torch.distributed.rendezvous("tcp://127.0.0.1:0", rank=0, world_size=1))
    engines, _ = c10d._new_process_group_helper(size, rank, [], dist.Backend("gloo"), store, group_name="engines")
    c10d._world.pg_group_ranks[engines] = {0: 0}
    tensor = torch.ones(2)
    dist.broadcast(tensor, src=0, group=engines)
    dist.destroy_process_group(engines)
    dist._broadcast_coalesced(world, [tensor], 500, 0)
    dist.utils._sync_module_states(torch.nn.Linear(1, 1), world, 500, 0, ())
    dist.all_reduce(tensor, op=torch._C._distributed_c10d.ReduceOp.MAX, group=c10d._get_default_group())
    check(tensor.tolist() == [1, 1], "a reduction")
    check(refuses(torch.distributed.fsdp.FullyShardedDataParallel, torch.nn.Linear(1, 1), world), "FSDP")


def check_constants() -> None:
    """Constants of torch that are torch's own mean the same to our functions."""
    level = as_torch_finds("torch._C._distributed_c10d.DebugLevel.INFO")
    check(type(level) is not dist.DebugLevel, "torch's own is looked at")
    dist.set_debug_level(level)
    check(dist.get_debug_level() is dist.DebugLevel.INFO, "the debug level")
    for kind in (as_torch_finds("torch.distributed.BuiltinCommHookType.ALLREDUCE"), dist.BuiltinCommHookType.ALLREDUCE):
        DistributedDataParallel(torch.nn.Linear(1, 1))._register_builtin_comm_hook(kind)
    isend = as_torch_finds("torch.distributed.isend")
    check(dist.P2POp(isend, torch.ones(1), 0).op is dist.isend is not isend, "what a P2POp does")
    for location in _BufferCommHookLocation:
        called: list[object] = []
        model = DistributedDataParallel(torch.nn.BatchNorm1d(2))
        model._register_buffer_comm_hook(model, lambda state, buffers, to=called: to.append(buffers), location)
        model(torch.ones(3, 2)).sum().backward()
        check(len(called) == 1, f"a buffer hook at {location} was called {len(called)} times")
    try:
        DistributedDataParallel(torch.nn.BatchNorm1d(2))._register_buffer_comm_hook(None, print, "sometimes")
        sys.exit("a location that there is not was taken")
    except ValueError:
        pass


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self: Any, amount: int) -> int:
        if isinstance(self, torch._C._distributed_rpc.PyRRef):
            self = self.local_value()
        self.count += amount
        return int(self.count)


def check_rpc() -> None:
    """References are torch's class, and its module knows of our agent."""
    asks = rpc.api._require_initialized(lambda: "answer")
    check(not _is_current_rpc_agent_set(), "an agent before init_rpc")
    try:
        sys.exit(f"{asks()} before init_rpc")
    except RuntimeError as error:
        check("RPC has not been initialized" in str(error), str(error))
    with tempfile.TemporaryDirectory() as folder:
        check_agent(f"file://{folder}/rendezvous", asks)


def check_agent(url: str, asks: Any) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=url)
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    check(_is_current_rpc_agent_set() and asks() == "answer", "no agent after init_rpc")
    counter = rpc.remote("alone", Counter)
    check(isinstance(counter, PyRRef) and isinstance(counter, rpc.RRef), "a reference is no PyRRef")
    check(type(counter) is PyRRef, "the class of a reference is not PyRRef")
    check(rpc.rpc_sync(counter.owner(), Counter.add, args=(counter, 2)) == 2, "a method that asks what it got")
    check(
        rpc.api._to_worker_info("alone") == torch._C._distributed_rpc.WorkerInfo("alone", 0), "a worker's name and id"
    )
    del counter
    rpc.shutdown()
    check(not _is_current_rpc_agent_set(), "an agent after shutdown")


def check_checkpoint() -> None:
    """torch's checkpoints, which import `DTensor`, are written and read by our groups."""
    from torch.distributed import _state_dict_utils, checkpoint

    read = {"x": torch.zeros(3, dtype=torch.int64)}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save({"x": torch.arange(3)}, checkpoint_id=folder)
        checkpoint.load(read, checkpoint_id=folder)
        saving = checkpoint.async_save({"x": torch.arange(3)}, checkpoint_id=f"{folder}/later")
        check(isinstance(saving, Future) and saving.result() is not None, "a checkpoint saved in the background")
    check(read["x"].tolist() == [0, 1, 2], f"read {read}")
    _state_dict_utils._broadcast_tensors({"x": torch.arange(3)}, read, ["x"], torch.device("cpu"))
    check(read["x"].tolist() == [0, 1, 2], f"spread {read}")


def check_clients(page: str) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    check_names(page)
    check_groups()
    check_constants()
    check_checkpoint()
    dist.destroy_process_group()
    check_rpc()
