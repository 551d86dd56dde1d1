"""Stores: a table of keys through which the processes of a job find each other."""

from __future__ import annotations

from rpcdist.collectives._stores.base import Store
from rpcdist.collectives._stores.file_store import FileStore
from rpcdist.collectives._stores.hash_store import HashStore
from rpcdist.collectives._stores.prefix_store import PrefixStore
from rpcdist.collectives._stores.tcp_store import TCPStore
from rpcdist.collectives._stores.torch_store import TorchStoreAdapter

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore", "TorchStoreAdapter"]
