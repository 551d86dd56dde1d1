"""Collective operations among the ranks of one host, through memory that they share."""

from rpcdist.collectives._shared._layout import Layout, segment_size
from rpcdist.collectives._shared._plane import SharedMemoryPlane
from rpcdist.collectives._shared._support import unsupported_here

__all__ = ["Layout", "SharedMemoryPlane", "segment_size", "unsupported_here"]
