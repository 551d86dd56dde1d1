"""Stores: tables of keys through which the processes of a job find each other.

The operations are for new kinds of stores: `Store.execute` gets them, and may return `Missing`.
"""

from __future__ import annotations

from rpcdist.collectives._stores.derived_stores import PrefixStore, TorchStoreAdapter
from rpcdist.collectives._stores.file_store import FileStore
from rpcdist.collectives._stores.shared_table import HashStore
from rpcdist.collectives._stores.store_base import Store
from rpcdist.collectives._stores.store_operations import (
    Add,
    Append,
    Check,
    CompareSet,
    DeleteKey,
    Get,
    ListKeys,
    Missing,
    NumKeys,
    QueueLen,
    QueuePop,
    QueuePush,
    Set,
    StoreOperation,
    Wait,
)
from rpcdist.collectives._stores.tcp_store import TCPStore

__all__ = [
    "Add", "Append", "Check", "CompareSet", "DeleteKey", "FileStore", "Get", "HashStore", "ListKeys", "Missing",
    "NumKeys", "PrefixStore", "QueueLen", "QueuePop", "QueuePush", "Set", "Store", "StoreOperation", "TCPStore",
    "TorchStoreAdapter", "Wait",
]  # fmt: skip
