"""Links between the agent and distributed autograd, in both directions."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from rpcdist.errors import WorkerLost
from rpcdist.ids import Identity
from rpcdist.rpc._autograd_hooks import AutogradHooks
from rpcdist.rpc._calling.caller import Caller
from rpcdist.rpc._devices.gpu_sharing import GpuSharing
from rpcdist.rpc._executors.thread_pool import ThreadPool
from rpcdist.rpc._peers.directory import Directory, PeerEvents
from rpcdist.rpc._peers.network import AnySession, Lifetime
from rpcdist.rpc._peers.router import Router
from rpcdist.rpc.options import RpcOptions
from rpcdist.transport.io_loop import IoLoop, Timer


class AutogradLinks:
    """The agent's services for distributed autograd. Any thread may call any method; no method waits.

    Attributes:
        allow_pickle: whether gradients may arrive pickled.
        default_mode: the default mode of backward passes: "smart" or "fast".
        timeout_of: a timeout with torch's conventions (-1: the default, 0: none) in seconds, infinity for none.
        worker_name_of: the name of a worker, or a text with its id if it is unknown.
        silence_s: seconds since the connection to a worker was last known to be good.
        standing_session: the open session with the process that is now the worker, or None.
        submit: runs a function on a thread that may run user code.
        gpus: sends gradients on GPUs to other workers.
        call_later: runs a short function on the I/O loop, after a delay in seconds.
        send_control: sends a message to another worker until it has arrived, unless the worker dies.
        send, send_if_alive: send a message at most once, and raise, or drop it, if the worker is lost.
    """

    def __init__(
        self,
        directory: Directory,
        router: Router,
        caller: Caller,
        pool: ThreadPool,
        io: IoLoop,
        lifetime: Lifetime,
        options: RpcOptions,
        gpus: GpuSharing,
    ) -> None:
        self.identity = directory.me
        self.allow_pickle = options.allow_pickle
        self.default_mode = options.autograd_mode
        self.timeout_of = caller.timeout_of
        self.worker_name_of = directory.name_of
        self.silence_s = router.silence_s
        self.standing_session = router.standing_session
        self.submit = pool.submit
        self.gpus = gpus
        self.call_later = partial(Timer, io)
        self.send_control = router.send_control
        self.send = router.send
        self.send_if_alive = router.send_if_alive
        self._lifetime = lifetime

    @property
    def is_closed(self) -> bool:
        """Whether the agent is shutting down, or has shut down, so that no message can be sent any more."""
        return self._lifetime.is_closed


MakeAutograd = Callable[[AutogradLinks], AutogradHooks]
"""Creates distributed autograd for an agent; `rpcdist._upper_layers` lists it as "autograd"."""


def report_losses(
    hooks: AutogradHooks, events: PeerEvents, lifetime: Lifetime, is_worker: Callable[[int], bool]
) -> None:
    """Reports broken connections and lost workers to distributed autograd, until the agent closes.

    Args:
        is_worker: whether a number belongs to a worker of the job. The contexts of another process end with its
            connection, since it is never declared lost.
    """

    def broken(session: AnySession, reason: str) -> None:
        if not lifetime.is_closed:
            silence_s = time.monotonic() - session.last_received
            hooks.worker_lost(session.peer, WorkerLost(session.peer.name, "a backward pass", silence_s, reason))
            if not is_worker(session.peer.id):
                hooks.worker_dead(session.peer)

    def lost(identity: Identity, error: WorkerLost) -> None:
        if not lifetime.is_closed:
            hooks.worker_lost(identity, WorkerLost(error.worker, "a backward pass", error.last_seen_s, error.reason))
            hooks.worker_dead(identity)

    events.broken.listen(broken)
    events.lost.listen(lost)
