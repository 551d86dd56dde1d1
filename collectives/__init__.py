"""Collectives, point-to-point messages and the store, with the names of torch.distributed.

It is installed as `rpcdist.collectives`. Importing it is cheap: torch and gRPC are loaded at the first use. A type
checker reads the imports below; at run time, `_MODULES` maps names to modules.
"""

# ruff: noqa: F403  # the modules imported with * define __all__

if __name__ != "rpcdist.collectives":
    raise ImportError(
        "this folder is installed as rpcdist.collectives; write `import rpcdist.collectives`, and remove the "
        "repository's root from sys.path (run your script from another folder, or install the project with pip)"
    )

from importlib import import_module
from typing import TYPE_CHECKING

# Imported here, as a later import of the module with this name would replace the function by the module.
from rpcdist.collectives.rendezvous import register_rendezvous_handler as register_rendezvous_handler
from rpcdist.collectives.rendezvous import rendezvous as rendezvous

# Module to names: imported on first use.
_MODULES = {
    "..errors": "DistBackendError DistError DistNetworkError DistStoreError QueueEmptyError StoreTimeout",
    "._group.backend_contract": "BackendBase GroupContext",
    "._group.operation_hooks": "HookOpName PostHookArgs PreHookArgs",
    "._api.operations": (
        "all_gather all_gather_into_tensor all_gather_single all_reduce all_to_all all_to_all_single "
        "barrier broadcast gather gather_into_tensor gather_single monitored_barrier reduce reduce_scatter "
        "reduce_scatter_single reduce_scatter_tensor scatter"
    ),
    "._api.group_queries": (
        "GroupMember _set_pg_timeout get_backend get_backend_config get_backend_impl get_global_rank get_group_rank "
        "get_pg_count get_process_group_ranks get_rank get_world_size group is_initialized set_timeout"
    ),
    "._api.growing_groups": "grow_group",
    "._api.default_group": "close_stores destroy_process_group get_node_local_rank init_process_group",
    "._api.new_groups": "new_group new_subgroups new_subgroups_by_enumeration",
    "._api.objects": (
        "all_gather_object broadcast_object_list gather_object recv_object_list scatter_object_list send_object_list"
    ),
    "._operations.operation": "ReduceOp",
    "._api.torch_names": (
        "GroupName ProcessGroupGloo ProcessGroupNCCL ProcessGroupNCCL2 ProcessGroupNCCLLazy _all_gather_base "
        "_coalescing_manager _reduce_scatter_base breakpoint "
        "_abort_process_group _broadcast_coalesced _get_all_pg_configs _get_default_group _get_default_store "
        "_get_global_rank _get_group_size _get_object_coll_device _get_pg_config _get_pg_default_device "
        "_get_process_group_name _new_process_group_helper _pg_group_ranks _pg_map _pg_names _rank_not_in_group "
        "_register_process_group _resolve_process_group _unregister_process_group _world"
    ),
    "._api.point_to_point": "P2POp all_gather_coalesced all_reduce_coalesced batch_isend_irecv irecv isend recv send",
    "._operations.reduce_kernels": "_make_nccl_premul_sum reduce_op supports_complex",
    "._api.split_groups": "shrink_group split_group",
    "._stores.store_base": "Store",
    "._stores.file_store": "FileStore",
    "._stores.shared_table": "HashStore",
    "._stores.derived_stores": "PrefixStore TorchStoreAdapter",
    "._stores.tcp_store": "TCPStore",
    ".backends": (
        "Backend BackendConfig get_default_backend_for_device is_available is_backend_available "
        "is_gloo_available is_mpi_available is_nccl_available is_torchelastic_launched is_ucc_available "
        "is_xccl_available"
    ),
    ".constants": "default_pg_nccl_timeout default_pg_timeout",
    ".device_mesh": "DeviceMesh init_device_mesh",
    ".flight_recorder": "record_comm",
    ".options": (
        "AllToAllOptions AllgatherOptions AllreduceCoalescedOptions AllreduceOptions BarrierOptions "
        "BroadcastOptions DebugLevel GatherOptions ReduceOptions ReduceScatterOptions ScatterOptions "
        "get_debug_level set_debug_level set_debug_level_from_env"
    ),
    ".process_group": "ProcessGroup",
    ".work": "Work _Work",
    # From the layer above: scripts for torch use these types in annotations of communication hooks.
    "..parallel.comm_hooks": "BuiltinCommHookType GradBucket",
    "..parallel._ddp._reducer": "Reducer",
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names.split()}
_MODULES_AS_NAMES = frozenset({"collective_utils", "flight_recorder", "functional"})
_RENAMED = {
    "BackendBase": "GroupBackend",
    "_Work": "Work",
    "_make_nccl_premul_sum": "make_premul_sum",
    "_set_pg_timeout": "set_timeout",
}


def __getattr__(name: str) -> object:
    if name in _MODULES_AS_NAMES:
        return import_module(f".{name}", __name__)
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LAZY[name], __name__), _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["register_rendezvous_handler", "rendezvous", *_LAZY])


if TYPE_CHECKING:
    from rpcdist.collectives._api.default_group import *
    from rpcdist.collectives._api.group_queries import *
    from rpcdist.collectives._api.growing_groups import *
    from rpcdist.collectives._api.new_groups import *
    from rpcdist.collectives._api.objects import *
    from rpcdist.collectives._api.operations import *
    from rpcdist.collectives._api.point_to_point import *
    from rpcdist.collectives._api.split_groups import *
    from rpcdist.collectives._api.torch_names import *
    from rpcdist.collectives._group.backend_contract import GroupBackend
    from rpcdist.collectives._group.backend_contract import GroupContext as GroupContext
    from rpcdist.collectives._group.operation_hooks import HookOpName as HookOpName
    from rpcdist.collectives._group.operation_hooks import PostHookArgs as PostHookArgs
    from rpcdist.collectives._group.operation_hooks import PreHookArgs as PreHookArgs
    from rpcdist.collectives._operations.operation import ReduceOp as ReduceOp
    from rpcdist.collectives._operations.reduce_kernels import make_premul_sum
    from rpcdist.collectives._operations.reduce_kernels import reduce_op as reduce_op
    from rpcdist.collectives._operations.reduce_kernels import supports_complex as supports_complex
    from rpcdist.collectives._stores.derived_stores import *
    from rpcdist.collectives._stores.file_store import *
    from rpcdist.collectives._stores.shared_table import *
    from rpcdist.collectives._stores.store_base import Store as Store
    from rpcdist.collectives._stores.tcp_store import *
    from rpcdist.collectives.backends import *
    from rpcdist.collectives.constants import *
    from rpcdist.collectives.device_mesh import *
    from rpcdist.collectives.flight_recorder import record_comm as record_comm
    from rpcdist.collectives.options import *
    from rpcdist.collectives.process_group import ProcessGroup as ProcessGroup
    from rpcdist.collectives.work import *
    from rpcdist.errors import DistBackendError as DistBackendError
    from rpcdist.errors import DistError as DistError
    from rpcdist.errors import DistNetworkError as DistNetworkError
    from rpcdist.errors import DistStoreError as DistStoreError
    from rpcdist.errors import QueueEmptyError as QueueEmptyError
    from rpcdist.errors import StoreTimeout as StoreTimeout

    BackendBase = GroupBackend
    _make_nccl_premul_sum = make_premul_sum
else:
    __all__ = __dir__()
