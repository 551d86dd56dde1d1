"""torch's RPC test classes, mixed with the fixture of the TensorPipe agent as torch's own test files do.

Import it after the peer is chosen (see `rpctest_modules`): the test files bind `torch.distributed.rpc` when they are
imported. The classes are attributes of this module because tests send their own methods to other workers.
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any

from rpctest_catalogue import WITHOUT_GPUS
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed.nn.api import remote_module_test
from torch.testing._internal.distributed.rpc import dist_autograd_test, dist_optimizer_test, rpc_test
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

__all__ = [
    "CudaDistAutogradTest",
    "CudaRemoteModuleTest",
    "CudaRpcTest",
    "DeviceMapsWithoutGpusTest",
    "DistAutogradTest",
    "DistOptimizerTest",
    "RemoteModuleTest",
    "RpcTest",
    "TensorPipeAgentCudaRpcTest",
    "TensorPipeAgentDistAutogradTest",
    "TensorPipeAgentRpcTest",
    "TensorPipeCudaDistAutogradTest",
    "ThreeWorkersRemoteModuleTest",
]


class RpcTest(rpc_test.RpcTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
    """The tests for any RPC backend."""


class DistAutogradTest(dist_autograd_test.DistAutogradTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
    """Distributed autograd on any backend."""

    @property
    def rpc_backend_options(self) -> Any:
        """One test shows that torch's mode hangs on an unused result, so it gets that mode."""
        options = super().rpc_backend_options
        if self._testMethodName == "test_backward_unused_send_function" and hasattr(options, "autograd_mode"):
            options.autograd_mode = "fast"
        return options


class TensorPipeAgentDistAutogradTest(
    dist_autograd_test.TensorPipeAgentDistAutogradTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase
):
    """Distributed autograd with sparse tensors."""


class DistOptimizerTest(dist_optimizer_test.DistOptimizerTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
    """The distributed optimizer."""


class RemoteModuleTest(remote_module_test.RemoteModuleTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
    """Remote modules, on two workers."""


class ThreeWorkersRemoteModuleTest(
    remote_module_test.ThreeWorkersRemoteModuleTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase
):
    """Remote modules that are sent to a third worker."""


class TensorPipeAgentRpcTest(rpc_test.TensorPipeAgentRpcTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
    """The tests of torch's default backend: options, timeouts, device maps."""


# ---------------------------------------------------------------- GPUs


class CudaRpcTest(rpc_test.CudaRpcTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
    """The tests for any RPC backend with a GPU."""


class TensorPipeAgentCudaRpcTest(
    rpc_test.TensorPipeAgentCudaRpcTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase
):
    """Device maps, and the order of streams in calls."""


class CudaDistAutogradTest(
    dist_autograd_test.CudaDistAutogradTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase
):
    """Distributed autograd with a GPU in each worker."""


class TensorPipeCudaDistAutogradTest(
    dist_autograd_test.TensorPipeCudaDistAutogradTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase
):
    """Distributed autograd by device maps."""


class CudaRemoteModuleTest(
    remote_module_test.CudaRemoteModuleTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase
):
    """Remote modules on GPUs."""


class DeviceMapsWithoutGpusTest(
    rpc_test.TensorPipeAgentCudaRpcTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase
):
    """Those tests of `TensorPipeAgentCudaRpcTest` that look for GPUs first, and then use none."""


for _name in WITHOUT_GPUS:
    # The wrapper that torch's decorator, which looks for GPUs, puts around it.
    setattr(DeviceMapsWithoutGpusTest, _name, unwrap(getattr(DeviceMapsWithoutGpusTest, _name)))
