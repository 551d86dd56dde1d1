"""The store that this process serves, shared by everybody in it who asks for the same host and port."""

from __future__ import annotations

import atexit
import threading

from rpcdist._proto import store_pb2
from rpcdist.collectives._store._service import StoreService
from rpcdist.errors import DeadlineExceeded, DistNetworkError, DistStoreError, RpcdistError, TransportError
from rpcdist.transport import Node, acquire_node
from rpcdist.transport.fork import in_forked_child

__all__ = ["ServedStore", "serve_store"]

DESCRIPTOR = store_pb2.DESCRIPTOR.services_by_name["Store"]
STOP_LIMIT_S = 5.0


class ServedStore:
    """One share of the served table; `close` each share once. The last one ends the service."""

    def __init__(self, node: Node, service: StoreService, address: str) -> None:
        self.node = node
        self.service = service
        self.address = address
        self.num_users = 1

    def close(self) -> None:
        """Gives up a share; blocks, bounded."""
        global _served
        with _lock:
            self.num_users -= 1
            if self.num_users > 0 or in_forked_child():
                return
            if _served is self:
                _served = None
            try:
                self.node.run(self.service.close(), STOP_LIMIT_S)
                self.node.stop_serving(self.address)
            except (RpcdistError, RuntimeError):  # the loop is gone, and the service with it
                pass
            self.node.release()


_served: ServedStore | None = None  # a process has one server, and so it serves one table
_lock = threading.Lock()


def serve_store(host: str, port: int, share: bool, timeout_s: float) -> ServedStore:
    """Starts to serve a table, or returns a share of the one that is served already.

    Args:
        host: address to bind.
        port: 0 for any, or for the one on which this process serves already.
        share: whether the table of an earlier caller will do.
        timeout_s: limit, in seconds.

    Raises:
        DistNetworkError: the port is in use.
        DistStoreError: this process serves another store already.
    """
    global _served
    with _lock:
        if _served is not None:
            return _share(_served, host, port, share)
        node = acquire_node()
        service = StoreService()
        try:
            # First the service and then the port, so that nobody who gets through finds no store.
            node.add_service(DESCRIPTOR, service.methods(), timeout_s)
            served = ServedStore(node, service, node.serve(host, port, timeout_s))
        except BaseException as exc:
            try:
                node.run(service.close(), STOP_LIMIT_S)
            finally:
                node.release()
            if isinstance(exc, TransportError | DeadlineExceeded):
                raise DistNetworkError(f"the store cannot be served at {host} port {port}: {exc}") from exc
            raise
        _served = served
        return served


def _close_at_exit() -> None:
    """Scripts written for torch do not close stores. The transport, which stops after this, would cut off replies."""
    if _served is not None and not in_forked_child():
        try:
            _served.node.run(_served.service.close(), STOP_LIMIT_S)
        except (RpcdistError, RuntimeError):  # the loop is gone, and the service with it
            pass


atexit.register(_close_at_exit)  # the transport has registered before, and so it comes later


def _share(served: ServedStore, host: str, port: int, share: bool) -> ServedStore:
    served_port = int(served.address.rpartition(":")[2])
    if not share:
        raise DistNetworkError(
            f"this process serves a store at {served.address} already (address already in use). Pass multi_tenant=True "
            "to share its table, close() the earlier store first, or use another process."
        )
    if port not in (0, served_port):
        raise DistStoreError(
            f"this process serves a store at {served.address} already, and one process serves one; it cannot serve "
            f"another at {host} port {port}. Use the same MASTER_ADDR and MASTER_PORT for both."
        )
    served.num_users += 1
    return served
