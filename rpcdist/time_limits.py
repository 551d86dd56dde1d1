"""Every time limit, heartbeat, pause and poll interval of the package, grouped by what it is for.

Each comment says what the limit covers, which side measures it, and what happens afterwards. Some limits must exceed
others; tools/time_limits_tables.py has the list, and a test compares them. docs/time_limits.md explains the limits by
failure.

Options and arguments of users replace some of these defaults.
"""

from __future__ import annotations

from typing import Final

# ------------------------------------------------------------ Detecting death

PEER_TIMEOUT_S: Final = 10.0
"""Silence on a session, measured at both ends. Then the session is closed, and if the peer cannot be reached again, it
is lost. The default of `peer_timeout`."""
HEARTBEATS_PER_PEER_TIMEOUT: Final = 4
"""Heartbeats that an idle session sends in each peer timeout, so that a few late or lost ones do not end it."""
LAST_ATTEMPT_SHARE: Final = 0.2
"""Fraction of the peer timeout for a last attempt to connect after a silence. If it fails, the peer is lost."""
REFUSED_GRACE_S: Final = 0.5
"""A worker that refuses connections may be restarting its listener. If it refuses longer than this, it is lost."""
ONE_WAY_IN_PEER_TIMEOUTS: Final = 6
"""A worker that connects to this one, but cannot be reached from here for this long, is lost here. If the reason is
that this process lacks file descriptors, the worker is not lost, and only calls that have waited this long fail."""
LEASE_IN_PEER_TIMEOUTS: Final = 3
"""An owner drops the references of a user from which it has received nothing for this many peer timeouts."""
GPU_LOAN_DOUBT_S: Final = 60.0
"""GPU memory that was lent with a message that may not have arrived is used again after this time."""
GPU_WAIT_LIMIT_S: Final = 600.0
"""A stream waits this long until the lender's GPU has written lent memory, or the borrower's GPU has copied memory that
is lent again. Then the stream continues with undefined content, the log names the other worker, and no more is borrowed
from it or lent to it. The waiting worker checks every few seconds."""
GROUP_SILENCE_LIMIT_S: Final = 10
"""Silence between the hosts of rank 0 and another rank, detected by TCP keep-alive. Then the rank is lost."""
KEEP_ALIVE_S: Final = 30
"""After this silence on a TCP connection, the kernel probes the other host three times within the same time again, and
then breaks the connection. This is for the sockets of the collectives; sessions send their own heartbeats earlier."""
STORE_CHECK_INTERVAL_S: Final = 0.25
"""A rank that waits in the store for others checks this often whether one of them has failed. An elastic rank checks
between two steps, at most this often, whether another rank wants to join."""
DDP_NOTICE_POLL_S: Final = 2.0
"""A rank that waits for a gradient bucket checks this often for notices of ranks that are late or have failed."""
POOL_EXHAUSTED_LIMIT_S: Final = 30.0
"""If no job ends for this long in a pool at its maximum number of threads, waiting jobs fail with `PoolExhausted`."""

# ------------------------------------------------------------ Waiting for an answer

LONGEST_TIMEOUT_S: Final = 1e9
"""The longest timeout that a user may set (31 years); the system's waits accept at most ten times as much. A longer one
is refused with advice on how to set none; a longer one that arrives with a call counts as none."""
LONGEST_WAIT_S: Final = 3600.0
"""The longest single wait of the operating system, which limits the argument; then the wait is started again. A thread
that was reading continues without reading. A worker tries to reach the coordinator at most this long, whatever its
timeout."""
QUICK_ANSWER_LIMIT_S: Final = 1.0
"""An answer that only improves an error or speeds up a decision; then the asking side continues without it. A failing
call asks which process has replaced a lost worker. A new worker looks for the coordinator in the store. A leaving
worker notifies the coordinator. A client whose handshake failed waits for the reason. A connection shows whether an
elastic rank lives. A frozen process writes its stacks. `launch` waits for a better reason when a rank fails because it
lost another rank."""
ANSWER_LIMIT_S: Final = 2.0
"""A message that the other side should process soon; then the sender continues without it. Rank 0 and another rank
exchange the state of their group (twice this time for the last message). A new worker waits until the others know it,
and tries an address from the store. Workers or servers for which a gathering or a step waited are asked which ones are
missing. A reading of the metrics waits for the I/O loop."""
SIDE_ATTEMPT_LIMIT_S: Final = 3.0
"""An attempt to improve something that already works. Both sides measure the setup of a TCP channel or of a session's
payload connections; then the session stays on its existing connection. If a store could not be reached and the name
servers do not answer in this time, the error says so."""
ATTEMPT_LIMIT_S: Final = 5.0
"""One attempt to connect, greet or ask, from the connection to the answer, measured by the waiting side. If the
handshake of the local channel takes longer, the network is used. A connection that does not complete TLS, the beginning
of HTTP/2 or a health probe is closed. A probe of `python -m rpcdist doctor` becomes a finding. Ranks that do not know
whether they share a host use sockets. The store of torchrun's agent is tried again. Named actors of a silent worker are
not found. Workers of a job that did not form get the reason."""
SLOW_ANSWER_LIMIT_S: Final = 30.0
"""An answer of a thread or process that may be busy. The I/O loop starts the server, a listener or a service; then the
start fails. The previous source sends a chunk of published tensors; then the publisher sends it. A worker, which may
have to load CUDA, reports whether it can read this worker's GPU memory; until then, and after this time, tensors travel
through host memory. Ranks of a host set up shared memory; then they use sockets. A process releases the lock of a file
store, normally within microseconds; then the operation fails. A browser takes an update of the dashboard; then it is
disconnected."""
SLOW_WORK_LIMIT_S: Final = 60.0
"""Work that may take long. A process of `launch` ends after its function has returned; then the job fails. A handler
whose caller no longer waits ends during `shutdown`, measured by the callee; then the log names the call, and `shutdown`
continues. NCCL frees a communicator, and `dot` draws a graph. A store operation that travels in pieces gets this much
additional time."""
RPC_TIMEOUT_S: Final = 60.0
"""A call without a timeout of its own, measured by caller and callee. Then it fails with `DeadlineExceeded`."""
CALL_QUESTION_LEAD_S: Final = 1.0
"""This long before a call's deadline, or in the last fifth of a shorter timeout, the caller asks the callee for the
state of the call, for the text of `DeadlineExceeded`."""
RPC_INIT_TIMEOUT_S: Final = 60.0
"""The workers of a job find each other in `init_rpc`, measured by each. Then it fails and names the missing workers."""
INIT_NOTICE_S: Final = 10.0
"""A worker that waits in `init_rpc` for this long logs the missing workers, once for each step of the setup; a rank
that makes a process group does the same. The parent of a `LocalCluster` logs which processes have not imported the
program yet."""
HANDSHAKE_LIMIT_S: Final = 10.0
"""Mutual proof of the job token on a new connection, measured by the accepting side. Then the connection is refused. A
client whose TLS handshakes are cut off tries again for this long."""
ROLE_LIMIT_S: Final = 60.0
"""An authenticated peer waits this long until this process serves its role (`init_rpc` may not have been called yet),
or expects its raw socket. Then the connection is closed."""
THREAD_GRACE_S: Final = 1.0
"""Additional time, beyond its own limit, for a thread or an event loop to report to the thread that waits for it; also
the minimum time for fetching the error of an optimizer's step near the deadline."""
ANSWER_GRACE_S: Final = 5.0
"""Additional time for an answer beyond the limit of the answering side: the coordinator waits for members, and a stage
of a pipeline ends at the step's timeout and reports its wait. Then the request or the step fails."""
ORPHAN_TIMEOUT_S: Final = 600.0
"""Workers that have lost their coordinator look this long for its replacement. Then `serve` raises `CoordinatorLost`.
The default of `orphan_timeout`."""
NEWS_PAUSE_S: Final = 3.0
"""Pause between two announcements of workers that joined or left, for each 1,000 workers of the world beyond 64. In
worlds of up to 64 workers there is no pause."""
PARKED_LIMIT_S: Final = 7 * 24 * 3600.0
"""The longest wait of a request at the store or the coordinator, whatever it asks for, measured by the server."""
GROUP_TIMEOUT_S: Final = 1800.0
"""The setup of a process group, elastic or not, and each operation of an ordinary one; torch's default. Each rank
measures. Then the group fails."""
DEBUGGER_LIMIT_S: Final = 3600.0
"""The timeout that `breakpoint` sets for all groups, so that no group ends while one of its ranks is debugged."""
NCCL_GROUP_TIMEOUT_S: Final = 600.0
"""The same as `GROUP_TIMEOUT_S`, for groups of the `nccl` backend."""
GROUP_ANSWER_LIMIT_S: Final = 0.7
"""After a timeout, rank 0 asks all ranks for their state. Ranks that do not answer in time are named as missing."""
GROUP_VERDICT_LIMIT_S: Final = 1.5
"""A rank that lost a connection or timed out waits this long for the reason from rank 0, then reports what it knows."""
GROUP_CONNECT_LIMIT_S: Final = 120.0
"""A connection between two ranks. Ranks accept even while user code runs, so a rank that does not accept is lost."""
ELASTIC_TIMEOUT_S: Final = 60.0
"""Operations of an elastic group, and the wait for a living rank that does not come to the next group."""
STORE_TIMEOUT_S: Final = 300.0
"""Store operations without a timeout of their own; torch's default. Then they fail with `DistStoreError`."""
STORE_GRACE_S: Final = 10.0
"""Additional time for the store's answer on a busy machine, beyond the requested wait. At the end of its program, the
rank that serves the store waits this long for groups of other ranks that are not made yet."""
MIN_ATTEMPT_S: Final = 0.1
"""Every attempt to connect gets at least this much time, including the last one before a deadline. So does the kernel's
answer about the process at an address of this host."""
MIN_WAIT_S: Final = 0.001
"""A wait whose limit has passed still gets this time where 0 would mean no limit or no waiting."""

# ------------------------------------------------------------ Closing

LEAVE_LIMIT_S: Final = 0.5
"""The end of work that takes microseconds. The I/O loop waits this long for a thread that reads from a closing
connection; then that thread closes it. Unary calls that are running when the transport ends are cut off."""
CLOSE_STEP_LIMIT_S: Final = 1.0
"""One step of a close. Cancelled tasks, and async generators that were never closed; then they are left alone. Each
group that is still open when the program exits. The last bytes of a session on its other connections, or the peer's
reason for closing. The last messages of workers that held an owner's values, after all have left."""
CONNECTION_CLOSE_LIMIT_S: Final = 2.0
"""The end of a connection or a listener with its sessions; the last replies of a graceful `shutdown`; the runners of a
pipeline's stages after a step failed elsewhere. Then the close continues."""
CLOSE_LIMIT_S: Final = 5.0
"""The end of one part: an RPC agent's connections, coroutines or threads; an event loop, a pool or a store server whose
owner set no limit; the transport; the thread that moves messages between ranks. A late part is logged. Also the end of
processes that `launch` has told to end: after SIGTERM it kills them, and after SIGKILL it stops waiting for them."""
IDLE_LIMIT_S: Final = 5.0
"""An unused connection to the store, thread of the pool, lent or borrowed memory of a GPU, or requested part of
published tensors is freed after this time. A stream whose consumer has stopped reading is closed after this time when
all workers have called `shutdown`."""
RREF_DELETION_LIMIT_S: Final = 10.0
"""A leaving worker returns its references. References that their owners do not confirm in time end with the lease."""
READ_TURN_S: Final = 0.005
"""After this time the I/O loop begins no further receive from the same connection, and reads the others first. A thread
that wants to read from a connection waits this long for the loop to finish; then the loop reads."""
GRPC_STOP_GRACE_S: Final = 0.2
"""Time that gRPC's server gives running calls when a listener stops. Then it cuts them off."""
STORE_LINGER_S: Final = 0.1
"""The store's service stays this long after its last reply, so that the reply leaves before the process ends."""
JOB_STOP_LIMIT_S: Final = 20.0
"""`python -m rpcdist stop` waits this long for the program that called `launch`, then says that it is still running."""
CLUSTER_START_LIMIT_S: Final = 300.0
"""The processes of a `LocalCluster` import the program, measured by their parent. Then the parent ends the cluster."""

# ------------------------------------------------------------ Retrying

FIRST_PAUSE_S: Final = 0.05
"""Longest first pause before another attempt to reach a process that is not listening, to find the next coordinator, or
to restart a rank whose process was lost. Pauses are random, and double."""
LONGEST_PAUSE_S: Final = 0.5
"""Longest pause between attempts to reach a process, and between checks of a key in one of torch's stores."""
RETURN_LONGEST_PAUSE_S: Final = 2.0
"""Longest pause between attempts to find the next coordinator."""
RESTART_LONGEST_PAUSE_S: Final = 10.0
"""Longest pause before `launch` restarts a rank."""
LOCK_FIRST_PAUSE_S: Final = 0.0002
"""Longest first pause between attempts to get a resource that another process of this host holds for microseconds: the
lock of a file, or the queue of a Unix socket."""
LOCK_LONGEST_PAUSE_S: Final = 0.02
"""Longest pause between later attempts to get such a resource."""

# ------------------------------------------------------------ Polling and batching

POLL_S: Final = 0.001
"""Interval between checks for events that usually take microseconds to milliseconds: jobs that wait for a thread, or
have waited so long that another thread is worth the switches; messages that a receiver refused; the GPUs of other
workers at the end; an MPI request that takes long. Also the first pause between checks of a store's file or key."""
TICK_S: Final = 0.1
"""Interval between checks that can wait: leases; deletions that finalizers of references have queued; asynchronous
errors of NCCL; a listener that has no file descriptor for a connection; the file of a file store, at most. If a worker
is asked for its state again within this time, it gives the same answer."""
SLOW_CHECK_INTERVAL_S: Final = 1.0
"""A graceful `shutdown` counts the outstanding calls this often, and a worker looks this often for calls that take
long. A worker that notices several failures of others within this time writes its flight file for the first one."""
BATCH_DELAY_S: Final = 0.001
"""A small message waits this long for others to travel with, or for a thread that is about to send it: gradients that
become ready; the message of a `remote()`, which waits four times as long if all earlier ones were taken along; messages
between ranks whose owner may be about to wait for them."""
CHECK_INTERVAL_S: Final = 0.05
"""A waiting thread checks this often for events without a notification: the failure of its group or job, members of an
elastic group that join or leave, the growth of the file to which a frozen process writes its stacks, or the
cancellation of a cluster's start while its dashboard starts."""
SIGNAL_CHECK_INTERVAL_S: Final = 0.5
"""A waiting main thread wakes up this often to notice a Ctrl-C that arrived just before it slept, or that Ray's own
wait ignores."""
DEPARTURE_REVIEW_S: Final = 5.0
"""The host of a `shutdown` checks this often which workers live, including those that it has declared lost."""
LOG_CALLS_AFTER_S: Final = 300.0
"""If a call has not ended after this time, its callee and its caller each log it once, with its stack. Users set this
with `RpcOptions(log_calls_after=...)`."""
LOOK_LIMIT_S: Final = 4.0
"""The answer of a worker that is asked for its state, including the time to connect."""
LOOK_PATIENCE_S: Final = 1.4
"""A worker that has not answered after this time is also inspected from outside, while its answer is awaited."""
LOOK_LATE_S: Final = 0.4
"""Additional time to answer for a worker that seems frozen but computes; on a busy host, `LOOK_LIMIT_S` in all."""
LIVE_VIEW_PERIOD_S: Final = 0.5
"""Interval at which `python -m rpcdist dashboard` and `top` query a job. Users set it with `--period`."""
LIVE_NOTES_S: Final = 10.0
"""A worker records log lines and spans for this long after each request of a live view."""
LONG_WAIT_S: Final = 1.0
"""Calls, collectives and backward passes younger than this count as healthy in `python -m rpcdist stacks`."""
FLIGHT_NOTICE_S: Final = 0.3
"""A process that fails with an exception notifies the other workers, and gives them this long to write their files.
`launch` does the same after a process was killed, before it ends the others."""
LOG_PERIOD_S: Final = 60.0
"""Repeated log lines appear once in this period: a refused connection, for each host and reason; a resource that this
process lacks (descriptors, memory, threads, ports); the calls for which a graceful `shutdown` waits. Beyond a thousand
failed calls of one peer in this period, failures are logged at level DEBUG only."""
CONTEXT_DROP_DELAY_S: Final = 0.05
"""Autograd contexts that hold little memory and end within this time are released together, here and on other
workers."""
POOL_READ_S: Final = 0.02
"""An idle thread of the pool reads for this long from the connection of its last call."""
ANSWER_HOLD_S: Final = 0.0002
"""A thread holds back an answer for this long, to send it together with the answers of its next calls. If the next call
takes longer, the pool's monitor, which checks every millisecond, writes the answer."""
CONTROL_DELAY_S: Final = 0.01
"""Control messages that arrive within this time are acknowledged together. A session also tells its peer within this
time which lent segments are free again, if no message does so earlier."""
BURST_GAP_S: Final = 60e-6
"""Messages at shorter intervals than this are a burst, and the I/O loop writes them together."""
SEGMENTS_TRIM_S: Final = 30.0
"""A segment of shared memory that no message has used for this time is returned to the system."""
COPY_TURN_LIMIT_S: Final = 0.05
"""A thread waits this long for its turn to copy a large buffer into shared memory. Then it copies at once."""
POOL_STALL_S: Final = 0.005
"""If no job has ended for this long while others wait, handlers are blocking, and the pool starts more threads."""
IDLE_RECHECK_S: Final = 60.0
"""An idle thread of a group wakes up this often; new work wakes it at once."""
FUTEX_WAIT_S: Final = 0.01
"""A rank that sleeps on shared memory checks this often whether its group has failed; others wake it at once."""
SPIN_LIMIT_S: Final = 500e-6
"""A rank that waits for another rank spins for at most this long before it sleeps; 1 MiB takes 300 us on one host."""
NCCL_POLL_S: Final = 0.002
"""Interval at which the watchdog checks whether operations on the device are done or late."""
NCCL_WORK_POLL_S: Final = 0.0005
"""Interval at which a thread that waits with a timeout checks the device."""
MPI_SHORT_PAUSE_S: Final = 50e-6
"""Pause between checks of an MPI request that was not done after spinning."""
