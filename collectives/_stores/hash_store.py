"""A store in the memory of one process."""

from __future__ import annotations

from rpcdist.collectives._stores.shared_table import SharedTable
from rpcdist.collectives._stores.store_base import DEFAULT_TIMEOUT, Store, Timeout
from rpcdist.collectives._stores.store_operations import StoreOperation
from rpcdist.deadline import Deadline

__all__ = ["HashStore"]


class HashStore(Store):
    """A store for the threads of one process; useful in tests and for a world of one.

    Args:
        timeout: how long methods wait that take no timeout of their own.
    """

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._table = SharedTable()

    @property
    def address(self) -> str:
        return "this process's memory"

    def clone(self) -> HashStore:
        twin = HashStore(self._timeout_s)
        twin._table = self._table
        return twin

    def execute(self, operation: StoreOperation[object], deadline: Deadline) -> object:
        return self._table.execute(operation, deadline)
