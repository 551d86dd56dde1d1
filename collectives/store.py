"""Stores: a table of keys through which the processes of a job find each other."""

from __future__ import annotations

from rpcdist.collectives._store._base import Store
from rpcdist.collectives._store._file import FileStore
from rpcdist.collectives._store._hash import HashStore
from rpcdist.collectives._store._prefix import PrefixStore
from rpcdist.collectives._store._tcp import TCPStore
from rpcdist.collectives._store._torch import TorchStoreAdapter

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore", "TorchStoreAdapter"]
