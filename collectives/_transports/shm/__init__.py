"""Collective operations among the ranks of one host, through memory that they share."""

from rpcdist.collectives._transports.shm.segment_layout import Layout, segment_size
from rpcdist.collectives._transports.shm.shm_transport import ShmTransport
from rpcdist.collectives._transports.shm.support import unsupported_here

__all__ = ["Layout", "ShmTransport", "segment_size", "unsupported_here"]
