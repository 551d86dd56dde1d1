"""Collectives, point-to-point messages and the store, with the names of torch.distributed.

It is installed as `rpcdist.collectives`. Importing it is cheap: neither torch nor gRPC is loaded before the first use.
"""

if __name__ != "rpcdist.collectives":
    raise ImportError(
        "this folder is installed as rpcdist.collectives; write `import rpcdist.collectives`, and take the "
        "repository's root off sys.path (run your script from another folder, or install the project with pip)"
    )

from importlib import import_module
from typing import TYPE_CHECKING

# At once and not lazily: later, importing the module of this name would hide the function behind the module.
from rpcdist.collectives.rendezvous import register_rendezvous_handler, rendezvous
from rpcdist.errors import DistBackendError, DistError, DistNetworkError, DistStoreError, QueueEmptyError, StoreTimeout

if TYPE_CHECKING:
    from rpcdist.collectives._api.coalesced import all_gather_coalesced as all_gather_coalesced
    from rpcdist.collectives._api.coalesced import all_reduce_coalesced as all_reduce_coalesced
    from rpcdist.collectives._api.default_group import close_stores as close_stores
    from rpcdist.collectives._api.default_group import destroy_process_group as destroy_process_group
    from rpcdist.collectives._api.default_group import get_node_local_rank as get_node_local_rank
    from rpcdist.collectives._api.default_group import init_process_group as init_process_group
    from rpcdist.collectives._api.group_queries import GroupMember as GroupMember
    from rpcdist.collectives._api.group_queries import get_backend as get_backend
    from rpcdist.collectives._api.group_queries import get_backend_config as get_backend_config
    from rpcdist.collectives._api.group_queries import get_global_rank as get_global_rank
    from rpcdist.collectives._api.group_queries import get_group_rank as get_group_rank
    from rpcdist.collectives._api.group_queries import get_pg_count as get_pg_count
    from rpcdist.collectives._api.group_queries import get_process_group_ranks as get_process_group_ranks
    from rpcdist.collectives._api.group_queries import get_rank as get_rank
    from rpcdist.collectives._api.group_queries import get_world_size as get_world_size
    from rpcdist.collectives._api.group_queries import group as group
    from rpcdist.collectives._api.group_queries import is_initialized as is_initialized
    from rpcdist.collectives._api.messages import P2POp as P2POp
    from rpcdist.collectives._api.messages import batch_isend_irecv as batch_isend_irecv
    from rpcdist.collectives._api.messages import irecv as irecv
    from rpcdist.collectives._api.messages import isend as isend
    from rpcdist.collectives._api.messages import recv as recv
    from rpcdist.collectives._api.messages import send as send
    from rpcdist.collectives._api.new_groups import new_group as new_group
    from rpcdist.collectives._api.new_groups import new_subgroups as new_subgroups
    from rpcdist.collectives._api.new_groups import new_subgroups_by_enumeration as new_subgroups_by_enumeration
    from rpcdist.collectives._api.objects import all_gather_object as all_gather_object
    from rpcdist.collectives._api.objects import broadcast_object_list as broadcast_object_list
    from rpcdist.collectives._api.objects import gather_object as gather_object
    from rpcdist.collectives._api.objects import recv_object_list as recv_object_list
    from rpcdist.collectives._api.objects import scatter_object_list as scatter_object_list
    from rpcdist.collectives._api.objects import send_object_list as send_object_list
    from rpcdist.collectives._api.operations import all_gather as all_gather
    from rpcdist.collectives._api.operations import all_gather_into_tensor as all_gather_into_tensor
    from rpcdist.collectives._api.operations import all_gather_single as all_gather_single
    from rpcdist.collectives._api.operations import all_reduce as all_reduce
    from rpcdist.collectives._api.operations import all_to_all as all_to_all
    from rpcdist.collectives._api.operations import all_to_all_single as all_to_all_single
    from rpcdist.collectives._api.operations import barrier as barrier
    from rpcdist.collectives._api.operations import broadcast as broadcast
    from rpcdist.collectives._api.operations import gather as gather
    from rpcdist.collectives._api.operations import monitored_barrier as monitored_barrier
    from rpcdist.collectives._api.operations import reduce as reduce
    from rpcdist.collectives._api.operations import reduce_scatter as reduce_scatter
    from rpcdist.collectives._api.operations import reduce_scatter_single as reduce_scatter_single
    from rpcdist.collectives._api.operations import reduce_scatter_tensor as reduce_scatter_tensor
    from rpcdist.collectives._api.operations import scatter as scatter
    from rpcdist.collectives._api.split_groups import shrink_group as shrink_group
    from rpcdist.collectives._api.split_groups import split_group as split_group
    from rpcdist.collectives._group.backend_contract import GroupBackend as BackendBase
    from rpcdist.collectives._group.backend_contract import GroupContext as GroupContext
    from rpcdist.collectives._operations.operation import ReduceOp as ReduceOp
    from rpcdist.collectives._operations.reduce_ops import make_premul_sum as _make_nccl_premul_sum
    from rpcdist.collectives._operations.reduce_ops import reduce_op as reduce_op
    from rpcdist.collectives._operations.reduce_ops import supports_complex as supports_complex
    from rpcdist.collectives._stores.base import Store as Store
    from rpcdist.collectives._stores.file_store import FileStore as FileStore
    from rpcdist.collectives._stores.hash_store import HashStore as HashStore
    from rpcdist.collectives._stores.prefix_store import PrefixStore as PrefixStore
    from rpcdist.collectives._stores.tcp_store import TCPStore as TCPStore
    from rpcdist.collectives._stores.torch_store import TorchStoreAdapter as TorchStoreAdapter
    from rpcdist.collectives.backends import Backend as Backend
    from rpcdist.collectives.backends import BackendConfig as BackendConfig
    from rpcdist.collectives.backends import get_default_backend_for_device as get_default_backend_for_device
    from rpcdist.collectives.backends import is_available as is_available
    from rpcdist.collectives.backends import is_backend_available as is_backend_available
    from rpcdist.collectives.backends import is_gloo_available as is_gloo_available
    from rpcdist.collectives.backends import is_mpi_available as is_mpi_available
    from rpcdist.collectives.backends import is_nccl_available as is_nccl_available
    from rpcdist.collectives.backends import is_torchelastic_launched as is_torchelastic_launched
    from rpcdist.collectives.backends import is_ucc_available as is_ucc_available
    from rpcdist.collectives.backends import is_xccl_available as is_xccl_available
    from rpcdist.collectives.constants import default_pg_nccl_timeout as default_pg_nccl_timeout
    from rpcdist.collectives.constants import default_pg_timeout as default_pg_timeout
    from rpcdist.collectives.device_mesh import DeviceMesh as DeviceMesh
    from rpcdist.collectives.device_mesh import init_device_mesh as init_device_mesh
    from rpcdist.collectives.flight_recorder import record_comm as record_comm
    from rpcdist.collectives.options import AllgatherOptions as AllgatherOptions
    from rpcdist.collectives.options import AllreduceCoalescedOptions as AllreduceCoalescedOptions
    from rpcdist.collectives.options import AllreduceOptions as AllreduceOptions
    from rpcdist.collectives.options import AllToAllOptions as AllToAllOptions
    from rpcdist.collectives.options import BarrierOptions as BarrierOptions
    from rpcdist.collectives.options import BroadcastOptions as BroadcastOptions
    from rpcdist.collectives.options import DebugLevel as DebugLevel
    from rpcdist.collectives.options import GatherOptions as GatherOptions
    from rpcdist.collectives.options import ReduceOptions as ReduceOptions
    from rpcdist.collectives.options import ReduceScatterOptions as ReduceScatterOptions
    from rpcdist.collectives.options import ScatterOptions as ScatterOptions
    from rpcdist.collectives.options import get_debug_level as get_debug_level
    from rpcdist.collectives.options import set_debug_level as set_debug_level
    from rpcdist.collectives.options import set_debug_level_from_env as set_debug_level_from_env
    from rpcdist.collectives.process_group import ProcessGroup as ProcessGroup
    from rpcdist.collectives.work import Work as Work

__all__ = [
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "Backend",
    "BackendBase",
    "BackendConfig",
    "BarrierOptions",
    "BroadcastOptions",
    "DebugLevel",
    "DeviceMesh",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "FileStore",
    "GatherOptions",
    "GroupContext",
    "GroupMember",
    "HashStore",
    "P2POp",
    "PrefixStore",
    "ProcessGroup",
    "QueueEmptyError",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "Store",
    "StoreTimeout",
    "TCPStore",
    "TorchStoreAdapter",
    "Work",
    "_make_nccl_premul_sum",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "close_stores",
    "default_pg_nccl_timeout",
    "default_pg_timeout",
    "destroy_process_group",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "record_comm",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "register_rendezvous_handler",
    "rendezvous",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "set_debug_level",
    "set_debug_level_from_env",
    "shrink_group",
    "split_group",
    "supports_complex",
]

# Module to names: imported on first use.
_MODULES = {
    "_group.backend_contract": "BackendBase GroupContext",
    "_api.coalesced": "all_gather_coalesced all_reduce_coalesced",
    "_api.operations": (
        "all_gather all_gather_into_tensor all_gather_single all_reduce all_to_all all_to_all_single "
        "barrier broadcast gather monitored_barrier reduce reduce_scatter reduce_scatter_single "
        "reduce_scatter_tensor scatter"
    ),
    "_api.group_queries": (
        "GroupMember get_backend get_backend_config get_global_rank get_group_rank get_pg_count "
        "get_process_group_ranks get_rank get_world_size group is_initialized"
    ),
    "_api.default_group": "close_stores destroy_process_group get_node_local_rank init_process_group",
    "_api.new_groups": "new_group new_subgroups new_subgroups_by_enumeration",
    "_api.objects": (
        "all_gather_object broadcast_object_list gather_object recv_object_list scatter_object_list send_object_list"
    ),
    "_operations.operation": "ReduceOp",
    "_api.messages": "P2POp batch_isend_irecv irecv isend recv send",
    "_operations.reduce_ops": "_make_nccl_premul_sum reduce_op supports_complex",
    "_api.split_groups": "shrink_group split_group",
    "_stores.base": "Store",
    "_stores.file_store": "FileStore",
    "_stores.hash_store": "HashStore",
    "_stores.prefix_store": "PrefixStore",
    "_stores.tcp_store": "TCPStore",
    "_stores.torch_store": "TorchStoreAdapter",
    "backends": (
        "Backend BackendConfig get_default_backend_for_device is_available is_backend_available "
        "is_gloo_available is_mpi_available is_nccl_available is_torchelastic_launched is_ucc_available "
        "is_xccl_available"
    ),
    "constants": "default_pg_nccl_timeout default_pg_timeout",
    "device_mesh": "DeviceMesh init_device_mesh",
    "flight_recorder": "record_comm",
    "options": (
        "AllToAllOptions AllgatherOptions AllreduceCoalescedOptions AllreduceOptions BarrierOptions "
        "BroadcastOptions DebugLevel GatherOptions ReduceOptions ReduceScatterOptions ScatterOptions "
        "get_debug_level set_debug_level set_debug_level_from_env"
    ),
    "process_group": "ProcessGroup",
    "work": "Work",
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names.split()}
_MODULES_AS_NAMES = frozenset({"collective_utils", "flight_recorder", "functional"})
_RENAMED = {"BackendBase": "GroupBackend", "_make_nccl_premul_sum": "make_premul_sum"}


def __getattr__(name: str) -> object:
    if name in _MODULES_AS_NAMES:
        return import_module(f"rpcdist.collectives.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"rpcdist.collectives.{_LAZY[name]}"), _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
