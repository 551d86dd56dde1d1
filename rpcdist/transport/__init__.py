"""The I/O loop, the one gRPC server, authenticated links and sessions. The only layer that knows gRPC."""

import os

# gRPC's own fork handlers do nothing for a process that uses asyncio, and say so at every fork; ours are in `fork`.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# What gRPC's core has to say of a connection comes to us as an error, with the worker's name; its own lines would be
# noise on the user's terminal at every shutdown.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from rpcdist.transport._framing.message_pieces import LARGEST_UNCUT_BYTES
from rpcdist.transport._tls.tls_options import TlsOptions
from rpcdist.transport.link import Link
from rpcdist.transport.node import Node, NodeOptions
from rpcdist.transport.session import Session, SessionHandler
from rpcdist.transport.shared_node import acquire_node

__all__ = [
    "LARGEST_UNCUT_BYTES",
    "Link",
    "Node",
    "NodeOptions",
    "Session",
    "SessionHandler",
    "TlsOptions",
    "acquire_node",
]
