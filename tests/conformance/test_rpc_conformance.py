"""A cross-section of torch's own RPC tests, run against rpcdist on four processes that stay alive.

`make conformance` runs all of them and counts; here each one has to pass. See docs/conformance.md.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from rpctest_catalogue import COUNTED, GPU_SUITES, WITHOUT_GPUS, gpu_tests, load
from rpctest_fleet import Fleet

LIMIT_S = 60.0

pytestmark = [pytest.mark.conformance, pytest.mark.multiproc]

# About a third of all counted tests: each feature once, the quicker ones where there was a choice.
CROSS_SECTION = """
RpcTest:
    worker_id self_add send_to_rank invalid_names worker_info_pickle add_with_id non_cont_tensors py_built_in
    py_class_constructor py_class_instance_method py_class_method py_no_return_result py_tensors_in_container
    py_nested_pickle py_function_exception py_raise_in_user_func py_raise_in_user_func_escaped_str
    function_not_on_callee handle_send_exceptions nested_rpc deadlock
    stress_light_rpc stress_heavy_rpc multi_py_udf_remote py_rref_args_user_share nested_remote nested_rref
    rref_forward_chain rpc_return_rref local_rref_no_fork owner_equality call_method_on_rref rref_leak rref_str
    rref_context_debug_info rref_proxy_class local_value_not_on_owner remote_throw
    rref_py_pickle_not_supported use_rref_after_shutdown user_rrefs_confirmed wait_all wait_all_timeout
    rpc_barrier_multithreaded all_gather wait_all_workers_twice_dense graceful_shutdown_with_uneven_workload
    shutdown_followed_by_rpc callback_chain future_nested_callback mark_future_twice pickle_future
    async_function_simple async_function_chained_remote async_function_raise async_function_wrong_return_type
    async_class_rref_proxy return_future set_and_get_default_rpc_timeout duplicate_name duplicate_name_2 reinit
    init_rpc_twice init_pg_then_rpc wrong_types profiler_export_trace profiler_remote_events_profiled
    profiler_rpc_memory profiler_rpc_record_shapes profiler_with_autograd_context profiler_with_remote_builtin
    profiler_with_sync_rpc_builtin rpc_profiling_async_function rref_type_non_blocking server_process_global_profiler
    cannot_infer_backend_from_options world_size_one my_parameter_server
TensorPipeAgentRpcTest:
    mismatched_type_for_options infer_backend_from_options set_and_get_num_worker_threads
    tensorpipe_options_throw_on_timedelta_timeout send_to_rank_sparse nested_rref_sparse
    dynamic_rpc_init_rpc_without_rank dynamic_rpc_existing_rank_can_communicate_with_new_rank
    dynamic_and_static_init_rpc_together
DistAutogradTest:
    autograd_context nested_context rpc_complex_args context_cleanup_nested_rpc worker_ids_recorded
    backward_autograd_engine_error backward_multiple_round_trips backward_different_dtypes backward_invalid_args
    clean_context_during_backward debug_info async_dist_autograd backward_verify_hooks no_grad_copy
    grad_copy_sparse_indices_extra_ref trainer_ps
TensorPipeAgentDistAutogradTest:
    backward_rref_multi_sparse embedding_bag_with_no_grad_tensors mixed_requires_grad_sparse
DistOptimizerTest:
    dist_optim dist_optim_exception dist_optim_exception_on_constructor
RemoteModuleTest:
    bad_module forward_with_kwargs get_module_rref remote_parameters train_eval
ThreeWorkersRemoteModuleTest:
    send_remote_module_over_the_wire create_remote_module_from_module_rref
"""


def cross_section() -> Iterator[str]:
    suite = ""
    for word in CROSS_SECTION.split():
        if word.endswith(":"):
            suite = word.removesuffix(":")
        else:
            yield f"{suite}.test_{word}"


@pytest.fixture(scope="module")
def fleet(fork_server: None) -> Iterator[Fleet]:
    fleet = Fleet("rpcdist")
    yield fleet
    fleet.close()


# The first test of a group of workers pays for their start.
@pytest.mark.timeout(LIMIT_S + 180)
@pytest.mark.parametrize("name", list(cross_section()))
def test_cross_section(fleet: Fleet, name: str) -> None:
    suite, _, test = name.partition(".")
    outcome = fleet.run(suite, test, LIMIT_S)
    assert outcome.status == "passed", outcome.details


@pytest.mark.timeout(LIMIT_S + 180)
@pytest.mark.parametrize("test", WITHOUT_GPUS)
def test_device_maps_without_gpus(fleet: Fleet, test: str) -> None:
    outcome = fleet.run("DeviceMapsWithoutGpusTest", test, LIMIT_S)
    assert outcome.status == "passed", outcome.details


def test_those_of_gpus_are_known() -> None:
    """Each class has tests, and none of them counts among those of the CPU."""
    names = [entry.name for entry in gpu_tests()]
    assert {name.partition(".")[0] for name in names} == GPU_SUITES.keys()
    assert len(names) == len(set(names)) > 90
    assert {f"TensorPipeAgentCudaRpcTest.{name}" for name in WITHOUT_GPUS} <= set(names)
    assert not set(names) & {entry.name for entry in load()}


def test_the_cross_section_is_counted() -> None:
    names = list(cross_section())
    counted = {entry.name for entry in load() if entry.category in COUNTED}
    assert len(names) == len(set(names))
    assert set(names) <= counted, set(names) - counted


OPTIONAL_NAMES = {
    "rpc.api._broadcast_to_followers",  # a step of torch's gathering that ours does not have
}


def test_no_name_is_missing() -> None:
    """Every name below `torch.distributed.rpc` that the test files mention or patch exists in `rpcdist`."""
    missing = {name for name in _names_used() if not _exists(name)} - OPTIONAL_NAMES
    assert not missing


def _names_used() -> Iterator[str]:
    spec = find_spec("torch.testing._internal")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    for file in (folder / "dist_utils.py", folder / "distributed" / "rpc" / "rpc_test.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                dotted = ast.unparse(node).removeprefix("torch.distributed.")
                if dotted.startswith("rpc.") and "(" not in dotted:
                    yield dotted
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "mock.patch.object":
                yield f"{ast.unparse(node.args[0])}.{ast.literal_eval(node.args[1])}".removeprefix("torch.distributed.")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed.rpc"):
                for alias in node.names:
                    yield f"{(node.module or '').removeprefix('torch.distributed.')}.{alias.name}"


def _exists(dotted: str) -> bool:
    package, *parts = dotted.split(".")
    found: object = importlib.import_module(f"rpcdist.{package}")
    for part in parts:
        try:
            found = getattr(found, part)
        except AttributeError:
            return False
    return True
