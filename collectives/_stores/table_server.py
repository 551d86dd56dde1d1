"""The table that this process serves, shared by all its stores that ask for the same host and port."""

from __future__ import annotations

import atexit
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

from rpcdist._proto import store_pb2
from rpcdist.collectives._stores.shared_table import SharedTable
from rpcdist.collectives._stores.store_service import StoreService
from rpcdist.errors import DeadlineExceeded, DistNetworkError, RpcdistError, TransportError
from rpcdist.time_limits import STORE_STOP_LIMIT_S
from rpcdist.transport import Node, acquire_node
from rpcdist.transport.fork import in_forked_child

__all__ = ["TABLE_SERVER", "TableServer", "TableShare"]

DESCRIPTOR = store_pb2.DESCRIPTOR.services_by_name["Store"]


class TableShare:
    """One user's share of the served table, at one address; `close` each share once. The last one ends the service."""

    def __init__(self, table: SharedTable, address: str, close: Callable[[str], None]) -> None:
        self.table = table
        self.address = address
        self._close = close

    def close(self) -> None:
        """Gives up the share; blocks, bounded."""
        self._close(self.address)


class _Serving:
    """The service while it runs, and how many shares there are of it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.service = StoreService()
        self.num_shares: Counter[str] = Counter()  # by address

    def start(self, host: str, port: int, timeout_s: float) -> str:
        # First the service and then the port, so that nobody who gets through finds no store.
        self.node.add_service(DESCRIPTOR, self.service.methods(), timeout_s)
        return self.node.serve(host, port, timeout_s)

    def end_calls(self) -> None:
        """Ends the calls under way, and lets the last replies leave."""
        try:
            self.node.run(self.service.close(), STORE_STOP_LIMIT_S)
        except (RpcdistError, RuntimeError):  # the loop is gone, and the service with it
            pass

    def stop_serving(self, address: str) -> None:
        try:
            self.node.stop_serving(address)
        except (RpcdistError, RuntimeError):
            pass


class TableServer:
    """Serves at most one table, at one or several addresses.

    Several are for scripts that give their process group and RPC an address each; prefixes keep their keys apart.

    Args:
        acquire: returns the node on which it serves. A node has one server, which is why there is one table.
    """

    def __init__(self, acquire: Callable[[], Node]) -> None:
        self._acquire = acquire
        self._lock = threading.Lock()
        self._serving: _Serving | None = None

    @property
    def table(self) -> SharedTable | None:
        """The table that is served now."""
        return self._serving.service.table if self._serving is not None else None

    def share(self, host: str, port: int, may_share: bool, timeout_s: float) -> TableShare:
        """Starts to serve a table, or returns a share of the one that is served already.

        Args:
            host: address to bind.
            port: 0 for any, or for the one on which this process serves already.
            may_share: whether the table of an earlier caller will do.
            timeout_s: limit, in seconds.

        Raises:
            DistNetworkError: the port is in use, or this process serves a store already and `may_share` is not set.
        """
        with self._lock:
            try:
                if self._serving is None:
                    address = self._start(host, port, timeout_s)
                else:
                    address = _address_at(self._serving, host, port, may_share, timeout_s)
            except (TransportError, DeadlineExceeded) as exc:
                raise DistNetworkError(f"the store cannot be served at {host} port {port}: {exc}") from exc
            assert self._serving is not None
            self._serving.num_shares[address] += 1
            return TableShare(self._serving.service.table, address, self._give_up)

    def _start(self, host: str, port: int, timeout_s: float) -> str:
        serving = _Serving(self._acquire())
        try:
            address = serving.start(host, port, timeout_s)
        except BaseException:
            try:
                serving.end_calls()
            finally:
                serving.node.release()
            raise
        self._serving = serving
        return address

    def _give_up(self, address: str) -> None:
        with self._lock:
            serving = self._serving
            if serving is None:
                return
            serving.num_shares[address] -= 1
            if serving.num_shares[address] > 0 or in_forked_child():
                return
            if serving.num_shares.total():
                serving.stop_serving(address)
                return
            self._serving = None
            serving.end_calls()
            serving.stop_serving(address)
            serving.node.release()

    def at_exit(self) -> None:
        """Lets the last replies leave, which the transport would cut off: scripts written for torch close no stores."""
        if self._serving is not None and not in_forked_child():
            self._serving.end_calls()


TABLE_SERVER: Final = TableServer(acquire_node)
"""That of this process, on its one node."""

atexit.register(TABLE_SERVER.at_exit)  # the transport has registered before, and so it comes later


def _address_at(serving: _Serving, host: str, port: int, may_share: bool, timeout_s: float) -> str:
    first = next(iter(serving.num_shares))
    if not may_share:
        raise DistNetworkError(
            f"this process serves a store at {first} already (address already in use). Pass multi_tenant=True to share "
            "its table, close() the earlier store first, or use another process."
        )
    return serving.node.serve(host, port, timeout_s) if port else first
