"""Every time limit, heartbeat, pause and poll interval of the package, grouped by what it is for.

Each comment says what the limit covers, which side measures it, and what happens when it is over. Some limits must
exceed others; tools/time_limits_tables.py has the list, and a test compares them. docs/time_limits.md explains the
limits by failure.

Options and arguments of users replace some of these defaults.
"""

from __future__ import annotations

from typing import Final

# ------------------------------------------------------------ Detecting death

PEER_TIMEOUT_S: Final = 10.0
"""Silence on a session, measured by both ends; then the session is closed, and the peer lost if it cannot be reached.
The default of `peer_timeout`."""
HEARTBEATS_PER_PEER_TIMEOUT: Final = 4
"""Heartbeats of an idle session in each peer timeout: a few may be late or lost before the peer is."""
LAST_ATTEMPT_SHARE: Final = 0.2
"""Part of the peer timeout that is left for one more attempt to connect after a silence; then the peer is lost."""
REFUSED_GRACE_S: Final = 0.5
"""A worker that refuses connections may be restarting its listener; one that refuses for longer is lost at once."""
ONE_WAY_IN_PEER_TIMEOUTS: Final = 6
"""A worker that lives, as its own connection to this one shows, and cannot be reached for this long is lost here. Where
it is this process that lacks descriptors, calls that have waited for so long fail, and the worker is not lost."""
LEASE_IN_PEER_TIMEOUTS: Final = 3
"""An owner keeps the references of a user that it does not hear from this long; then it drops them."""
GPU_LOAN_DOUBT_S: Final = 60.0
"""Memory of a GPU that is lent with a message which may not have arrived is used again after this."""
GPU_WAIT_LIMIT_S: Final = 600.0
"""A stream waits so long for memory that a worker has lent and its GPU has not written. Then it goes on, the content is
undefined, the log names the worker, and nothing more is borrowed from it. The borrower looks every few seconds."""
GROUP_SILENCE_LIMIT_S: Final = 10
"""Silence between the hosts of rank 0 and another rank, noticed by the kernel (TCP keep-alive); the rank is lost."""
KEEP_ALIVE_S: Final = 30
"""Silence on a TCP connection after which the kernel asks whether the other host is there; it asks three times within
as long again, and then breaks the connection. Sessions ask by themselves and sooner; this is for the sockets of the
collectives."""
STORE_CHECK_INTERVAL_S: Final = 0.25
"""A rank that waits in the store for others checks at this interval whether one of them has failed. An elastic rank
checks between two steps, but no more often than this, whether another rank wants to join."""
DDP_NOTICE_POLL_S: Final = 2.0
"""A rank that waits for a gradient bucket looks this often for notices of ranks that gave up or are late."""
POOL_EXHAUSTED_LIMIT_S: Final = 30.0
"""A worker pool at its cap of threads in which no job ends; then the jobs that waited fail with `PoolExhausted`."""

# ------------------------------------------------------------ Waiting for an answer

LONGEST_TIMEOUT_S: Final = 1e9
"""The longest timeout that a user may write (31 years): the system's waits take no more than ten times as much. Longer
ones are refused with the advice how to write none; one that arrives with a call counts as none."""
LONGEST_WAIT_S: Final = 3600.0
"""One wait of the operating system, which limits the argument; the wait then goes on. A thread that reads for itself
goes on without reading; a worker tries no longer than this to reach the coordinator, whatever timeout its user gave."""
QUICK_ANSWER_LIMIT_S: Final = 1.0
"""A question whose answer only makes an error better or a decision quicker; without an answer the asking side goes on.
A failing call asks who has the place of a lost worker; a newcomer looks into the store for the coordinator; a worker
that leaves tells the coordinator; a client that failed in the handshake waits for the reason; a connection shows
whether an elastic rank lives; a frozen process writes its stacks; and `launch` waits for a better reason when a rank
fails because it lost another one."""
ANSWER_LIMIT_S: Final = 2.0
"""A message that the other side should take soon; then the sender goes on without it. Rank 0 and another rank tell each
other about the state of the group (twice this for the farewell); a newcomer waits until the other workers have heard of
it, and tries an address that the store has this long; the workers or servers that a gathering or a step waited for are
asked who is missing; and a reading of the metrics waits for the I/O loop."""
SIDE_ATTEMPT_LIMIT_S: Final = 3.0
"""An attempt at something better, beside what works. A TCP channel or the connections for the payloads of a session,
measured by both sides; then the session stays on the connection that it has. The name servers, when a store could not
be reached; then the error says that they were silent."""
ATTEMPT_LIMIT_S: Final = 5.0
"""One attempt to connect, to greet or to ask, from the connection to the answer, measured by the side that waits. The
handshake of the local channel; then the network is used. TLS and the beginning of HTTP/2, and a health probe; then the
connection is closed. A probe of `python -m rpcdist doctor`, and whether two ranks share a host; then it is a finding,
or the ranks use sockets. The store of torchrun's agent; further attempts follow. Which named actors each worker has;
those of a silent worker are not found. Workers of a job that did not form learn why."""
SLOW_ANSWER_LIMIT_S: Final = 30.0
"""An answer of another thread or process that may have much to do. The I/O loop starts the server, a listener or a
service; then that fails. A chunk of published tensors arrives from the source before; then it is fetched from the
publisher. A worker that may have to load CUDA says whether it can read memory of this one's GPUs; meanwhile and
afterwards tensors travel through host memory. Ranks of a host set up shared memory; then they use sockets. A process
that holds the lock of a file store, which takes microseconds, is stopped; then the operation fails. A browser takes an
update of the dashboard; then it is gone."""
SLOW_WORK_LIMIT_S: Final = 60.0
"""Work that may rightly take long. A process of `launch` ends after its function has returned; then the job fails. A
handler whose caller has given up ends during `shutdown`, measured by the callee; then the call is named in the log, and
given up. NCCL frees a communicator, and `dot` draws a graph. An operation of a store that travels in pieces gets this
much more time."""
RPC_TIMEOUT_S: Final = 60.0
"""A call that names no timeout, measured by the caller and the callee; then it fails with `DeadlineExceeded`."""
CALL_QUESTION_LEAD_S: Final = 1.0
"""So long before the deadline of a call, or in the last fifth of a shorter timeout, its callee is asked how far it is,
for the text of `DeadlineExceeded`."""
RPC_INIT_TIMEOUT_S: Final = 60.0
"""The workers of a job find each other in `init_rpc`, measured by each; then it fails and names who is missing."""
INIT_NOTICE_S: Final = 10.0
"""A worker that waits in `init_rpc` for this long logs which workers it waits for, once for each thing that it waits
for; so does a rank that makes a process group. The parent of a `LocalCluster` logs which processes have not imported
the program yet."""
HANDSHAKE_LIMIT_S: Final = 10.0
"""Mutual proof of the job token on a new connection, measured by the side that accepts; then it is turned away."""
ROLE_LIMIT_S: Final = 60.0
"""A proven peer waits this long for a part of this process: for its role (`init_rpc` may not have been called yet), or
for a raw socket to be expected. Then the connection is closed."""
THREAD_GRACE_S: Final = 1.0
"""Extra time, beyond its own limit, for a thread or an event loop to report to the thread that waits for it; also the
least time to fetch the error of an optimizer's step near the deadline."""
ANSWER_GRACE_S: Final = 5.0
"""Extra time for an answer beyond the limit that the other side keeps: the coordinator waits for members, and a
pipeline's stage ends at the step's timeout and says what it waits for. Then the request or the step fails."""
ORPHAN_TIMEOUT_S: Final = 600.0
"""Workers whose coordinator is lost look this long for the one that takes its place; then `serve` raises. The default
of `orphan_timeout`."""
NEWS_PAUSE_S: Final = 3.0
"""Between two announcements of who has come or left, in a world of 1,064 workers; in proportion, and none up to 64."""
PARKED_LIMIT_S: Final = 7 * 24 * 3600.0
"""No request may wait for longer at the store or the coordinator, whatever it asks for; the server measures."""
GROUP_TIMEOUT_S: Final = 1800.0
"""The setup of a process group, elastic or not, and each operation of an ordinary one; torch's default. Each rank
measures; the group fails."""
DEBUGGER_LIMIT_S: Final = 3600.0
"""The timeout that `breakpoint` sets for all groups, so that no group ends while one of its ranks is debugged."""
NCCL_GROUP_TIMEOUT_S: Final = 600.0
"""The same for groups of the `nccl` backend."""
GROUP_ANSWER_LIMIT_S: Final = 0.7
"""After a time-out rank 0 asks all ranks where they are; ranks that do not answer are named as missing."""
GROUP_VERDICT_LIMIT_S: Final = 1.5
"""A rank that lost a connection or ran out of time waits for rank 0 to say why; then it says what it knows."""
GROUP_CONNECT_LIMIT_S: Final = 120.0
"""A connection between two ranks: a rank accepts however busy its user code is, so one that does not is gone."""
ELASTIC_TIMEOUT_S: Final = 60.0
"""Operations of an elastic group; and a rank that lives, but does not come to the next group, is waited for so long."""
STORE_TIMEOUT_S: Final = 300.0
"""Operations of a store that are given no timeout; torch's default. Then they fail with `DistStoreError`."""
STORE_GRACE_S: Final = 10.0
"""Extra time for the store's answer on a busy machine, beyond the wait that was asked for."""
MIN_ATTEMPT_S: Final = 0.1
"""Any attempt to connect gets at least this much time, including the last one before a deadline; and the kernel's
answer about the process at an address of this host gets this much."""
MIN_WAIT_S: Final = 0.001
"""A wait whose limit is over still gets this time where 0 would mean something else: no limit, or no waiting."""

# ------------------------------------------------------------ Closing

LEAVE_LIMIT_S: Final = 0.5
"""The end of what needs microseconds. The I/O loop waits for a thread that reads from a connection which ends; then
that thread closes it. Unary calls that are being handled while the transport ends are cut off."""
CLOSE_STEP_LIMIT_S: Final = 1.0
"""One step of a close. Cancelled tasks, and async generators that nobody closed; then they are left alone. Each group
that is left open when the program exits. The last bytes of a session on its other connections, or the peer's reason.
The last word of the workers that held an owner's values, when all have left."""
CONNECTION_CLOSE_LIMIT_S: Final = 2.0
"""The end of a connection or a listener, with the sessions that came through it; the last replies of a graceful
`shutdown`; and the runners of a pipeline's stages when a step failed elsewhere. Then the close goes on."""
CLOSE_LIMIT_S: Final = 5.0
"""The end of one part: an RPC agent's connections, coroutines or threads; an event loop, a pool or a store server whose
owner gave no limit; the transport; the thread that moves messages between ranks. A late part is logged.
Processes of `launch` that were told to end, measured by their parent: after SIGTERM they are killed, and after SIGKILL
their parent stops waiting for them."""
IDLE_LIMIT_S: Final = 5.0
"""A connection to the store, a thread of the pool, memory of a GPU that is lent or borrowed, or the parts of published
tensors that somebody wanted go when they were not used for so long; and so does a stream from which nobody reads when
all workers have called `shutdown`."""
RREF_DELETION_LIMIT_S: Final = 10.0
"""A worker that leaves returns its references; those that their owners do not confirm by then end with the lease."""
READ_TURN_S: Final = 0.005
"""The I/O loop begins no further receive from one connection after so long; it reads the others first. A thread
that wants to read from a connection waits as long for the loop to finish; then the loop reads."""
GRPC_STOP_GRACE_S: Final = 0.2
"""Time that gRPC's server gives running calls when a listener stops; then it cuts them off."""
STORE_LINGER_S: Final = 0.1
"""The store's service stays this long after its last reply, so that the reply leaves before the process ends."""
JOB_STOP_LIMIT_S: Final = 20.0
"""`python -m rpcdist stop` waits for the end of the program that called `launch`; then it says that this goes on."""
CLUSTER_START_LIMIT_S: Final = 300.0
"""The processes of a `LocalCluster` import the program, measured by their parent; then the cluster is ended."""

# ------------------------------------------------------------ Retrying

FIRST_PAUSE_S: Final = 0.05
"""Longest first pause before another attempt: to reach a process that does not listen yet, or again; to find the next
coordinator; to start a rank again whose process was lost. Pauses are random, and double."""
LONGEST_PAUSE_S: Final = 0.5
"""Longest pause between attempts to reach a process, and between looks at a key of one of torch's stores."""
RETURN_LONGEST_PAUSE_S: Final = 2.0
"""Longest pause between attempts to find the next coordinator."""
RESTART_LONGEST_PAUSE_S: Final = 10.0
"""Longest pause before `launch` starts a rank again."""
LOCK_FIRST_PAUSE_S: Final = 0.0002
"""Longest first pause between attempts at what another process of this host holds for microseconds: the lock of a file,
the queue of a Unix socket."""
LOCK_LONGEST_PAUSE_S: Final = 0.02
"""Longest of these pauses."""

# ------------------------------------------------------------ Polling and batching

POLL_S: Final = 0.001
"""Interval between looks at what usually takes microseconds to milliseconds: whether jobs wait for a thread, whether a
job has waited so long that another thread is worth its switches, whether a receiver refused messages, the GPUs of other
workers at the end, an MPI request that takes long, and the first pause between looks at a store's file or key."""
TICK_S: Final = 0.1
"""Interval between looks at what can wait: leases, and what finalizers of references have queued; asynchronous errors
of NCCL; a listener that has no file descriptor for a connection; the file of a file store, at most. A worker that is
asked again within this time what it does gives the same answer."""
SLOW_CHECK_INTERVAL_S: Final = 1.0
"""A graceful `shutdown` counts the outstanding calls this often, and a worker looks for calls that last long. A worker
that notices several failures of others within this time writes its flight file for the first of them."""
BATCH_DELAY_S: Final = 0.001
"""A small message waits so long for others with which it travels, or for a thread that is about to move it: gradients
that become ready; the message of a `remote()`, which waits four times as long where all before it were taken along; and
messages between ranks whose owner may be about to wait for them."""
CHECK_INTERVAL_S: Final = 0.05
"""A waiting thread checks this often for an event that nothing reports: the failure of its group or job, members of an
elastic group that come or go, or the growth of the file to which a frozen process writes its stacks."""
SIGNAL_CHECK_INTERVAL_S: Final = 0.5
"""A main thread that waits wakes up this often to see a Ctrl-C that came just before it slept, or that Ray's own wait
ignores."""
DEPARTURE_REVIEW_S: Final = 5.0
"""Interval at which the leader of a `shutdown` looks again who lives, also those that it has given up."""
LOG_CALLS_AFTER_S: Final = 300.0
"""A call that has not ended for this long is logged once, with its stack, by the worker that serves it and by the one
that waits for it. Users set it by `RpcOptions(log_calls_after=...)`."""
LOOK_LIMIT_S: Final = 4.0
"""The answer of a worker that is asked what it does, connecting included."""
LOOK_PATIENCE_S: Final = 1.4
"""A worker that has not answered after this time is looked at from outside, and its answer waited for meanwhile."""
LOOK_LATE_S: Final = 0.4
"""A worker that seems frozen, but computes, has this time more to answer; on a busy host, `LOOK_LIMIT_S` in all."""
LIVE_VIEW_PERIOD_S: Final = 0.5
"""Interval between two looks of `python -m rpcdist dashboard` and `top` at a job. Users set it by `--period`."""
LIVE_NOTES_S: Final = 10.0
"""A worker notes log lines and spans for so long after a live view has asked."""
LONG_WAIT_S: Final = 1.0
"""Calls, collectives and backward passes that are younger count as going well in `python -m rpcdist stacks`."""
FLIGHT_NOTICE_S: Final = 0.3
"""A process that fails with an exception tells the other workers, and gives them this long to write their files. So
does `launch`, before it ends the others, where a process was killed."""
LOG_PERIOD_S: Final = 60.0
"""Repeated log lines come once in this period: a refused connection for each host and reason; a resource that this
process lacks (descriptors, memory, threads, ports); the calls that a graceful `shutdown` waits for; and failures of one
peer's calls, beyond a thousand of them, at a higher level than DEBUG."""
CONTEXT_DROP_DELAY_S: Final = 0.05
"""Autograd contexts that hold little memory and end within this time are released together, here and on
other workers."""
POOL_LEAD_S: Final = 0.02
"""A thread of the pool that has nothing to do reads for so long where its last call came from."""
ANSWER_HOLD_S: Final = 0.0002
"""An answer waits so long for those of the next calls of its thread. The pool's monitor, which looks every millisecond,
writes it if the next call takes longer."""
CONTROL_DELAY_S: Final = 0.01
"""Control messages that arrive within this time are acknowledged together; and a session tells its peer within it which
lent segments are free again, if no message does so earlier."""
BURST_GAP_S: Final = 60e-6
"""Messages closer together than this are a burst, and the I/O loop writes them together."""
SEGMENTS_TRIM_S: Final = 30.0
"""A segment of shared memory that no message needed for this time is given back to the system."""
COPY_TURN_LIMIT_S: Final = 0.05
"""A large buffer's turn to be copied into shared memory, measured by the thread that copies; then it copies at once."""
POOL_STALL_S: Final = 0.005
"""No job has ended for this long while others wait: handlers block, and the pool gets more threads."""
IDLE_RECHECK_S: Final = 60.0
"""A group's thread without work wakes up this often; it is woken by work at once."""
FUTEX_WAIT_S: Final = 0.01
"""A rank that sleeps on shared memory looks this often whether its group has failed; others wake it at once."""
SPIN_LIMIT_S: Final = 500e-6
"""A rank that waits for another one tries for so long before it sleeps, at most; 1 MiB takes 300 us on one host."""
NCCL_POLL_S: Final = 0.002
"""Interval at which the watchdog looks whether operations on the device are done or late."""
NCCL_WORK_POLL_S: Final = 0.0005
"""Interval at which a thread that waits with a timeout looks at the device."""
MPI_SHORT_PAUSE_S: Final = 50e-6
"""Between looks at an MPI request that was not done after spinning."""
