"""The watch of a group: tells every rank of events that only one of them sees.

The group's rank 0 listens; every other rank keeps one connection to it, with a stream of small messages in each
direction. So rank 0 sees the death of a rank at once and tells the others, and all ranks see the death of rank 0.
No rank polls: kernels notice a peer that is cut off (keep-alive packets, `GROUP_SILENCE_LIMIT_S`).

A message is its length in four bytes, then a JSON object with the key `say`:

    failure   kind reason ranks         the group failed; rank 0 passes it on to all
    timeout   title sequence            an operation ran out of time at the sender; rank 0 asks around, then tells all
    where     question                  rank 0 asks: where are you?
    here      question sequence text    the answer
    left      rank sequence error       a rank leaves in order after that many operations; rank 0 passes it on. The
                                        error is that with which its program ends, or empty
    value     number value              a rank's value for an exchange
    values    number values             rank 0: the values of all ranks, by rank
    memory    size                      rank 0: memory to share, whose descriptor comes along; size 0 if there is none

    The watch runs on the I/O loop; any thread may call `report*`, `exchange`, `pass_memory` and `close`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import select
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Final

from rpcdist.at_exit import ending_error
from rpcdist.collectives._group.state import (
    MAX_REASON_LENGTH,
    GroupActions,
    GroupFailure,
    GroupState,
    Reporter,
    timeout_verdict,
)
from rpcdist.errors import ProtocolViolation, RankLost, RpcdistError, described_error
from rpcdist.time_limits import ANSWER_LIMIT_S, CLOSE_STEP_LIMIT_S, GROUP_ANSWER_LIMIT_S, GROUP_SILENCE_LIMIT_S
from rpcdist.transport import Node
from rpcdist.transport._channels.stream_sockets import break_when_silent, keep_alive, receive_some, until_ready
from rpcdist.transport._tls.tls_socket import NO_SIGPIPE, StreamSocket
from rpcdist.transport.shared_memory import Segment, SegmentError
from rpcdist.transport.unix_sockets import ANCILLARY_BYTES, CLOSE_ON_EXEC, CUT_OFF, ReceivedDescriptors, rights
from rpcdist.waiters import ends_within

MAX_MESSAGE_BYTES: Final = 64 * 1024
"""The largest message, longer than any failure: a peer cannot make this process allocate more."""

MAX_VALUE_CHARS: Final = 1024
"""The limit of a rank's text in an exchange. Rank 0 sends the texts of all ranks in one message."""
_VALUE_BYTES: Final = 12 * MAX_VALUE_CHARS  # as JSON, at most
MAX_UNSENT_BYTES: Final = 1 << 20
"""The limit of bytes that wait for a peer that does not read, before another message. A peer that only stands still
gets less in that time: news of ranks that leave, and one message each about failure, timeout and values."""
_LONGEST_ERROR: Final = 300  # in characters, of a rank that leaves
_HEAD_BYTES: Final = 4
_READ_BYTES: Final = 8 << 10

Message = dict[str, object]


def encoded(message: Message) -> bytes:
    data = json.dumps(message).encode()
    return len(data).to_bytes(_HEAD_BYTES, "big") + data


class StateKeeper(ABC):
    """Passes events to the state of a group, on any thread. It never blocks, as the watch calls it on the I/O loop.

    Attributes:
        state: other parts read it; only the keeper changes it.
        abort_hooks: each is called once when the group fails, before its operations fail, on any thread.
    """

    def __init__(self, state: GroupState) -> None:
        self.state = state
        self.abort_hooks: dict[int, Callable[[], object]] = {}

    @abstractmethod
    def _handle(self, event: Callable[[], GroupActions]) -> None:
        """Calls an event of the state under the lock, and carries out the actions without the lock."""

    def opened(self) -> None:
        """All ranks are connected: acts on the events that came while the group was made."""
        self._handle(self.state.open)

    def fail(self, failure: GroupFailure) -> None:
        """Fails the group on this rank only, because another rank said so, unless it has failed before."""
        self._handle(partial(self.state.fail, failure, heard=True))

    def fail_everywhere(self, failure: GroupFailure) -> GroupFailure:
        """Makes this the group's failure unless it has one, tells the other ranks, and returns the group's failure."""
        self._handle(partial(self.state.fail, failure, heard=False))
        return self.state.failure or failure

    def rank_left(self, rank: int, last_sequence: int, error: str = "") -> None:
        self._handle(partial(self.state.leave, rank, last_sequence, error))

    def where(self) -> tuple[int, str]:
        return self.state.where(time.monotonic())


class WatchConnection:
    """The connection with one rank, on the I/O loop. Messages are sent in order, and wait until the rank reads."""

    def __init__(self, rank: int, sock: StreamSocket, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.rank = rank
        self.sock = sock
        self.descriptors = ReceivedDescriptors(f"rank {rank}")
        self._unix = sock if isinstance(sock, socket.socket) and sock.family == socket.AF_UNIX else None
        self._max_message_bytes = max_message_bytes
        self._received = bytearray()  # and not returned yet
        self._unsent: deque[tuple[bytes, Segment | None]] = deque()
        self._all_sent = asyncio.Event()
        self._all_sent.set()
        self._error: OSError | ProtocolViolation | None = None  # of a write; the system reports it only once
        self._num_unsent = 0  # bytes
        sock.setblocking(False)
        _notice_silence(sock)

    def post(self, data: bytes, segment: Segment | None = None) -> None:
        """Sends encoded messages, when the connection takes them.

        Args:
            segment: passed with the first message; only over a Unix socket.
        """
        if self._num_unsent > MAX_UNSENT_BYTES:
            self._break(ProtocolViolation(f"it has left {self._num_unsent} bytes of the group's watch unread"))
            return
        self._unsent.append((data, segment))
        self._num_unsent += len(data)
        if len(self._unsent) == 1:
            self._write()

    async def flush(self) -> None:
        """Waits until all messages are sent, or the connection has broken; bounded."""
        await ends_within(self._all_sent.wait(), ANSWER_LIMIT_S)

    def _write(self) -> None:
        """Sends what the connection takes; the loop calls this again when it takes more."""
        try:
            while self._unsent:
                data, segment = self._unsent[0]
                if segment is None:
                    sent = self.sock.send(data, NO_SIGPIPE)
                else:
                    sent = self.sock.sendmsg([data], rights(segment), NO_SIGPIPE)
                self._unsent[0] = data[sent:], None
                self._num_unsent -= sent
                if sent == len(data):
                    self._unsent.popleft()
        except BlockingIOError:
            if self._all_sent.is_set():
                self._all_sent.clear()
                asyncio.get_running_loop().add_writer(self.sock.fileno(), self._write)
            return
        except OSError as exc:
            self._break(exc)
        else:
            self._stop_writing()

    def _break(self, error: OSError | ProtocolViolation) -> None:
        """Ends the connection, as a part of a message may be sent; its listener reports the first error."""
        self._error = self._error or error
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self._stop_writing()

    def _stop_writing(self) -> None:
        self._unsent.clear()
        self._num_unsent = 0
        if not self._all_sent.is_set():
            self._all_sent.set()
            asyncio.get_running_loop().remove_writer(self.sock.fileno())

    async def receive(self) -> Message | None:
        """Returns the next message; None at the end of the stream. Waits as long as the peer lives.

        Raises:
            OSError: the connection broke.
            ProtocolViolation: the peer sent something else, or does not read.
        """
        while (data := self._first_received()) is None:
            await asyncio.sleep(0)  # others have a turn, however much this peer sends
            more = await self._some(_READ_BYTES)
            if not more:
                if self._error is not None:
                    raise self._error
                return None
            self._received += more
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as exc:  # the latter for nested brackets
            raise ProtocolViolation(f"rank {self.rank} sent a watch message that is not JSON") from exc
        if not isinstance(message, dict):
            raise ProtocolViolation(f"rank {self.rank} sent a watch message that is no object")
        return message

    def _first_received(self) -> bytes | None:
        """Takes the first message out of the received bytes; None if they do not contain all of it."""
        received = self._received
        if len(received) < _HEAD_BYTES:
            return None
        end = _HEAD_BYTES + int.from_bytes(received[:_HEAD_BYTES], "big")
        if end - _HEAD_BYTES > self._max_message_bytes:
            raise ProtocolViolation(f"rank {self.rank} announced a watch message of {end - _HEAD_BYTES} bytes")
        if len(received) < end:
            return None
        data = bytes(received[_HEAD_BYTES:end])
        del received[:end]
        return data

    def has_ended(self) -> bool:
        """Whether the peer has closed the connection, so that `receive` does not wait."""
        poller = select.poll()
        poller.register(self.sock, select.POLLRDHUP)
        return bool(poller.poll(0))

    async def _some(self, size: int) -> bytes:
        """Like `receive_some`, and keeps the descriptors that come along."""
        if self._unix is None:
            return await receive_some(self.sock, size)
        while True:
            try:
                data, ancillary, flags, _ = self._unix.recvmsg(size, ANCILLARY_BYTES, CLOSE_ON_EXEC)
            except BlockingIOError:
                await until_ready(self._unix, for_writing=False)
                continue
            if ancillary or flags & CUT_OFF:
                self.descriptors.add(ancillary, flags)
            return data

    def close(self) -> None:
        self._stop_writing()  # first: uvloop ends the process if a socket that it watches is closed
        self.descriptors.close()
        self.sock.close()


def integer(message: Message, key: str) -> int:
    """Returns a number of a message. Raises ProtocolViolation if this key has none."""
    value = message.get(key)
    if type(value) is not int:
        raise ProtocolViolation(f"a watch message has {value!r} where a number belongs ({key})")
    return value


def _notice_silence(sock: StreamSocket) -> None:
    """Makes the kernel end a connection whose peer is cut off."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    keep_alive(sock, GROUP_SILENCE_LIMIT_S // 4, GROUP_SILENCE_LIMIT_S // 4)
    break_when_silent(sock, GROUP_SILENCE_LIMIT_S)


logger = logging.getLogger(__name__)


def _memory_message(segment: Segment | None) -> Message:
    return {"say": "memory", "size": 0 if segment is None else segment.size_bytes}


class Watch(Reporter):
    """One rank's end of the watch; see the module's docstring.

    Attributes:
        memory: the memory that rank 0 makes and passes to this rank, at most once; None if rank 0 cannot make it.
    """

    def __init__(self, node: Node, rank: int, world_ranks: tuple[int, ...], group: str, listener: StateKeeper) -> None:
        self._node = node
        self._rank = rank
        self._world_ranks = world_ranks
        self._group = group
        self._listener = listener
        self._connections: dict[int, WatchConnection] = {}
        self._listeners: dict[int, asyncio.Task[object]] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._departed: set[int] = set()  # ranks that left in order: the end of their connection is not a failure
        self._question = 0  # the number of the last question, so that a late answer to an earlier one is ignored
        self._answers: dict[int, tuple[int, str]] = {}
        self._answered = asyncio.Event()
        self._asking = False  # rank 0: set when the first rank times out; the verdict is for all ranks
        self._passed_error = False  # rank 0: it has passed on the error of a rank that left
        self._has_reported = False  # rank 0: it has sent the first failure, the final one
        self._closing = False
        self._exchanges = 0  # the number of finished ones
        self._values: dict[int, str] = {}  # rank 0: the values for the current exchange, by rank
        self._exchange: Future[list[str]] = Future()  # the current exchange, once this rank takes part in it
        self._memory_for: Callable[[list[str]], int] | None = None
        self.memory: Future[Segment | None] = Future()

    def take_connections(self, sockets: dict[int, StreamSocket]) -> None:
        """Takes over the connections: on rank 0 with every other rank, elsewhere with rank 0. Any thread, once."""
        most = MAX_MESSAGE_BYTES + (0 if self._rank == 0 else _VALUE_BYTES * len(self._world_ranks))
        self._connections = {rank: WatchConnection(rank, sock, most) for rank, sock in sockets.items()}
        self._node.io.call_soon(self._start)

    def _start(self) -> None:
        for rank, connection in self._connections.items():
            self._listeners[rank] = self._spawn(self._listen(connection), f"with rank {rank}")

    def _spawn(self, coroutine: Coroutine[object, object, object], what: str) -> asyncio.Task[object]:
        task = self._node.io.spawn(coroutine, f"rpcdist watch of group {self._group} {what}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ------------------------------------------------------------ exchanges

    def exchange(self, value: str, memory_for: Callable[[list[str]], int] | None = None) -> Future[list[str]]:
        """Returns a future of the texts of all ranks, by rank; all ranks call it, in the same order.

        Any thread may call it, one at a time. A text that is too long is cut. If the group fails or a rank leaves, the
        future is cancelled; the state keeper has got the reason. An earlier event does not cancel it.

        Args:
            memory_for: at rank 0, called with the texts on the I/O loop; returns the size of memory that all ranks get
                together with the texts, if it is not 0. Then all of them have Unix sockets.
        """
        self._exchange = Future()
        self._memory_for = memory_for
        self._post({"say": "value", "number": self._exchanges, "value": value[:MAX_VALUE_CHARS]})
        return self._exchange

    def missing(self) -> list[int]:
        """At rank 0: the ranks that have not joined the current exchange."""
        return [rank for rank in range(len(self._world_ranks)) if rank not in self._values]

    def _value_received(self, rank: int, message: Message) -> None:
        value = message.get("value")
        # No rank can be in a later exchange than rank 0, or send two values for one.
        if integer(message, "number") != self._exchanges or not isinstance(value, str) or rank in self._values:
            raise ProtocolViolation(f"rank {rank} sent a value for an exchange that is not in progress")
        if len(value) > MAX_VALUE_CHARS:  # the others would not take the message of rank 0 with it
            raise ProtocolViolation(f"rank {rank} sent a value of {len(value)} characters")
        self._values[rank] = value
        if len(self._values) == len(self._world_ranks):
            values = [self._values[rank] for rank in range(len(self._world_ranks))]
            self._values.clear()
            news: Message = {"say": "values", "number": self._exchanges, "values": values}
            if size_bytes := 0 if self._memory_for is None else self._memory_for(values):
                segment = self._make_memory(size_bytes)
                self._send_to(self._connections, _memory_message(segment), news, segment=segment)
            else:
                self._send(news)
            self._complete_exchange(values)

    def _values_received(self, message: Message) -> None:
        values = message.get("values")
        is_under_way = integer(message, "number") == self._exchanges and not self._exchange.done()
        if not is_under_way or not isinstance(values, list) or len(values) != len(self._world_ranks):
            raise ProtocolViolation("rank 0 sent values of an exchange that is not in progress")
        if not set(map(type, values)) <= {str}:
            raise ProtocolViolation("rank 0 sent values that are not texts")
        self._complete_exchange(values)

    def _complete_exchange(self, values: list[str]) -> None:
        self._exchanges += 1
        if not self._exchange.done():
            self._exchange.set_result(values)

    # ------------------------------------------------------------ memory

    def _make_memory(self, size_bytes: int) -> Segment | None:
        segment: Segment | None = None
        try:
            segment = Segment.create(size_bytes)
        except SegmentError as exc:
            logger.warning("rank 0 of group %s makes no memory for the ranks of its host: %s", self._group, exc)
        self.memory.set_result(segment)
        return segment

    def pass_memory(self, segment: Segment | None, ranks: Iterable[int]) -> None:
        """At rank 0: passes memory, or the news that there is none, to ranks with Unix sockets. Any thread.

        The loop sends it later, so only its last owner may close it.
        """
        self._node.io.call_soon(partial(self._send_to, ranks, _memory_message(segment), segment=segment))

    def _memory_received(self, sender: int, size_bytes: int) -> None:
        try:
            if not size_bytes:
                self.memory.set_result(None)
                return
            descriptor = self._connections[sender].descriptors.take()
            if descriptor is None:
                raise SegmentError("this process had no free descriptor for it")
            self.memory.set_result(Segment.received(descriptor, size_bytes))
        except SegmentError as exc:
            self.memory.set_exception(exc)

    # ------------------------------------------------------------ Reporter (any thread)

    def report(self, failure: GroupFailure) -> None:
        self._post({"say": "failure", **failure.to_json()})

    def report_timeout(self, title: str, sequence: int) -> bool:
        self._post({"say": "timeout", "title": title, "sequence": sequence})
        return bool(self._connections)

    def explains_losses(self) -> bool:
        return bool(self._connections)  # rank 0 sees the end of its own connection with that rank, and sends the reason

    def _post(self, message: Message) -> None:
        try:
            self._node.io.call_soon(self._post_here, message)
        except RpcdistError:
            logger.debug("the I/O loop is closed, so group %s does not get the message %s", self._group, message)

    def _post_here(self, message: Message) -> None:
        if self._closing:
            return
        if self._rank == 0:  # rank 0 has no connection with itself
            self._handle(0, message)
        else:
            self._send(message)

    def _send(self, message: Message, skip: int = -1) -> None:
        """Sends to every peer except `skip`; does not wait."""
        self._send_to([rank for rank in self._connections if rank != skip], message)

    def _send_to(self, ranks: Iterable[int], *messages: Message, segment: Segment | None = None) -> None:
        data = b"".join(map(encoded, messages))
        for rank in ranks:
            connection = self._connections.get(rank)
            if connection is not None:
                connection.post(data, segment)

    # ------------------------------------------------------------ I/O loop

    async def _listen(self, connection: WatchConnection) -> None:
        reason = "its process ended"
        try:
            while (message := await connection.receive()) is not None:
                self._handle(connection.rank, message)
        except (ProtocolViolation, ValueError) as exc:
            reason = str(exc)
        except OSError as exc:
            reason = f"its process ended or its host cannot be reached ({exc.strerror or exc})"
        finally:
            self._connections.pop(connection.rank, None)
            connection.close()
        # The process died if its stream ends without a `left`; the kernel closes the stream of a killed process.
        if connection.rank not in self._departed and not self._closing:
            self._lost(connection.rank, reason)

    def _handle(self, sender: int, message: Message) -> None:
        say = message.get("say")
        if say == "failure":
            self._failed(GroupFailure.from_json(message), sender)
        elif say == "left":
            self._left(integer(message, "rank"), integer(message, "sequence"), str(message.get("error", "")), sender)
        elif say == "where" and self._rank != 0:  # its answer goes to rank 0
            sequence, text = self._listener.where()
            answer: Message = {"say": "here", "question": message.get("question"), "sequence": sequence, "text": text}
            self._send(answer)
        elif say == "timeout" and self._rank == 0:
            if not self._asking:
                self._asking = True
                self._spawn(self._find_missing(str(message.get("title")), integer(message, "sequence")), "asks")
        elif say == "value" and self._rank == 0:
            self._value_received(sender, message)
        elif say == "values" and self._rank != 0:
            self._values_received(message)
        elif say == "memory" and self._rank != 0 and not self.memory.done():
            self._memory_received(sender, integer(message, "size"))
        elif say == "here" and self._rank == 0:
            if message.get("question") == self._question:
                self._answers[sender] = integer(message, "sequence"), str(message.get("text"))[:MAX_REASON_LENGTH]
                self._answered.set()
        else:
            raise ProtocolViolation(f"rank {sender} sent a watch message that rank {self._rank} does not know: {say!r}")

    def _failed(self, failure: GroupFailure, sender: int) -> None:
        self._listener.fail(failure)
        self._exchange.cancel()  # it may never be complete
        if self._rank == 0 and not self._has_reported:
            self._has_reported = True
            self._send({"say": "failure", **failure.to_json()}, skip=sender)

    def _left(self, rank: int, sequence: int, error: str, sender: int) -> None:
        # A rank may announce only its own departure; rank 0 passes on those of others.
        if not 0 <= rank < len(self._world_ranks) or (self._rank == 0 and rank != sender):
            raise ProtocolViolation(f"rank {sender} said that rank {rank} left")
        if rank in self._departed:
            return
        self._departed.add(rank)
        error = error[:_LONGEST_ERROR].encode(errors="backslashreplace").decode()
        self._listener.rank_left(rank, sequence, error)
        self._exchange.cancel()  # it may never be complete
        if self._rank == 0 and rank != 0:
            # The errors of later ranks are mostly consequences, and too much for a peer that stands still.
            first, self._passed_error = "" if self._passed_error else error, self._passed_error or bool(error)
            self._send({"say": "left", "rank": rank, "sequence": sequence, "error": first}, skip=sender)

    def _lost(self, rank: int, reason: str) -> None:
        world_rank = self._world_ranks[rank]
        self._failed(GroupFailure(RankLost, f"rank {world_rank} was lost: {reason}", (rank,)), rank)

    async def _find_missing(self, title: str, sequence: int) -> None:
        """Asks every rank where it is, then tells all of them which ranks did not call the operation."""
        self._question += 1
        self._answers = {0: self._listener.where()}
        others = set(self._connections)
        self._send({"say": "where", "question": self._question})
        # The verdict names the ranks that did not answer: they are stopped, or their I/O loop is stuck.
        with suppress(TimeoutError):
            async with asyncio.timeout(GROUP_ANSWER_LIMIT_S):
                while not others <= self._answers.keys():
                    self._answered.clear()
                    await self._answered.wait()
        self._failed(timeout_verdict(title, sequence, self._answers, self._world_ranks), 0)

    # ------------------------------------------------------------ life

    def close(self, sequence: int, timeout_s: float = 2 * ANSWER_LIMIT_S) -> None:
        """Announces that this rank leaves after `sequence` operations, and closes. Bounded; idempotent.

        If the calling thread handles an error, or the program ends with one, the other ranks get its text.
        """
        error = ending_error()
        text = "" if error is None else described_error(error)[:_LONGEST_ERROR]
        try:
            self._node.io.finish(self._close(sequence, text), timeout_s)
        except (RpcdistError, OSError) as exc:
            logger.debug("the watch of group %s closed without announcing that this rank leaves: %s", self._group, exc)

    async def _report_last_losses(self) -> None:
        """Waits until the listeners have reported ranks that just died, since only rank 0 can tell the others."""
        ended = [self._listeners[rank] for rank, connection in self._connections.items() if connection.has_ended()]
        if ended:
            await asyncio.wait(ended, timeout=ANSWER_LIMIT_S)

    async def _close(self, sequence: int, error: str = "") -> None:
        if self._closing:
            return
        if self._rank == 0:
            await self._report_last_losses()
        if self._connections:  # before `_closing`, after which the end of a connection is not a failure
            self._send({"say": "left", "rank": self._rank, "sequence": sequence, "error": error})
            await asyncio.gather(*(connection.flush() for connection in self._connections.values()))
        self._closing = True
        tasks = self._tasks - {asyncio.current_task()}
        for connection in list(self._connections.values()):
            connection.sock.shutdown(socket.SHUT_WR)  # the peer gets the sent bytes before the end of the stream
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_STEP_LIMIT_S)
