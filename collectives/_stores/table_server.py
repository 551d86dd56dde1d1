"""The tables that this process serves: one at each port, shared by all its stores that ask for that port."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from rpcdist._proto import store_pb2
from rpcdist.at_exit import register_at_exit, unregister_at_exit
from rpcdist.collectives._stores.shared_table import SharedTable
from rpcdist.collectives._stores.store_service import StoreService
from rpcdist.errors import DeadlineExceeded, DistNetworkError, RpcdistError, TransportError
from rpcdist.time_limits import STORE_STOP_LIMIT_S
from rpcdist.transport import Node, acquire_node
from rpcdist.transport.addresses import split_address
from rpcdist.transport.fork import in_forked_child

DESCRIPTOR = store_pb2.DESCRIPTOR.services_by_name["Store"]


class TableShare:
    """One user's share of a served table; `close` each share once. The last one ends the service."""

    def __init__(self, table: SharedTable, address: str, close: Callable[[], None]) -> None:
        self.table = table
        self.address = address
        self._close = close

    def close(self) -> None:
        """Gives up the share; blocks, bounded."""
        self._close()


class _Serving:
    """The service of one table while it runs, and how many shares there are of it."""

    def __init__(self, node: Node, address: str) -> None:
        self.address = address
        self.service = StoreService()
        self.num_shares = 0
        self._node = node

    def start(self, timeout_s: float) -> None:
        self._node.add_service(DESCRIPTOR, self.service.methods(), timeout_s, self.address)
        register_at_exit(self.end_calls)  # scripts written for torch close no stores

    def end(self) -> None:
        unregister_at_exit(self.end_calls)
        self.end_calls()
        try:
            self._node.stop_serving(self.address)
        except (RpcdistError, RuntimeError):
            pass
        self._node.release()

    def end_calls(self) -> None:
        """Ends the calls under way, and lets the last replies leave."""
        if in_forked_child():
            return
        try:
            self._node.run(self.service.close(), STORE_STOP_LIMIT_S)
        except (RpcdistError, RuntimeError):  # the loop is gone, and the service with it
            pass


class TableServer:
    """Serves a table at each port that a store asks for, all on one node.

    Args:
        acquire: returns the node on which it serves.
    """

    def __init__(self, acquire: Callable[[], Node]) -> None:
        self._acquire = acquire
        self._lock = threading.Lock()
        self._serving: dict[int, _Serving] = {}  # by port

    @property
    def tables(self) -> list[SharedTable]:
        """Those that are served now."""
        return [serving.service.table for serving in self._serving.values()]

    def share(self, host: str, port: int, may_share: bool, timeout_s: float) -> TableShare:
        """Starts to serve a table, or returns a share of the one that is served at that port already.

        Args:
            host: address to bind.
            port: 0 for any that is free.
            may_share: whether the table of an earlier caller will do.
            timeout_s: limit, in seconds.

        Raises:
            DistNetworkError: the port is in use, if only by a store of this process and `may_share` is not set.
        """
        with self._lock:
            serving = self._serving.get(port)
            if serving is None:
                try:
                    serving = self._start(host, port, timeout_s)
                except (TransportError, DeadlineExceeded) as exc:
                    raise DistNetworkError(f"the store cannot be served at {host} port {port}: {exc}") from exc
            elif not may_share:
                raise DistNetworkError(
                    f"this process serves a store at {serving.address} already (address already in use). Pass "
                    "multi_tenant=True to share its table, close() that store first, or choose another port."
                )
            serving.num_shares += 1
            return TableShare(serving.service.table, serving.address, partial(self._give_up, serving))

    def _start(self, host: str, port: int, timeout_s: float) -> _Serving:
        node = self._acquire()
        try:
            serving = _Serving(node, node.serve(host, port, timeout_s, is_apart=True))
        except BaseException:
            node.release()
            raise
        try:
            serving.start(timeout_s)
        except BaseException:
            serving.end()
            raise
        self._serving[split_address(serving.address)[1]] = serving
        return serving

    def _give_up(self, serving: _Serving) -> None:
        with self._lock:
            serving.num_shares -= 1
            if serving.num_shares or in_forked_child():
                return
            del self._serving[split_address(serving.address)[1]]
            serving.end()


TABLE_SERVER: Final = TableServer(acquire_node)
"""That of this process, on its one node."""
