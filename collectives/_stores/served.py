"""The store that this process serves, shared by everybody in it who asks for the same host and port."""

from __future__ import annotations

import atexit
import threading
from collections import Counter

from rpcdist._proto import store_pb2
from rpcdist.collectives._stores.service import StoreService
from rpcdist.errors import DeadlineExceeded, DistNetworkError, RpcdistError, TransportError
from rpcdist.transport import Node, acquire_node
from rpcdist.transport.fork import in_forked_child

__all__ = ["ServedStore", "serve_store"]

DESCRIPTOR = store_pb2.DESCRIPTOR.services_by_name["Store"]
STOP_LIMIT_S = 5.0


class ServedStore:
    """One share of the served table, at one address; `close` each share once. The last one ends the service."""

    def __init__(self, table: _ServedTable, address: str) -> None:
        self.node = table.node
        self.service = table.service
        self.address = address
        self._table = table
        table.num_users[address] += 1

    def close(self) -> None:
        """Gives up a share; blocks, bounded."""
        global _served
        with _lock:
            users = self._table.num_users
            users[self.address] -= 1
            if users[self.address] > 0 or in_forked_child():
                return
            is_last = not users.total()
            if is_last and _served is self._table:
                _served = None
            try:
                if is_last:
                    self.node.run(self.service.close(), STOP_LIMIT_S)
                self.node.stop_serving(self.address)
            except (RpcdistError, RuntimeError):  # the loop is gone, and the service with it
                pass
            if is_last:
                self.node.release()


class _ServedTable:
    """What the shares have in common."""

    def __init__(self, node: Node, service: StoreService) -> None:
        self.node = node
        self.service = service
        self.num_users: Counter[str] = Counter()  # by address


# A process has one server, and so it serves one table: at one address or, for scripts that give their process group and
# RPC an address each, at several. Their keys have prefixes.
_served: _ServedTable | None = None
_lock = threading.Lock()


def serve_store(host: str, port: int, share: bool, timeout_s: float) -> ServedStore:
    """Starts to serve a table, or returns a share of the one that is served already.

    Args:
        host: address to bind.
        port: 0 for any, or for the one on which this process serves already.
        share: whether the table of an earlier caller will do.
        timeout_s: limit, in seconds.

    Raises:
        DistNetworkError: the port is in use, or this process serves a store already and `share` is not set.
    """
    global _served
    with _lock:
        if _served is not None:
            return _share(_served, host, port, share, timeout_s)
        node = acquire_node()
        service = StoreService()
        try:
            # First the service and then the port, so that nobody who gets through finds no store.
            node.add_service(DESCRIPTOR, service.methods(), timeout_s)
            table = _ServedTable(node, service)
            served = ServedStore(table, node.serve(host, port, timeout_s))
        except BaseException as exc:
            try:
                node.run(service.close(), STOP_LIMIT_S)
            finally:
                node.release()
            if isinstance(exc, TransportError | DeadlineExceeded):
                raise DistNetworkError(f"the store cannot be served at {host} port {port}: {exc}") from exc
            raise
        _served = table
        return served


def _close_at_exit() -> None:
    """Scripts written for torch do not close stores. The transport, which stops after this, would cut off replies."""
    if _served is not None and not in_forked_child():
        try:
            _served.node.run(_served.service.close(), STOP_LIMIT_S)
        except (RpcdistError, RuntimeError):  # the loop is gone, and the service with it
            pass


atexit.register(_close_at_exit)  # the transport has registered before, and so it comes later


def _share(table: _ServedTable, host: str, port: int, share: bool, timeout_s: float) -> ServedStore:
    first = next(iter(table.num_users))
    if not share:
        raise DistNetworkError(
            f"this process serves a store at {first} already (address already in use). Pass multi_tenant=True to share "
            "its table, close() the earlier store first, or use another process."
        )
    try:
        return ServedStore(table, table.node.serve(host, port, timeout_s) if port else first)
    except (TransportError, DeadlineExceeded) as exc:
        raise DistNetworkError(f"the store cannot be served at {host} port {port}: {exc}") from exc
