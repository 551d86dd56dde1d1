"""The shortest way of a small message between two ranks that have nothing else under way.

In most programs a rank sends or receives one message at a time. Then the message is all that its connection carries,
and neither a request, nor the matcher, nor a queue is needed. Where that is not so, `SmallMessages` leaves everything
as it is, and the call goes the way of all messages. What it spares is Python code: two ranks that take turns on one
core find the processor's caches and branch predictors cold after each message, and then every line counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

import torch

from rpcdist.collectives._operations.operation import dtype_code
from rpcdist.collectives._transports.memory import copy_bytes, memory_of
from rpcdist.collectives._transports.p2p.message_format import HEADER_BYTES, MessageFrame, pack_header
from rpcdist.collectives._transports.p2p.peer_sockets import ConnectionEnded
from rpcdist.collectives._transports.p2p.progress_engine import ProgressEngine
from rpcdist.collectives._transports.p2p.requests import Request
from rpcdist.time_limits import REFUSAL_POLL_S

__all__ = ["SMALL_BYTES", "SmallMessages"]

SMALL_BYTES: Final = 1 << 17
"""The largest payload; it is copied behind its header, and at the receiver through the buffer of the connection."""


class SmallMessages:
    """Small messages of one rank, while nothing else is under way. Any thread may use it.

    Args:
        progress: the rank's messages and their lock.
    """

    def __init__(self, progress: ProgressEngine) -> None:
        self._progress = progress
        self._state = progress.state
        self._lock = progress.lock
        self._leadership = progress.leadership

    def send(self, tensor: torch.Tensor, peer: int, tag: int, rest: Callable[[], Request]) -> Request | bool:
        """Sends a message if its connection is open and has nothing else to carry.

        Args:
            tensor: dense.
            peer: the receiver's rank in the group.
            tag: the message's.
            rest: makes the request of this message, which is needed when only a part of it can be sent at once.

        Returns:
            True when it was sent, the request when the rest of it is still to be sent, False when nothing was done.

        Raises:
            BaseException: from a signal handler. The connection is ended then: nobody knows what was sent.
        """
        state, code = self._state, dtype_code(tensor.dtype)
        connection = state.outgoing.get(peer)
        if connection is None or time.monotonic() - connection.refusals_read_at > REFUSAL_POLL_S:
            return False
        with self._lock:
            sock = connection.sock
            if (
                connection.busy
                or connection.stream
                or connection.ended is not None
                or connection.refusals
                or sock is None
                or state.error is not None
                or state.lost
            ):
                return False
            connection.busy = True
        num_sent, request, ended = 0, None, ""
        try:
            data = pack_header(MessageFrame.MESSAGE, code, tag, connection.stream.num_sent, tensor.nbytes)
            data += memory_of(tensor)
            ended = "a send was interrupted"
            num_sent = sock.send(data)
            ended = ""
        except (BlockingIOError, InterruptedError):
            ended = ""
        except OSError as exc:
            ended = f"the connection with it failed: {exc.strerror or exc}"
        finally:
            with self._lock:
                stream = connection.stream
                if ended:
                    state.end_outgoing(connection, ended)
                elif num_sent and num_sent == len(data):  # if nothing was sent, there may be no data
                    stream.num_sent += 1
                elif num_sent:
                    request = rest()
                    state.add(request)
                    stream.put_begun(request, num_sent)
                self._progress.release_locked(connection)
                if stream or state.settled:  # other threads have added messages meanwhile
                    self._leadership.ensure()
        return request or num_sent > 0

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> bool:
        """Receives a message that comes within a moment, if nothing else is awaited.

        Returns:
            Whether it did. What came instead is where the usual way finds it.
        """
        state, code = self._state, dtype_code(tensor.dtype)
        connection = state.incoming.get(peer)
        if connection is None or connection.stream.inside_message:
            return False
        with self._lock:
            if state.error is not None or state.lost or state.pending or state.matcher or connection.ended is not None:
                return False
            if not self._leadership.take():
                return False
        num_bytes = 0
        try:
            until = time.monotonic() + self._progress.spin_s
            version = self._leadership.version
            stream, size = connection.stream, tensor.nbytes
            while version == self._leadership.version:
                came = connection.receive(num_bytes)
                num_bytes += came
                if came and (num_bytes >= HEADER_BYTES + size or not stream.may_be(num_bytes, code, tag, size)):
                    break
                if time.monotonic() > until:
                    break
                os.sched_yield()  # the peer may share this core
            address = stream.only_message(num_bytes, code, tag, size)
            if address:
                copy_bytes(tensor.data_ptr(), address, tensor.nbytes)
                return True
            if num_bytes:
                with self._lock:
                    self._progress.digest(connection, num_bytes)
        except ConnectionEnded as exc:
            with self._lock:
                state.end_incoming(connection, str(exc))
        except BaseException as exc:  # of a signal handler: the position in the stream is unknown
            self._progress.fail(exc)
            raise
        finally:
            self._leadership.pass_on()
        return False
