"""Collective operations among the ranks of one host, through memory that they share."""

from rpcdist.collectives._transports.shm.segment_layout import Layout, segment_size
from rpcdist.collectives._transports.shm.shm_transport import SharedMemoryPlane
from rpcdist.collectives._transports.shm.support import unsupported_here

__all__ = ["Layout", "SharedMemoryPlane", "segment_size", "unsupported_here"]
