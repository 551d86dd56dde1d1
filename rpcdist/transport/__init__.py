"""The I/O loop, the one gRPC server, authenticated links and sessions. The only layer that knows gRPC."""

from rpcdist.transport.link import Link
from rpcdist.transport.node import Node, NodeOptions, acquire_node
from rpcdist.transport.session import Session, SessionHandler

__all__ = ["Link", "Node", "NodeOptions", "Session", "SessionHandler", "acquire_node"]
