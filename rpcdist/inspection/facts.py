"""The facts that a worker states about itself: plain data, the same in Python and in JSON.

Rules, on which other programs rely:

 1. Names of fields stay. New fields have a default and come at the end, so that facts of another version can be read.
 2. Durations are in seconds (`_s`), sizes in bytes, `time_ns` in nanoseconds since the epoch. None: not known, or none.
 3. Lists are bounded; `omitted` of `WorkerFacts` says how many entries of which list were left out.
 4. Ids are unique in one worker. The two ends of a call are joined by `session` and `id`, which are equal at both.
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
        function: what is called, or "to_here() of ..." where a value is fetched.
        to: the name of the callee.
        phase: "unsent", "sending", or "waiting" for the reply.
        age_s: since it was made.
        remaining_s: of its deadline.
        bytes_done: of its large arguments that were sent.
        bytes_total: of its large arguments, while they are being sent.
        counts_as_work: a shutdown waits for it; not so for barriers and the like.
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
        session: the connection by which it came, in hexadecimal.
        function: what is called.
        caller: the name of the worker that called.
        phase: "queued" for a thread; "in line" for its turn at an actor; "running"; "waiting" for a value that is not
            there yet, or for the future that its function has returned; "producing" the items of a stream.
        age_s: since it arrived.
        running_s: since its function was called.
        remaining_s: of its caller's deadline.
        is_cancelled: its caller does not want the result any more.
        thread: the thread that runs it; see `ThreadState.id`.
        stack: of its coroutine, the outermost line first; empty where a thread runs it, whose stack is in `threads`.
        waits_for: numbers of the calls made here that its coroutine awaits, or whose future its function has returned.
        on: the reference whose value is fetched, or whose method is called; empty for none.
        creates: the reference that its result will be; empty for none.
        is_coroutine: it runs on the event loop of handlers.
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
    """A thread, and what it does.

    Attributes:
        id: as `threading.get_ident` returns it.
        name: of the thread.
        stack: the outermost line first; only the innermost lines of a long one.
        waits_for: numbers of the calls made here whose results it waits for.
        lock: the lock that it waits for, as its line names it; empty for none, or one that cannot be seen.
        lock_holder: the thread that is in a `with` block of that lock; None where that cannot be seen.
        is_callback: it runs a callback of a future.
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
        unread_s: since the consumer took an item; None for a producer, and while somebody waits for an item.
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
    """A worker that holds a reference, and since when."""

    worker: str
    for_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReferenceFacts:
    """A remote reference that this worker owns or holds.

    Attributes:
        id: of the value.
        owner: the worker that has the value.
        state: at the owner "expected", "creating" or "ready"; elsewhere "pending", "confirmed" or "parked".
        value: the type of the value, at the owner.
        holders: as far as this worker knows; one for each share.
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
        id: of the pass.
        context: the id of its autograd context.
        parent: the worker that brought it here; empty where it began.
        waits_for: by worker, why it has not ended here.
        remaining_s: of its deadline, where it began.
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
        name: equal on all ranks.
        rank: of this process in the group.
        ranks: of the members in the world.
        backend: that carries out its operations.
        last_sequence: the number of the last collective that this rank has called; 0 for none.
        last_name: the name of that one.
        operations: those in flight.
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
    """A gathering of workers that this worker leads: those that have come, and those that have not.

    Attributes:
        kind: "barrier", which stands for all that `all_gather` does, too, or "shutdown".
    """

    kind: str
    came: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ActorFacts:
    """An object whose methods run one call at a time.

    Attributes:
        reference: the id of the value.
        running: the method that runs; empty for none.
        running_s: for how long.
        num_waiting: calls that are ready to run.
        kind: the class of the object; empty until it exists.
        num_restarts: how often it was made again, since its worker was lost.
    """

    reference: str
    running: str = ""
    running_s: float | None = None
    num_waiting: int = 0
    kind: str = ""
    num_restarts: int = 0


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The threads that run synchronous functions; `oldest_s` is how long the first job of the queue has waited."""

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
        opened_here: this worker makes its calls on it; otherwise the peer does.
        kind: "local" (a Unix socket), "tcp", "grpc" or "memory".
        tls: whether it is encrypted.
        bytes_sent, bytes_received: since it stands, without shared memory; None where nobody counts.
        num_queued: messages that wait to be written.
        num_transfers: large buffers that are being written.
        silent_s: since the peer was heard last.
        round_trip_s: as TCP measures it.
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
    """Shared memory that this worker lends to a peer: `num_lent` of `num_segments` segments are with the peer now."""

    peer: str
    num_segments: int
    num_lent: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit, how much of it is used, and how many wait because of it. `option` is what raises it."""

    name: str
    used: int
    limit: int
    num_waiting: int = 0
    option: str = ""


@dataclass(frozen=True, slots=True)
class Strangers:
    """Connections that this worker has refused or not finished with.

    Attributes:
        refused: in all.
        wrong_tokens: because of their token, among them.
        silent: began TLS and made no call, as those with another job token do.
        unproven: in the middle of a handshake.
    """

    refused: int = 0
    wrong_tokens: int = 0
    silent: int = 0
    unproven: int = 0


@dataclass(frozen=True, slots=True)
class FunctionTimes:
    """How long the calls of a function took that are among the last ones which the flight recorder has kept.

    Attributes:
        function: its name.
        served: they were served here; otherwise they were made here.
        count: how many have ended.
        failed: how many of them with an error.
        median_s, longest_s: of their times.
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
        name: of the curve.
        points: the latest ones, as seconds since the epoch and value.
    """

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class LogLine:
    """A record of the program's logging, or of rpcdist's.

    Attributes:
        number: of the notes of this worker; later ones are larger.
        time_s: seconds since the epoch.
        level: such as "WARNING".
        logger: its name.
        text: the message, with the type and text of an exception; cut.
    """

    number: int
    time_s: float
    level: str
    logger: str
    text: str


@dataclass(frozen=True, slots=True)
class SpanFacts:
    """Something that a worker has done, and when, in seconds since the epoch by its clock.

    Attributes:
        number: of the notes of this worker; later ones are larger.
        lane: "pipeline", "DDP", "DDP buckets", "backward", or "group NAME" for an operation of a process group.
        name: what was done.
        began_s, ended_s: when.
    """

    number: int
    lane: str
    name: str
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class LiveNotes:
    """The notes that a worker takes while a live view asks, oldest first; those that the asker has had are left out."""

    log_lines: tuple[LogLine, ...] = ()
    spans: tuple[SpanFacts, ...] = ()

    @property
    def last_number(self) -> int:
        """The largest number of them; 0 for none."""
        lines = max((line.number for line in self.log_lines), default=0)
        return max(lines, max((span.number for span in self.spans), default=0))


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """A worker of the job, as this one knows it."""

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
        incarnation: tells it from others that had its place, in hexadecimal.
        job: the job's name and the incarnation of the coordinator that this worker joined; equal on all its workers.
        role: what it is for, in the program's words.
        host, pid: where it runs.
        address: where others reach it.
        time_ns: when these facts were taken, by its clock.
        age_s: since it joined.
        phase: "working", or "leaving" once `shutdown` was called.
        members: everybody in the job.
        num_made, num_served: calls made and served since it joined.
        omitted: by the name of a list, how many entries were left out.
        functions: how long the latest calls took, for each function.
        curves: the numbers that the program has published.
        notes: for a live view only.
        memory_bytes: of this process, that is in memory; None where the system does not say.
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
        state: "stopped", "ended", "in the kernel", "frozen" (no Python thread of it goes on), "lost", or "unknown".
        detail: the same in a sentence, with what to do.
        stacks: of all its threads, as `faulthandler` writes them; empty where they cannot be had.
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
        error: why there is no answer at all; empty if there is one.
    """

    job: str = ""
    workers: tuple[WorkerFacts, ...] = ()
    silent: tuple[SilentWorker, ...] = ()
    error: str = ""
