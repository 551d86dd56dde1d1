"""The I/O loop, the one gRPC server, authenticated links and sessions. The only layer that knows gRPC."""

import os

# gRPC's own fork handlers do nothing for a process that uses asyncio, and say so at every fork; ours are in `fork`.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# gRPC's core reports problems of a connection to us as errors, to which we add the worker's name. Its own log lines
# would only be noise on the user's terminal at every shutdown.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from rpcdist.transport._tls.tls_policy import TlsOptions
from rpcdist.transport.keys import LARGEST_UNCUT_BYTES
from rpcdist.transport.link import Link
from rpcdist.transport.node import Node, NodeOptions, acquire_node
from rpcdist.transport.session import Session, SessionHandler

__all__ = [
    "LARGEST_UNCUT_BYTES", "Link", "Node", "NodeOptions", "Session", "SessionHandler", "TlsOptions", "acquire_node",
]  # fmt: skip
