"""torch's RPC test classes, mixed with the fixture of the TensorPipe agent as torch's own test files do.

Import it after the peer is chosen (see `rpctest_modules`): the test files bind `torch.distributed.rpc` when they are
imported. The classes are attributes of this module because tests send their own methods to other workers.
"""

from __future__ import annotations

from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed.rpc import rpc_test
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

__all__ = ["RpcTest", "TensorPipeAgentRpcTest"]


class RpcTest(rpc_test.RpcTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
    """What any RPC backend has to do."""


class TensorPipeAgentRpcTest(rpc_test.TensorPipeAgentRpcTest, TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
    """What torch asks of its default backend: options, timeouts, device maps."""
