"""Lists torch's modules and names that mean ours under `rpcdist.compat`, and those that cannot, with advice."""

from __future__ import annotations

from typing import Final

_ALGORITHMS: Final = "torch.distributed.algorithms"
_AVERAGING: Final = "rpcdist.parallel.model_averaging"

ALIASES: Final = {
    "torch.distributed.rpc": "rpcdist.rpc",
    "torch.distributed.autograd": "rpcdist.autograd",
    "torch.distributed.optim": "rpcdist.optim",
    "torch.distributed.optim.post_localSGD_optimizer": _AVERAGING,
    "torch.distributed.optim.zero_redundancy_optimizer": "rpcdist.parallel.zero_redundancy",
    f"{_ALGORITHMS}.model_averaging": _AVERAGING,
    f"{_ALGORITHMS}.model_averaging.averagers": _AVERAGING,
    f"{_ALGORITHMS}.model_averaging.hierarchical_model_averager": _AVERAGING,
    f"{_ALGORITHMS}.model_averaging.utils": _AVERAGING,
}
"""Modules that are ours as a whole, for all code. Names below them that only torch has stay torch's."""

MISSING: Final = {
    "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook": "use ZeroRedundancyOptimizer without overlap",
    "torch.distributed.rpc._testing": "it tests torch's own agent",
    "torch.distributed.rpc.server_process_global_profiler": "use rpc._server_process_global_profile, or torch.profiler",
}
"""Modules that can be imported but are empty, and the advice for each."""

VIEWS: Final = {
    "torch._C._distributed_c10d": "rpcdist.collectives",
    "torch._C._distributed_rpc": "rpcdist.rpc rpcdist.rpc.api",
    "torch.distributed": "rpcdist.collectives",
    "torch.distributed.collective_utils": "rpcdist.collectives.collective_utils",
    "torch.distributed.device_mesh": "rpcdist.collectives.device_mesh",
    "torch.distributed.distributed_c10d": "rpcdist.collectives",
    _ALGORITHMS: "rpcdist.parallel.algorithms",
    f"{_ALGORITHMS}.join": "rpcdist.parallel.algorithms",
    f"{_ALGORITHMS}.ddp_comm_hooks": "rpcdist.parallel.comm_hooks",
    f"{_ALGORITHMS}.ddp_comm_hooks.debugging_hooks": "rpcdist.parallel.comm_hooks",
    f"{_ALGORITHMS}.ddp_comm_hooks.default_hooks": "rpcdist.parallel.comm_hooks",
    f"{_ALGORITHMS}.ddp_comm_hooks.post_localSGD_hook": "rpcdist.parallel.comm_hooks",
    f"{_ALGORITHMS}.ddp_comm_hooks.powerSGD_hook": "rpcdist.parallel.comm_hooks",
    f"{_ALGORITHMS}.ddp_comm_hooks.quantization_hooks": "rpcdist.parallel.comm_hooks",
    "torch.distributed.nn": "rpcdist.nn rpcdist.nn.functional rpcdist.collectives",
    "torch.distributed.nn.functional": "rpcdist.nn.functional rpcdist.collectives",
    "torch.distributed.nn.api.remote_module": "rpcdist.nn.api.remote_module",
    "torch.distributed.rendezvous": "rpcdist.collectives.rendezvous",
    "torch.distributed.utils": "rpcdist.parallel._ddp._parameters",
    "torch.nn.parallel": "rpcdist.parallel",
    "torch.nn.parallel.distributed": "rpcdist.parallel rpcdist.parallel._ddp._parameters",
    "torch.utils.data": "rpcdist.data",
    "torch.utils.data.distributed": "rpcdist.data",
}
"""Modules that torch's own code uses unchanged; other code finds our names in them where we have one."""

LATE_VIEWS: Final = {
    "torch.distributed._tensor": "rpcdist.collectives.device_mesh",
    "torch.distributed._tensor.device_mesh": "rpcdist.collectives.device_mesh",
    "torch.distributed.tensor": "rpcdist.collectives.device_mesh",
    "torch.distributed.tensor.device_mesh": "rpcdist.collectives.device_mesh",
}
"""The same for modules that only the program loads, because loading them takes seconds."""

READS_OURS: Final = ("torch.distributed._state_dict_utils", "torch.distributed.checkpoint", "torch.distributed.utils")
"""Modules of torch that find our names, too: with torch's, each rank would be alone to them, or our groups refused."""

_TORCH_GROUPS: Final = (
    "works on process groups of torch. Give these our backend: `import rpcdist.collectives.torch_backend`, then "
    "torch's `init_process_group('rpcdist')` (docs/clusters.md)"
)
REFUSED: Final = {
    "torch.distributed.fsdp": _TORCH_GROUPS,
    "torch.distributed.tensor": _TORCH_GROUPS,
    "torch.distributed._tensor": _TORCH_GROUPS,
    "torch.distributed._composable": _TORCH_GROUPS,
    "torch.distributed._functional_collectives": _TORCH_GROUPS,
    "torch.distributed._symmetric_memory": _TORCH_GROUPS,
    "torch.distributed.pipelining": f"{_TORCH_GROUPS}, or use rpcdist.parallel.Pipeline (docs/pipeline.md)",
}
"""Modules that no name of ours can stand for, and what to do. Programs import them to ask what is a `DTensor`."""

TAKES_GROUPS: Final = {
    "torch.distributed._functional_collectives": "_resolve_group _resolve_group_name _expand_group",
    "torch.distributed._symmetric_memory": "enable_symm_mem_for_group rendezvous",
    "torch.distributed.distributed_c10d": "_add_ephemeral_timeout_for_all_pgs _update_default_pg",
    "torch.distributed.fsdp._fully_shard._fully_shard": "fully_shard",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel.__init__",
    "torch.distributed.pipelining.stage": "_PipelineStageBase.__init__",
    "torch.distributed.tensor._api": "DTensor.from_local distribute_tensor distribute_module _dtensor_init_helper",
    "torch.distributed.tensor.parallel.api": "parallelize_module",
}
"""Refused functions of these and other modules: they take or make groups or meshes of torch."""


def is_within(name: str, outer: str) -> bool:
    """Whether a full name is that of a module, class or function, or of something in it."""
    return name == outer or name.startswith(f"{outer}.")


def advice_against(module: str) -> str | None:
    """The advice for a program that imports a module of torch's; None for modules that may be imported."""
    for refused, advice in REFUSED.items():
        if is_within(module, refused):
            return f"rpcdist.compat cannot replace {refused}, which {advice}; and run the program without compat"
    return None
