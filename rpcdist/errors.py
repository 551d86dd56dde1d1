"""Every error that rpcdist raises, in one tree.

    RpcdistError (RuntimeError)
    ├── ConfigError (ValueError)            an argument or option is wrong
    ├── NotInitialized                      used before init_rpc or after shutdown
    ├── AlreadyInitialized
    ├── ForkedProcess                       used in a child forked from a running process
    ├── BlockingInLoop                      a blocking wait on an event loop's thread
    ├── TransportError (ConnectionError)
    │   ├── ConnectFailed (DistNetworkError)   no process answered at the address
    │   ├── AuthenticationFailed            the job token was not proven
    │   ├── ProtocolViolation               the peer sent a forbidden message
    │   └── WorkerLost                      a peer died, or its connection broke, with work in flight
    │       ├── CoordinatorLost             it died, and no process took its place
    │       └── OwnerLost                   a peer that owned a remote reference died
    ├── RendezvousError                     the processes of a job did not find each other
    │   ├── DuplicateName
    │   ├── JobEnded                        the job had finished when this process came
    │   └── WorldMismatch
    ├── UnknownWorker
    ├── DeadlineExceeded (TimeoutError)
    ├── Cancelled
    ├── CheckpointError                     a checkpoint could not be written or read together
    ├── ProcessFailed                       a process that `rpcdist.launch` started failed
    ├── SerializationError (TypeError)      a value cannot be sent, or cannot be rebuilt
    ├── RemoteError                         the other side failed, and its exception could not be rebuilt here
    │   └── FunctionNotFound (AttributeError)   the callee has no such function
    ├── CallRefused                         the callee's policy does not allow this
    ├── PoolExhausted                       the worker thread limit is reached, and every thread waits
    ├── Overloaded                          calls that have not ended fill the bound of their caller, or of the callee
    ├── AutogradError                       a context or a backward pass cannot be used in this way
    │   ├── ContextNotFound
    │   └── BackwardError                   the pass failed, here or on another worker
    ├── RRefError
    │   └── LeaseExpired                    the owner dropped this user's references
    └── DistError
        ├── DistBackendError
        │   └── CollectiveError             an operation of a process group failed
        │       ├── CollectiveMismatch (ValueError)   the ranks called different operations
        │       ├── CollectiveTimeout (TimeoutError)  some ranks did not arrive in time
        │       ├── RankLost (ConnectionError)        a rank died, or its connection broke
        │       └── GroupAborted                      the group was aborted, here or elsewhere
        ├── DistNetworkError
        └── DistStoreError
            ├── QueueEmptyError
            └── StoreTimeout (TimeoutError)

The base classes are those that torch raises in the same places, so `except RuntimeError` in ported programs works.
Exceptions carry fields, from which they build the text. All of them can be pickled.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Final, NoReturn, ParamSpec, TypeVar

MAX_TEXT: Final = 64 * 1024  # characters of a traceback or message; a failing call must not become a large one

P = ParamSpec("P")
T = TypeVar("T")


def listed(items: Iterable[object], limit: int = 10) -> str:
    """Names or ranks as a text for a message: the first ones, and the number of others; empty for none."""
    texts = list(map(str, items))
    return ", ".join(texts[:limit]) + (f" and {len(texts) - limit} more" if len(texts) > limit else "")


def abridged(value: object, depth: int = 2) -> str:
    """A value of a peer, for a message: short, and in bounded time. `repr` of lists that share lists may not end."""
    if isinstance(value, str | bytes):
        return repr(value[:200])
    if isinstance(value, list | tuple) and depth:
        texts = [abridged(item, depth - 1) for item in value[:4]]
        return f"({', '.join(texts)}{', ...' if len(value) > len(texts) else ''})"
    is_short = value is None or isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 64)
    return repr(value) if is_short else f"a {type(value).__name__}"


def described(what: str, describe: Callable[[], str]) -> str:
    """The result of `describe` in a form that can be sent, or a text that says that it failed; raises nothing."""
    try:
        # UTF-8 has no surrogate halves, which file names may have; a subclass of `str` may override any method.
        return str.encode(describe(), "utf-8", "backslashreplace").decode()
    except BaseException as why:
        return f"<{what} failed: {type.__repr__(type(why))}>"


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """The beginning of a text, with a mark if the rest is missing."""
    return text if len(text) <= limit else f"{text[:limit]}... [{len(text) - limit} characters cut]"


def text_of(exc: BaseException) -> str:
    """The text of an exception, cut to `MAX_TEXT`; raises nothing."""
    return described("str() of the exception", lambda: cut(str(exc)))


def described_error(exc: BaseException) -> str:
    """The class and the text of an exception; raises nothing."""
    name, text = described("the name of the type", lambda: type(exc).__name__), text_of(exc)
    return f"{name}: {text}" if text else name


def refuse_pickling(value: object, _protocol: object = None) -> NoReturn:
    """The `__reduce_ex__` of what belongs to one process: it cannot be pickled, sent or copied."""
    raise TypeError(
        f"cannot pickle {type(value).__name__!r} object: it belongs to the process that created it. Send the values "
        "from which it was created, and leave it out of the objects that contain it (`__getstate__`)"
    )


@contextmanager
def on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` if the block raises anything; the error continues."""
    try:
        yield
    except BaseException:
        undo()
        raise


@contextmanager
def raised_as(kind: Callable[[str], Exception], text: str, *errors: type[Exception]) -> Iterator[None]:
    """Replaces such errors of the block by `kind` with the text, a colon and the reason of the error, its cause."""
    try:
        yield
    except errors as exc:
        raise kind(f"{text}: {getattr(exc, 'strerror', None) or exc}") from exc


class RpcdistError(RuntimeError):
    """Base of every error of this package."""


class ConfigError(RpcdistError, ValueError, AssertionError):
    """An argument, option or environment variable is wrong; the text says which and what to write instead.

    Torch raises a RuntimeError, a ValueError or an AssertionError for such arguments, and it is all of these.
    """


class NotInitialized(RpcdistError):
    """RPC was used before `init_rpc`, or after `shutdown`."""

    def __init__(self, text: str | None = None) -> None:
        super().__init__(
            text
            or "RPC has not been initialized. Call rpcdist.rpc.init_rpc (torch: torch.distributed.rpc.init_rpc) first."
        )


class AlreadyInitialized(RpcdistError):
    """`init_rpc` was called twice without `shutdown` between."""


class ForkedProcess(RpcdistError):
    """The process was forked from one that runs rpcdist, and connections do not survive a fork."""

    def __init__(self) -> None:
        super().__init__(
            "this process was forked from one that runs rpcdist, and its connections belong to the parent. "
            "Do not call rpcdist here, or start the process with the 'spawn' method."
        )


class BlockingInLoop(RpcdistError):
    """A blocking wait was called on the thread of an event loop, which it would block."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(what, instead)
        self.what = what
        self.instead = instead

    def __str__(self) -> str:
        return f"{self.what} would block the event loop of this thread; write `{self.instead}` instead"


class DistError(RpcdistError):
    """Base of the errors of stores and collectives, named as in torch.distributed."""


class DistNetworkError(DistError):
    """The network failed under a collective operation or a store."""


class TransportError(RpcdistError, ConnectionError):
    """Base of the errors between two processes."""


class ConnectFailed(TransportError, DistNetworkError):
    """No process answered at an address in time."""

    def __init__(self, address: str, reason: str, waited_s: float | None = None) -> None:
        super().__init__(address, reason, waited_s)
        self.address = address
        self.reason = reason
        self.waited_s = waited_s

    def __str__(self) -> str:
        waited = "" if self.waited_s is None else f" after {self.waited_s:.1f} s"
        return f"could not connect to {self.address}{waited}: {self.reason}"


class AuthenticationFailed(TransportError):
    """One side could not prove that it knows the job token."""


class ProtocolViolation(TransportError):
    """The peer sent a message that the protocol does not allow; its connection was closed."""


ALTHOUGH_IT_LIVES = "although it lives"
"""Part of the reason of a `WorkerLost` for a worker that cannot be reached, but has a connection to this process."""


class WorkerLost(TransportError):
    """A worker died or became unreachable while a call or operation waited for it.

    Attributes:
        worker: its name.
        what: the call or operation that waited.
        last_seen_s: seconds from its last sign of life to the declaration of the loss.
        reason: the observation behind the loss.
        was_sent: whether the call was sent, so that it may have run; None if no call waited.
    """

    def __init__(self, worker: str, what: str, last_seen_s: float, reason: str, was_sent: bool | None = None) -> None:
        super().__init__(worker, what, last_seen_s, reason, was_sent)
        self.worker = worker
        self.what = what
        self.last_seen_s = last_seen_s
        self.reason = reason
        self.was_sent = was_sent

    def __str__(self) -> str:
        ran = "It is unknown whether the call ran." if self.was_sent else "The call was not sent, so it did not run."
        lives = ALTHOUGH_IT_LIVES in self.reason
        hint = "" if lives else f" If {self.worker!r} was not killed, did it end without rpc.shutdown()?"
        return (
            f"worker {self.worker!r} was lost during {self.what}: {self.reason} "
            f"(last seen {self.last_seen_s:.1f} s ago).{'' if self.was_sent is None else f' {ran}'}{hint}"
        )


class CoordinatorLost(WorkerLost):
    """The coordinator, mostly rank 0, died, and no process took its place in time."""

    def __str__(self) -> str:
        return (
            f"the coordinator {self.worker!r} was lost, and {self.reason}. This worker ends {self.what}. Start its "
            "replacement (rank 0 by default) sooner, or set RpcOptions(orphan_timeout=...)."
        )


class OwnerLost(WorkerLost):
    """The owner of a remote reference died, so the value is lost."""

    def __str__(self) -> str:
        return (
            f"the owner {self.worker!r} of this remote reference was lost ({self.reason}; last seen "
            f"{self.last_seen_s:.1f} s ago) during {self.what}; its value is gone. Create it again on a living worker."
        )


class RendezvousError(RpcdistError):
    """The processes of a job did not find each other."""


class DuplicateName(RendezvousError):
    """Two workers of a job have the same name or rank."""


class JobEnded(RendezvousError):
    """An elastic job had finished before this process joined it."""


class WorldMismatch(RendezvousError):
    """Processes disagree about the size or the kind of the world."""


class UnknownWorker(RpcdistError):
    """No worker of that name or rank is known."""

    def __init__(self, me: str, wanted: str, known: Sequence[str] = ()) -> None:
        super().__init__(me, wanted, tuple(known))
        self.me = me
        self.wanted = wanted
        self.known = tuple(known)

    def __str__(self) -> str:
        near = difflib.get_close_matches(self.wanted, self.known, 1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        known = f" Known workers: {', '.join(self.known)}." if self.known else ""
        return f"{self.me} could not find destination {self.wanted}.{meant}{known}"


class ActorNameTaken(RpcdistError):
    """Another actor of this job already has the name, which it keeps until its worker ends."""


class UnknownActor(RpcdistError):
    """No actor of that name is known."""

    def __init__(self, wanted: str, known: Sequence[str] = ()) -> None:
        super().__init__(wanted, tuple(known))
        self.wanted = wanted
        self.known = tuple(known)

    def __str__(self) -> str:
        near = difflib.get_close_matches(self.wanted, self.known, 1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        return f"no actor has the name {self.wanted!r}; rpc.remote(..., name={self.wanted!r}) creates one.{meant}"


class DeadlineExceeded(RpcdistError, TimeoutError):
    """The time limit of an operation is over."""


class Cancelled(RpcdistError):
    """The call was cancelled by the caller."""


class CheckpointError(RpcdistError):
    """Saving or loading a checkpoint failed on a rank, or workers see different folders; the text says where."""


class ProcessFailed(RpcdistError):
    """A process that `rpcdist.launch` started failed; it is the first one that did.

    Attributes:
        rank: the rank of the process.
        what: its end, such as "raised ValueError" or "was killed by SIGKILL".
        traceback: the traceback of its exception; empty if it ended without one.
        exit_code: its exit code if it ended without an exception, or the negative number of the signal that killed it.
        worker: its name, if it has a role.
        output: the last lines that it wrote to stdout and stderr.
        outcomes: the end of each process, by name: "returned", "raised ValueError", "stopped" and so on.
    """

    def __init__(self, rank: int, what: str, traceback: str = "", exit_code: int | None = None) -> None:
        super().__init__(rank, what, traceback, exit_code)
        self.rank = rank
        self.what = what
        self.traceback = traceback
        self.exit_code = exit_code
        self.worker = ""
        self.output = ""
        self.outcomes: dict[str, str] = {}

    def __str__(self) -> str:
        name = f"{self.worker} (rank {self.rank})" if self.worker else f"rank {self.rank}"
        if self.traceback:
            return f"{name} {self.what}\n\n{self.traceback.rstrip()}"
        return f"{name} {self.what}" + (f"; its last lines:\n\n{self.output.rstrip()}" if self.output else "")


class SerializationError(RpcdistError, TypeError):
    """A value cannot be sent, or a received value cannot be rebuilt."""


class RemoteError(RpcdistError):
    """The other side failed with an exception that could not be rebuilt here.

    Attributes:
        worker: the worker that failed.
        type_name: the type of the exception there.
        text: its text.
        traceback: the remote traceback.
    """

    def __init__(self, worker: str, type_name: str, text: str, traceback: str = "") -> None:
        super().__init__(worker, type_name, text, traceback)
        self.worker = worker
        self.type_name = type_name
        self.text = text
        self.traceback = traceback

    def __str__(self) -> str:
        return (
            f"On worker {self.worker!r}: the exception could not be rebuilt here. "
            f"Original exception on remote side was {self.type_name}: {self.text}\n{self.traceback}"
        ).rstrip()


class FunctionNotFound(RemoteError, AttributeError):
    """The callee has no function of that name; define it in a module that both sides can import."""

    def __str__(self) -> str:
        return f"On worker {self.worker!r}: {self.text}"


class CallRefused(RpcdistError):
    """The callee's policy does not allow this function or this kind of value from this peer."""


class PoolExhausted(RpcdistError):
    """The cap on worker threads is reached while all of them wait."""


class Overloaded(RpcdistError):
    """A call was not sent, or not accepted: earlier calls to that worker fill the limit of this or the other side."""


class RRefError(RpcdistError):
    """A remote reference cannot be used in this way, or not any more."""


class LeaseExpired(RRefError):
    """The owner received nothing from this process for too long, and dropped its references."""


class DistBackendError(DistError):
    """A collective operation failed."""


class CollectiveError(DistBackendError):
    """An operation of a process group failed; the group cannot be used any more.

    Attributes:
        operation: the operation with its sequence number, such as "all_reduce #41 of group 'default'".
        reason: the cause, with the rank.
        ranks: the ranks that caused it, in the group of the operation; empty if it is not known.
    """

    def __init__(self, operation: str, reason: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(operation, reason, tuple(ranks))
        self.operation = operation
        self.reason = reason
        self.ranks = tuple(ranks)

    def __str__(self) -> str:
        return f"{self.operation} failed: {self.reason}"


def begins_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """Makes the traceback of each `CollectiveError` begin in this function.

    The error names group, operation, rank and reason. The frames of the engine would only hide the calling line of the
    program.
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except CollectiveError as exc:
            raise exc.with_traceback(None) from exc.__cause__

    return called


class CollectiveMismatch(CollectiveError, ValueError):
    """The ranks of a group called different operations, or the same with different arguments; all ranks raise this."""


class CollectiveTimeout(CollectiveError, TimeoutError):
    """An operation did not finish in time; the text names the ranks that did not arrive.

    Attributes:
        ranks: those ranks, in the group of the operation; empty if all have arrived, or if it is not known.
    """


class RankLost(CollectiveError, ConnectionError):
    """A rank of the group died, or its connection broke, before the operation was done.

    Attributes:
        ranks: the ranks, in the group of the operation.
    """

    def __str__(self) -> str:
        return f"{super().__str__()} (Connection closed by peer)"  # torch's words, which programs look for


class GroupAborted(CollectiveError):
    """The group was aborted or destroyed, here or on another rank, while the operation ran or before it."""


class DistStoreError(DistError):
    """A store operation failed."""


class StoreTimeout(DistStoreError, TimeoutError):
    """A key did not appear in the store in time."""


class QueueEmptyError(DistStoreError):
    """A queue of the store is empty."""


class AutogradError(RpcdistError):
    """A context, or the graph of a backward pass, cannot be used in this way."""


class ContextNotFound(AutogradError):
    """No autograd context of that id is alive on this worker."""

    def __init__(self, context_id: int) -> None:
        super().__init__(context_id)
        self.context_id = context_id

    def __str__(self) -> str:
        return (
            f"Could not find autograd context with id: {self.context_id}. Contexts end with their `with` block; use "
            "them inside it, on workers that were called from it"
        )


class BackwardError(AutogradError):
    """A backward pass failed on some worker, and was ended on all of them. Its gradients are incomplete.

    Attributes:
        node: id of the worker on which the pass failed.
        worker: name of that worker.
        type_name: type of the exception there.
        text: text of the exception.
        traceback: traceback of the exception, if it was raised on another worker.
    """

    def __init__(self, node: int, worker: str, type_name: str, text: str, traceback: str = "") -> None:
        super().__init__(node, worker, type_name, text, traceback)
        self.node = node
        self.worker = worker
        self.type_name = type_name
        self.text = text
        self.traceback = traceback

    def __str__(self) -> str:
        return f"Error on Node {self.node}: {self.text} ({self.type_name} on worker {self.worker!r})"


__all__ = ["begins_traceback", "listed", "on_error", "raised_as", "refuse_pickling"]
__all__ += [name for name, value in globals().items() if isinstance(value, type) and issubclass(value, RpcdistError)]
