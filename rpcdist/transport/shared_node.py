"""The node that all parts of a process share: the store, collectives and RPC."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from rpcdist.errors import ConfigError
from rpcdist.own_shortage import names_shortage
from rpcdist.transport import fork
from rpcdist.transport._server.port_range import PORTS_VARIABLE, PortRange
from rpcdist.transport._tls.tls_options import CERTIFICATE_VARIABLE
from rpcdist.transport._tls.tls_policy import TLS_VARIABLE, TlsPolicy
from rpcdist.transport.node import Node, NodeOptions
from rpcdist.transport.token import job_token


class SharedNode:
    """Starts a node for the first part that asks, and gives it to the others until the last one has released it."""

    def __init__(self) -> None:
        # Weak: a node that has ended still names the services of those who used it, and would keep them alive.
        self._node: Callable[[], Node | None] = lambda: None
        self._lock = threading.Lock()

    def acquire(self, options: NodeOptions | None = None) -> Node:
        """The node of this process, started if there is none; pair it with `Node.release`.

        Args:
            options: settings for a node that starts now. A node that runs already keeps its own; then a token, a
                job or TLS that differs is an error.

        Raises:
            ConfigError: the running node was started with another token, job or TLS.
            ForkedProcess: this process was forked from one that runs a node.
        """
        fork.check_not_forked()
        with self._lock:
            node = self._node()
            if node is None or not node.share():
                with names_shortage("starting the node"):
                    node = Node(options or NodeOptions()).start()
                self._node = weakref.ref(node)
            elif options is not None:
                self._check_same(node, options)
            return node

    def _check_same(self, node: Node, options: NodeOptions) -> None:
        mine = node.credentials
        if options.token is not None and job_token(options.token) != mine.token:
            node.release()
            raise ConfigError("this process already communicates with another job token; use one token per process")
        if TlsPolicy.of_environment(options.tls) != mine.tls_policy:
            node.release()
            raise ConfigError(
                f"this process already communicates with TLS set to {mine.tls_policy.mode.value!r} and "
                f"{mine.tls_policy.files or 'certificates of the job token'}: set it by {TLS_VARIABLE}, and files by "
                f"{CERTIFICATE_VARIABLE} and its like, which count for stores, groups and RPC alike"
            )
        if PortRange.of_environment(options.ports) != node.ports:
            node.release()
            raise ConfigError(
                f"this process already listens at ports {node.ports}: set them by {PORTS_VARIABLE}, which counts "
                "for stores, groups and RPC alike"
            )
        if options.job != mine.job:
            node.release()
            raise ConfigError(
                f"this process already belongs to job {mine.job!r}, and cannot join job {options.job!r}: name the job "
                "by RPCDIST_JOB, which counts for stores, groups and RPC alike"
            )


_shared = SharedNode()

acquire_node = _shared.acquire
