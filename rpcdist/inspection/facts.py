"""A worker's facts about itself: plain data, the same in Python and in JSON.

Rules, on which other programs rely:

 1. Names of fields stay. New fields have a default and come at the end, so that facts of another version can be read.
 2. Durations are in seconds (`_s`), sizes in bytes, `time_ns` in nanoseconds since the epoch. None: unknown, or none.
 3. Lists are bounded; `omitted` of `WorkerFacts` has the number of omitted entries of each list.
 4. Ids are unique in one worker. `session` and `id` are equal at both ends of a call.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class CallMade:
    """A call that this worker has made and that has not ended.

    Attributes:
        id: its number.
        session: the connection that carries it, in hexadecimal; empty before it is sent.
        function: the called function, or "to_here() of ..." for a fetched value.
        to: the name of the callee.
        phase: "unsent", "sending", or "waiting" for the reply.
        age_s: the time since it was made.
        remaining_s: the time until its deadline.
        bytes_done: the sent bytes of its large arguments.
        bytes_total: the size of its large arguments, while they are being sent.
        counts_as_work: whether a shutdown waits for it, unlike for barriers and similar calls.
    """

    id: int
    session: str
    function: str
    to: str
    phase: str
    age_s: float
    remaining_s: float | None = None
    bytes_done: int = 0
    bytes_total: int = 0
    counts_as_work: bool = True


@dataclass(frozen=True, slots=True)
class CallServed:
    """A call of another worker, or of this one to itself, that this worker handles.

    Attributes:
        id: its number at the caller.
        session: the connection through which it came, in hexadecimal.
        function: the called function.
        caller: the name of the calling worker.
        phase: "queued" for a thread; "in line" for its turn at an actor; "running"; "waiting" for a value that does not
            exist yet, or for the future that its function has returned; "producing" the items of a stream.
        age_s: the time since it arrived.
        running_s: the time since its function was called.
        remaining_s: the time until its caller's deadline.
        is_cancelled: whether its caller has cancelled it.
        thread: the thread that runs it; see `ThreadState.id`.
        stack: the stack of its coroutine, the outermost line first; empty if a thread runs it, whose stack is in
            `threads`.
        waits_for: numbers of the calls made here that its coroutine awaits, or whose future its function has returned.
        on: the reference whose value is fetched, or whose method is called; empty for none.
        creates: the reference to its result; empty for none.
        is_coroutine: whether it runs on the event loop of handlers.
    """

    id: int
    session: str
    function: str
    caller: str
    phase: str
    age_s: float
    running_s: float | None = None
    remaining_s: float | None = None
    is_cancelled: bool = False
    thread: int | None = None
    stack: tuple[Frame, ...] = ()
    waits_for: tuple[int, ...] = ()
    on: str = ""
    creates: str = ""
    is_coroutine: bool = False


@dataclass(frozen=True, slots=True)
class ThreadState:
    """A thread and its activity.

    Attributes:
        id: its number from `threading.get_ident`.
        name: its name.
        stack: the outermost line first; only the innermost lines of a long stack.
        waits_for: numbers of the calls made here for whose results it waits.
        lock: the lock for which it waits, as named in its line; empty for none, or an unknown one.
        lock_holder: the thread in a `with` block of that lock; None if unknown.
        is_callback: whether it runs a callback of a future.
    """

    id: int
    name: str
    stack: tuple[Frame, ...] = ()
    waits_for: tuple[int, ...] = ()
    lock: str = ""
    lock_holder: int | None = None
    is_callback: bool = False


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """A stream that this worker reads, or whose items it produces.

    Attributes:
        id: the number of its call.
        session: the connection that carries it.
        function: the generator function.
        peer: the worker at the other end.
        role: "reads" or "produces".
        num_waiting: items that have arrived and were not taken; for a producer, items that it may make now.
        unread_s: the time since the consumer took an item; None for a producer, and while a thread waits for an item.
    """

    id: int
    session: str
    function: str
    peer: str
    role: str
    num_waiting: int
    unread_s: float | None = None


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker that holds a reference, and for how long."""

    worker: str
    for_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReferenceFacts:
    """A remote reference that this worker owns or holds.

    Attributes:
        id: the id of the value.
        owner: the worker that has the value.
        state: at the owner "expected", "creating" or "ready"; elsewhere "pending", "confirmed" or "parked".
        value: the type of the value, at the owner.
        holders: the known holders, one for each share.
    """

    id: str
    owner: str
    state: str
    value: str = ""
    holders: tuple[Holder, ...] = ()

    def __str__(self) -> str:
        holders = sorted(holder.worker for holder in self.holders)
        return f"{self.id} at {self.owner}: {self.state}, held by {', '.join(holders) or 'nobody'}"


@dataclass(frozen=True, slots=True)
class ContextFacts:
    """An autograd context in which this worker takes part, and the neighbours that share it."""

    id: int
    neighbours: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PassFacts:
    """A backward pass that has not ended on this worker.

    Attributes:
        id: its id.
        context: the id of its autograd context.
        parent: the worker from which it came; empty at the worker where it began.
        waits_for: by worker, why it has not ended here.
        remaining_s: the time until its deadline, at the worker where it began.
    """

    id: int
    context: int
    parent: str = ""
    waits_for: tuple[tuple[str, str], ...] = ()
    remaining_s: float | None = None


@dataclass(frozen=True, slots=True)
class OperationFacts:
    """An operation of a process group that has not ended: its number, name, state ("queued", "running") and age."""

    sequence: int
    name: str
    state: str
    age_s: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A process group of this process.

    Attributes:
        name: its name, equal on all ranks.
        rank: the rank of this process in the group.
        ranks: the ranks of the members in the world.
        backend: the backend of its operations.
        last_sequence: the number of the last collective that this rank has called; 0 for none.
        last_name: the name of that collective.
        operations: the operations in flight.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    backend: str = ""
    last_sequence: int = 0
    last_name: str = ""
    operations: tuple[OperationFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class GatheringFacts:
    """A gathering of workers that this worker hosts, with the workers that have joined and those that have not.

    Attributes:
        kind: "barrier", also for `all_gather`, or "shutdown".
    """

    kind: str
    came: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ActorFacts:
    """An object whose methods run one call at a time.

    Attributes:
        reference: the id of the value.
        running: the running method; empty for none.
        running_s: the time since that method was called.
        num_waiting: the number of calls that are ready to run.
        kind: the class of the object; empty until it exists.
        num_restarts: how often it was made again because its worker was lost.
    """

    reference: str
    running: str = ""
    running_s: float | None = None
    num_waiting: int = 0
    kind: str = ""
    num_restarts: int = 0


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The threads that run synchronous functions; `oldest_s` is the wait of the first job in the queue."""

    threads: int
    idle: int
    running: int
    blocked: int
    queued: int
    lent: int
    max_threads: int
    oldest_s: float | None = None


@dataclass(frozen=True, slots=True)
class ChannelFacts:
    """A connection with another worker.

    Attributes:
        session: its number, the same at both ends, in hexadecimal.
        peer: the worker at the other end.
        opened_here: whether this worker makes its calls on it; otherwise the peer does.
        kind: "local" (a Unix socket), "tcp", "grpc" or "memory".
        tls: whether it is encrypted.
        bytes_sent, bytes_received: since it was opened, without shared memory; None if they are not counted.
        num_queued: messages that wait to be written.
        num_transfers: large buffers that are being written.
        silent_s: the time since the last message of the peer.
        round_trip_s: TCP's estimate.
        shared_sent, shared_received: bytes of large values that were passed in shared memory.
    """

    session: str
    peer: str
    opened_here: bool
    kind: str
    tls: bool = False
    bytes_sent: int | None = None
    bytes_received: int | None = None
    num_queued: int = 0
    num_transfers: int = 0
    silent_s: float = 0.0
    round_trip_s: float | None = None
    shared_sent: int = 0
    shared_received: int = 0


@dataclass(frozen=True, slots=True)
class LentMemory:
    """Shared memory that this worker lends to a peer; the peer has `num_lent` of `num_segments` segments now."""

    peer: str
    num_segments: int
    num_lent: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit, its use, and the number of waiters because of it. `option` is the setting that raises the limit."""

    name: str
    used: int
    limit: int
    num_waiting: int = 0
    option: str = ""


@dataclass(frozen=True, slots=True)
class Strangers:
    """The numbers of connections that this worker has refused or not yet admitted.

    Attributes:
        refused: all refused connections.
        wrong_tokens: those of them with a wrong token.
        silent: connections that began TLS and made no call, as processes with another job token do.
        unproven: connections in the middle of a handshake.
    """

    refused: int = 0
    wrong_tokens: int = 0
    silent: int = 0
    unproven: int = 0


@dataclass(frozen=True, slots=True)
class FunctionTimes:
    """The durations of the calls of a function, among the last calls in the flight recorder.

    Attributes:
        function: its name.
        served: whether the calls were served here; otherwise they were made here.
        count: the number of ended calls.
        failed: the number of them that raised.
        median_s, longest_s: their median and longest duration.
    """

    function: str
    served: bool
    count: int
    failed: int
    median_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class CurveFacts:
    """Numbers that the program has published under a name; see `rpcdist.publish`.

    Attributes:
        name: the name of the curve.
        points: the latest points, as seconds since the epoch and value.
    """

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log record of the program or of rpcdist.

    Attributes:
        number: its number among the notes of this worker; later notes have larger numbers.
        time_s: seconds since the epoch.
        level: such as "WARNING".
        logger: the name of the logger.
        text: the message, with the type and text of an exception; shortened.
    """

    number: int
    time_s: float
    level: str
    logger: str
    text: str


@dataclass(frozen=True, slots=True)
class SpanFacts:
    """An activity of a worker, with times in seconds since the epoch by its clock.

    Attributes:
        number: its number among the notes of this worker; later notes have larger numbers.
        lane: "pipeline", "DDP", "DDP buckets", "backward", or "group NAME" for an operation of a process group.
        name: the name of the activity.
        began_s, ended_s: its start and end.
    """

    number: int
    lane: str
    name: str
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class LiveNotes:
    """A worker's notes for a live view, oldest first, without those that the view has already got."""

    log_lines: tuple[LogLine, ...] = ()
    spans: tuple[SpanFacts, ...] = ()

    @property
    def last_number(self) -> int:
        """The largest number of the notes; 0 for none."""
        lines = max((line.number for line in self.log_lines), default=0)
        return max(lines, max((span.number for span in self.spans), default=0))


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """This worker's knowledge of another worker of the job."""

    name: str
    id: int
    address: str
    role: str = ""
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker at one moment.

    Attributes:
        worker: its name.
        id: its rank.
        incarnation: distinguishes it from other processes with its name, in hexadecimal.
        job: the job's name and the incarnation of the coordinator that this worker joined; equal on all its workers.
        role: the program's name for its purpose.
        host, pid: its host and process.
        address: the address at which others reach it.
        time_ns: when these facts were collected, by its clock.
        age_s: the time since it joined.
        phase: "working", or "leaving" after `shutdown` was called.
        members: all workers of the job.
        num_made, num_served: calls made and served since it joined.
        omitted: the number of omitted entries, by the name of the list.
        functions: the durations of the latest calls, for each function.
        curves: the numbers that the program has published.
        notes: notes for a live view; otherwise None.
        memory_bytes: the resident memory of this process; None if unknown.
    """

    worker: str
    id: int
    incarnation: str
    job: str
    role: str
    host: str
    pid: int
    address: str
    time_ns: int
    age_s: float
    phase: str
    members: tuple[MemberFacts, ...] = ()
    calls_made: tuple[CallMade, ...] = ()
    calls_served: tuple[CallServed, ...] = ()
    threads: tuple[ThreadState, ...] = ()
    streams: tuple[StreamFacts, ...] = ()
    references: tuple[ReferenceFacts, ...] = ()
    autograd_contexts: tuple[ContextFacts, ...] = ()
    backward_passes: tuple[PassFacts, ...] = ()
    groups: tuple[GroupFacts, ...] = ()
    gatherings: tuple[GatheringFacts, ...] = ()
    actors: tuple[ActorFacts, ...] = ()
    pool: PoolFacts | None = None
    channels: tuple[ChannelFacts, ...] = ()
    lent_memory: tuple[LentMemory, ...] = ()
    limits: tuple[Limit, ...] = ()
    strangers: Strangers = field(default_factory=Strangers)
    num_made: int = 0
    num_served: int = 0
    omitted: dict[str, int] = field(default_factory=dict)
    functions: tuple[FunctionTimes, ...] = ()
    curves: tuple[CurveFacts, ...] = ()
    notes: LiveNotes = field(default_factory=LiveNotes)
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SilentWorker:
    """A worker that did not answer, and the state of its process as seen from outside.

    Attributes:
        state: "stopped", "ended", "in the kernel", "frozen" (none of its Python threads continues), "lost", or
            "unknown".
        detail: the same in a sentence, with advice.
        stacks: the stacks of all its threads from `faulthandler`; empty if they are not available.
    """

    worker: str
    address: str
    state: str
    detail: str
    stacks: str = ""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The workers of a job at one time: the facts of those that have answered, by rank, and those that have not.

    Attributes:
        error: why no worker answered; empty if one did.
    """

    job: str = ""
    workers: tuple[WorkerFacts, ...] = ()
    silent: tuple[SilentWorker, ...] = ()
    error: str = ""
