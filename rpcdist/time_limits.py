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
SURVIVOR_PROBE_SHARE: Final = 0.25
"""Part of the peer timeout after which a new coordinator asks workers that have not come to it whether they live."""
REFUSED_GRACE_S: Final = 0.5
"""A worker that refuses connections may be restarting its listener; one that refuses for longer is lost at once."""
ONE_WAY_IN_PEER_TIMEOUTS: Final = 6
"""A worker that lives, as its own connection to this one shows, and cannot be reached for this long is lost here. Where
it is this process that lacks descriptors, calls that have waited for so long fail, and the worker is not lost."""
LEASE_IN_PEER_TIMEOUTS: Final = 3
"""An owner keeps the references of a user that it does not hear from this long; then it drops them."""
AGENT_TICK_S: Final = 0.1
"""Interval at which an RPC agent ends leases, and sends what finalizers of references have queued."""
GPU_MEMORY_IDLE_S: Final = 10.0
"""A worker closes memory of another process's GPU, and frees what it lends itself, when nothing used it for so long."""
GPU_LOAN_DOUBT_S: Final = 60.0
"""Memory of a GPU that is lent with a message which may not have arrived is used again after this."""
GPU_WAIT_LIMIT_S: Final = 600.0
"""A stream waits so long for memory that a worker has lent and its GPU has not written. Then it goes on, the content is
undefined, the log names the worker, and nothing more is borrowed from it. The borrower looks every few seconds."""
GPU_POLL_S: Final = 0.001
"""Interval at which a worker that ends looks whether the GPUs of others have computed what was sent to it."""
GPU_PROBE_LIMIT_S: Final = 30.0
"""For the answer whether a worker can read memory of this one's GPUs, measured by the worker that asks: the other may
have to load CUDA. Until it is there, and afterwards, tensors travel through host memory."""
GROUP_SILENCE_LIMIT_S: Final = 10
"""Silence between the hosts of rank 0 and another rank, noticed by the kernel (TCP keep-alive); the rank is lost."""
STORE_CHECK_INTERVAL_S: Final = 0.25
"""A rank that waits in the store for others checks at this interval whether one of them has failed. An elastic rank
checks between two steps, but no more often than this, whether another rank wants to join."""
NCCL_ERROR_POLL_S: Final = 0.1
"""Interval at which the watchdog asks NCCL for asynchronous errors; an error ends the group."""
DDP_NOTICE_POLL_S: Final = 2.0
"""A rank that waits for a gradient bucket looks this often for notices of ranks that gave up or are late."""
POOL_EXHAUSTED_LIMIT_S: Final = 30.0
"""A worker pool at its cap of threads in which no job ends; then the jobs that waited fail with `PoolExhausted`."""
LAUNCH_CAUSE_LIMIT_S: Final = 1.0
"""`launch` gives the other ranks this time to report a better reason when a rank fails because it lost another one."""

# ------------------------------------------------------------ Waiting for an answer

LONGEST_TIMEOUT_S: Final = 1e9
"""The longest timeout that a user may write (31 years): the system's waits take no more than ten times as much. Longer
ones are refused with the advice how to write none; one that arrives with a call counts as none."""
RPC_TIMEOUT_S: Final = 60.0
"""A call that names no timeout, measured by the caller and the callee; then it fails with `DeadlineExceeded`."""
CALL_QUESTION_LEAD_S: Final = 1.0
"""So long before the deadline of a call, or in the last fifth of a shorter timeout, its callee is asked how far it is,
for the text of `DeadlineExceeded`."""
RPC_INIT_TIMEOUT_S: Final = 60.0
"""The workers of a job find each other in `init_rpc`, measured by each; then it fails and names who is missing."""
INIT_NOTICE_S: Final = 10.0
"""A worker that waits in `init_rpc` for this long logs which workers it waits for, once for each thing that it waits
for; and the parent of a `LocalCluster` logs which processes have not imported the program yet."""
HANDSHAKE_LIMIT_S: Final = 10.0
"""Mutual proof of the job token on a new connection, measured by the side that accepts; then it is turned away."""
LOCAL_HANDSHAKE_LIMIT_S: Final = 5.0
"""The same on the local channel, measured by the side that connects; then it connects over the network."""
KEEP_ALIVE_IDLE_S: Final = 30.0
"""Silence on a TCP connection after which the kernel asks whether the other host is there. Sessions ask by themselves
and sooner; this is for the sockets of the collectives."""
KEEP_ALIVE_PROBE_S: Final = 10.0
"""How long the kernel waits for the answer before it asks again."""
KEEP_ALIVE_PROBES: Final = 3
"""Questions without an answer after which the connection is broken."""
GRPC_GREETING_LIMIT_S: Final = 5.0
"""TLS and the beginning of HTTP/2 on a new connection, measured by gRPC on both sides; and one health probe from its
connection to its answer, measured by the process that answers. Then the connection is closed."""
TCP_CHANNEL_LIMIT_S: Final = 3.0
"""Connection and handshake of a TCP channel, measured by the side that connects; then it stays with gRPC. And of all
connections for the payloads of a session, measured by both; then the session's own connection carries everything."""
PAYLOADS_END_LIMIT_S: Final = 1.0
"""From the end of one of a session's connections to the end of the session: what was written on the others before, or
why the peer ends it, has so long to come."""
PROBE_LIMIT_S: Final = 5.0
"""One probe, measured by the side that asks. A probe of `python -m rpcdist doctor` is a session, a question, or the
attempt of the other process to reach the caller; without an answer it is a finding. A probe whether two ranks share a
host: without an answer they use sockets."""
METRICS_READ_LIMIT_S: Final = 2.0
"""One reading of the metrics waits for the I/O loop, measured by the thread that reads; then the reading fails."""
REFUSAL_LIMIT_S: Final = 1.0
"""A client that failed in the handshake waits for the server to end the stream, so that it can read the reason."""
ROLE_LIMIT_S: Final = 60.0
"""A proven peer waits this long for a part of this process: for its role (`init_rpc` may not have been called yet), or
for a raw socket to be expected. Then the connection is closed."""
SERVE_LIMIT_S: Final = 30.0
"""The start of the server, measured by the thread that starts it; then starting fails."""
ADD_SERVICE_LIMIT_S: Final = 10.0
"""A request of a thread to the I/O loop, measured by that thread: the registration of a service with the server, the
first news of the members of the job, or the start of the listeners for raw sockets."""
THREAD_GRACE_S: Final = 1.0
"""Extra time, beyond its own limit, for a thread or an event loop to report to the thread that waits for it; also the
least time to fetch the error of an optimizer's step near the deadline."""
COORDINATOR_GRACE_S: Final = 5.0
"""Extra time for the coordinator's answer, beyond the time for which it waits for members; then the request fails."""
COORDINATOR_CONNECT_LIMIT_S: Final = 3600.0
"""A worker tries this long at most to reach the coordinator, whatever timeout its user gave."""
ASK_COORDINATOR_LIMIT_S: Final = 1.0
"""A call to a lost worker asks who has its place now; without an answer it fails at once, and waits no longer."""
ASK_FOR_NAMES_LIMIT_S: Final = 5.0
"""A new coordinator asks all workers at once which named actors they have; those of who is silent are not found."""
ORPHAN_TIMEOUT_S: Final = 600.0
"""Workers whose coordinator is lost look this long for the one that takes its place; then `serve` raises. The default
of `orphan_timeout`."""
COORDINATOR_LOOK_UP_LIMIT_S: Final = 1.0
"""One look into the store for the address of the next coordinator; the last address is not tried meanwhile."""
COORDINATOR_STALE_S: Final = 2.0
"""A newcomer tries an address that the store has this long; then the store may have another one."""
RETURN_FIRST_PAUSE_S: Final = 0.1
"""Before the second attempt to find the next coordinator; random, and it doubles."""
RETURN_LONGEST_PAUSE_S: Final = 2.0
"""Upper bound of the pauses between these attempts."""
NEWS_PAUSE_S: Final = 1.0
"""Between two announcements of who has come or left, in a world of 1,064 workers; in proportion, and none up to 64."""
ANNOUNCE_LIMIT_S: Final = 2.0
"""A newcomer waits until the other workers have heard of it, so that they reach it; then it goes on all the same."""
LATE_JOINERS_LIMIT_S: Final = 5.0
"""A coordinator whose job did not form stays this long to tell the other workers why."""
MISSING_NAMES_LIMIT_S: Final = 2.0
"""After a gathering, or a step at parameter servers, timed out, its leader, or the servers, are asked who is missing;
without an answer the error says so, or names nobody."""
PARKED_LIMIT_S: Final = 7 * 24 * 3600.0
"""No request may wait for longer at the store or the coordinator, whatever it asks for; the server measures."""
GROUP_TIMEOUT_S: Final = 1800.0
"""The setup of a process group and each of its operations; torch's default. Each rank measures; the group fails."""
DEBUGGER_LIMIT_S: Final = 3600.0
"""The timeout that `breakpoint` sets for all groups, so that no group ends while one of its ranks is debugged."""
NCCL_GROUP_TIMEOUT_S: Final = 600.0
"""The same for groups of the `nccl` backend."""
GROUP_ANSWER_LIMIT_S: Final = 0.7
"""After a time-out rank 0 asks all ranks where they are; ranks that do not answer are named as missing."""
GROUP_VERDICT_LIMIT_S: Final = 1.5
"""A rank that lost a connection or ran out of time waits for rank 0 to say why; then it says what it knows."""
GROUP_SEND_LIMIT_S: Final = 2.0
"""One message between rank 0 and another rank about the state of the group; a rank that does not take it misses it."""
CHUNK_LIMIT_S: Final = 30.0
"""Published tensors between hosts: one chunk, from the source before; then the chunk is fetched from the publisher."""
SHARED_MEMORY_SETUP_LIMIT_S: Final = 20.0
"""Setting up shared memory among the ranks of a host; then the group uses sockets there."""
GROUP_CONNECT_LIMIT_S: Final = 120.0
"""A connection between two ranks: a rank accepts however busy its user code is, so one that does not is gone."""
ELASTIC_TIMEOUT_S: Final = 60.0
"""Operations of an elastic group; and a rank that lives, but does not come to the next group, is waited for so long."""
ELASTIC_FORM_LIMIT_S: Final = 1800.0
"""Forming an elastic group, replacements that have to be started included; then `RendezvousError`."""
ELASTIC_PROBE_LIMIT_S: Final = 1.0
"""One connection that shows whether a rank lives; a host that does not answer counts as slow, not as gone."""
STORE_TIMEOUT_S: Final = 300.0
"""Operations of a store that are given no timeout; torch's default. Then they fail with `DistStoreError`."""
STORE_GRACE_S: Final = 10.0
"""Extra time for the store's answer on a busy machine, beyond the wait that was asked for."""
STORE_IDLE_S: Final = 5.0
"""A connection to the store that has not been used for so long is closed, and opened again by the next call."""
STORE_LARGE_LIMIT_S: Final = 60.0
"""The same for an operation that is too large for one message, measured by the client: it travels in pieces."""
NAME_LOOKUP_LIMIT_S: Final = 3.0
"""Asking the name servers why a store could not be reached; then the error says that they were silent."""
AGENT_STORE_CONNECT_LIMIT_S: Final = 5.0
"""One attempt to reach the store of torchrun's agent; further attempts follow until the rendezvous times out."""
MIN_ATTEMPT_S: Final = 0.1
"""Any attempt to connect gets at least this much time, including the last one before a deadline; and the kernel's
answer about the process at an address of this host gets this much."""
MIN_WAIT_S: Final = 0.001
"""A wait whose limit is over still gets this time where 0 would mean something else: no limit, or no waiting."""
FILE_LOCK_LIMIT_S: Final = 30.0
"""The lock of a file store, which is held for microseconds: a process that uses the file must be stopped."""
PIPELINE_GRACE_S: Final = 5.0
"""A stage ends at the step's timeout and says what it waits for; the driver waits this much longer to hear it."""
GRAPHVIZ_LIMIT_S: Final = 60.0
"""The program `dot`, which draws autograd graphs; then drawing fails."""

# ------------------------------------------------------------ Closing

RPC_CLOSE_LIMIT_S: Final = 5.0
"""Each step of an RPC agent's close: connections, coroutines, threads. Unfinished ones are logged."""
LAST_REPLIES_LIMIT_S: Final = 2.0
"""Replies under way at a graceful `shutdown`; then the connections are closed in any case."""
RREF_DELETION_LIMIT_S: Final = 10.0
"""A worker that leaves returns its references; those that their owners do not confirm by then end with the lease."""
RREF_RELEASE_LIMIT_S: Final = 1.0
"""When all workers have left, an owner waits this long for the last word of those who held its values."""
UNREAD_STREAM_LIMIT_S: Final = 5.0
"""When all workers have called `shutdown`: a stream from which nobody has read this long is closed, and logged."""
UNWANTED_CALL_LIMIT_S: Final = 60.0
"""A `shutdown` waits this long for a handler whose caller has given up, by its deadline or by `cancel`; measured by the
callee, from then on or from the beginning of its wait. Then the call is named in the log, and given up."""
LEAVE_CONNECT_LIMIT_S: Final = 1.0
"""A worker that leaves tries this long to tell the coordinator, which otherwise notices by itself."""
GENERATORS_LIMIT_S: Final = 1.0
"""Async generators that nobody closed, at the end of the user loop."""
LOOP_CLOSE_LIMIT_S: Final = 5.0
"""The end of an event loop, a pool of threads or a store server whose owner gave no limit. A loop or pool that has not
ended then is logged."""
CANCELLED_TASKS_LIMIT_S: Final = 1.0
"""Tasks that were cancelled at a close; then they are left alone."""
NODE_STOP_LIMIT_S: Final = 5.0
"""The end of the transport: last replies, links, listeners."""
UNARY_DRAIN_LIMIT_S: Final = 0.5
"""Unary calls that are being handled while the transport ends; then they are cut off."""
LINK_CLOSE_LIMIT_S: Final = 2.0
"""The end of one connection: the stream and its gRPC channel."""
LISTENER_STOP_LIMIT_S: Final = 2.0
"""The end of a raw listener and of the sessions that came through it."""
LEADER_LEAVE_LIMIT_S: Final = 0.5
"""The I/O loop waits so long for a thread that reads from a connection which ends; then that thread closes it."""
LEADER_SLEEP_S: Final = 3600.0
"""The longest sleep of a thread that reads for itself, measured by it; then it goes on waiting without reading."""
LOOP_READ_LIMIT_S: Final = 0.005
"""A thread that wants to read from a connection waits so long for the I/O loop to finish; then the loop reads."""
FAILURES_LOGGED_S: Final = 60.0
"""Failures of one peer's calls beyond a thousand are logged at level DEBUG for the rest of such a time."""
READ_TURN_S: Final = 0.005
"""The I/O loop begins no further receive from one connection after so long; it reads the others first."""
GRPC_STOP_GRACE_S: Final = 0.2
"""Time that gRPC's server gives running calls when a listener stops; then it cuts them off."""
GROUP_FAREWELL_LIMIT_S: Final = 4.0
"""A rank that leaves tells rank 0, and ends its watch."""
GROUP_EXIT_LIMIT_S: Final = 1.0
"""Each group that is left open when the program exits."""
NCCL_CLOSE_LIMIT_S: Final = 60.0
"""The watchdog's thread when a group is destroyed: freeing a communicator can take NCCL long."""
PROGRESS_STOP_LIMIT_S: Final = 5.0
"""The end of the thread that moves messages between ranks."""
PIPELINE_ABORT_LIMIT_S: Final = 2.0
"""The stages' runners end a step that failed elsewhere; the driver then raises without waiting for the rest."""
STORE_LINGER_S: Final = 0.1
"""The store's service stays this long after its last reply, so that the reply leaves before the process ends."""
LAUNCH_EXIT_LIMIT_S: Final = 60.0
"""A process of `launch` whose function has returned, measured by its parent; then the job fails."""
LAUNCH_END_LIMIT_S: Final = 5.0
"""Processes of `launch` that were told to end, measured by their parent: after SIGTERM they are killed, and after
SIGKILL their parent stops waiting for them."""
JOB_STOP_LIMIT_S: Final = 20.0
"""`python -m rpcdist stop` waits for the end of the program that called `launch`; then it says that this goes on."""
CLUSTER_START_LIMIT_S: Final = 300.0
"""The processes of a `LocalCluster` import the program, measured by their parent; then the cluster is ended."""

# ------------------------------------------------------------ Retrying

RESTART_FIRST_PAUSE_S: Final = 0.2
"""Longest first pause before `launch` starts a rank again whose process was lost."""
RESTART_LONGEST_PAUSE_S: Final = 10.0
"""Longest of these pauses."""
CONNECT_FIRST_PAUSE_S: Final = 0.05
"""Longest first pause between attempts to reach a process that does not listen yet, or again."""
CONNECT_LONGEST_PAUSE_S: Final = 0.5
"""Longest of these pauses."""
LOCK_FIRST_PAUSE_S: Final = 0.0002
"""Longest first pause between attempts at what another process of this host holds for microseconds: the lock of a file,
the queue of a Unix socket."""
LOCK_LONGEST_PAUSE_S: Final = 0.02
"""Longest of these pauses."""
STORE_FIRST_PAUSE_S: Final = 0.001
"""Longest first pause between looks at the file of a file store, or at a key of one of torch's stores, whose own waits
cannot be interrupted."""
FILE_LONGEST_PAUSE_S: Final = 0.1
"""Longest of these pauses for a file."""
TORCH_STORE_LONGEST_PAUSE_S: Final = 0.5
"""Longest of these pauses for torch's stores."""
DESCRIPTOR_SHORTAGE_PAUSE_S: Final = 0.1
"""Before the next connection is accepted after accepting one failed, usually for want of file descriptors."""

# ------------------------------------------------------------ Polling and batching

CHECK_INTERVAL_S: Final = 0.05
"""A waiting thread checks this often for an event that nothing reports: the failure of its group or job, members of an
elastic group that come or go, or the growth of the file to which a frozen process writes its stacks."""
CHECK_INTERVAL_MS: Final = round(1000 * CHECK_INTERVAL_S)
"""The same for `poll`, which counts milliseconds."""
SIGNAL_CHECK_INTERVAL_S: Final = 0.5
"""A main thread that waits wakes up this often to see a Ctrl-C that came just before it slept, or that Ray's own wait
ignores."""
SHUTDOWN_POLL_S: Final = 1.0
"""A graceful `shutdown` counts the outstanding calls at least this often."""
DEPARTURE_REVIEW_S: Final = 5.0
"""Interval at which the leader of a `shutdown` looks again who lives, also those that it has given up."""
SHUTDOWN_REPORT_INTERVAL_S: Final = 60.0
"""A graceful `shutdown` logs this often what it waits for."""
LOG_CALLS_AFTER_S: Final = 300.0
"""A call that has not ended for this long is logged once, with its stack, by the worker that serves it and by the one
that waits for it. Users set it by `RpcOptions(log_calls_after=...)`."""
LOOK_LIMIT_S: Final = 4.0
"""The answer of a worker that is asked what it does, connecting included."""
LOOK_PATIENCE_S: Final = 1.4
"""A worker that has not answered after this time is looked at from outside, and its answer waited for meanwhile."""
LOOK_LATE_S: Final = 0.4
"""A worker that seems frozen, but computes, has this time more to answer; on a busy host, `LOOK_LIMIT_S` in all."""
LOOK_PERIOD_S: Final = 0.1
"""A worker that is asked again within this time what it does gives the same answer."""
OLD_CALLS_LOOK_S: Final = 1.0
"""Interval at which a worker looks whether a call has become that old."""
LIVE_VIEW_PERIOD_S: Final = 0.5
"""Interval between two looks of `python -m rpcdist dashboard` and `top` at a job. Users set it by `--period`."""
LIVE_VIEW_MIN_PERIOD_S: Final = 0.2
"""Live views look no more often than this."""
LIVE_NOTES_S: Final = 10.0
"""A worker notes log lines and spans for so long after a live view has asked."""
VIEWER_WRITE_LIMIT_S: Final = 20.0
"""A browser that has not taken an update of the dashboard for so long is gone."""
LONG_WAIT_S: Final = 1.0
"""Calls, collectives and backward passes that are younger count as going well in `python -m rpcdist stacks`."""
STORY_CONTEXT_S: Final = 10.0
"""Calls that failed so long before the first failure of a job are left out of its report."""
FLIGHT_FILE_PERIOD_S: Final = 1.0
"""A worker that notices several failures of others within this time writes its flight file for the first of them."""
FLIGHT_NOTICE_S: Final = 0.3
"""A process that fails with an exception tells the other workers, and gives them this long to write their files. So
does `launch`, before it ends the others, where a process was killed."""
FROZEN_STACKS_LIMIT_S: Final = 1.0
"""The stacks of a process that does not answer, which a signal has it write; then the report goes without them."""
LOG_PERIOD_S: Final = 60.0
"""Repeated warnings are logged once in this period: a refused connection for each host and reason, and a resource that
this process lacks (descriptors, memory, threads, ports)."""
ACKNOWLEDGE_DELAY_S: Final = 0.01
"""Control messages that arrive within this time are acknowledged together."""
CONTEXT_DROP_DELAY_S: Final = 0.05
"""Autograd contexts that hold little memory and end within this time are released together on other workers."""
CONTEXT_RELEASE_DELAY_S: Final = 0.05
"""The ends of autograd contexts that hold little memory are told to other workers within this time, together."""
GRADIENT_HOLD_LIMIT_S: Final = 0.001
"""Small gradients that become ready within this time travel to other workers together."""
POOL_LEAD_S: Final = 0.02
"""A thread of the pool that has nothing to do reads for so long where its last call came from."""
ANSWER_HOLD_S: Final = 0.0002
"""An answer waits so long for those of the next calls of its thread. The pool's monitor, which looks every millisecond,
writes it if the next call takes longer."""
BURST_GAP_S: Final = 60e-6
"""Messages closer together than this are a burst, and the I/O loop writes them together."""
LINGER_S: Final = 0.001
"""The message of a `remote()` waits for so long, in ticks of the I/O loop, for another one that takes it along."""
LONGEST_LINGER_S: Final = 0.004
"""It waits for so long where all the ones before it were taken along."""
SEGMENTS_RETURN_S: Final = 0.02
"""Interval at which a session tells its peer which lent segments are free again, if no message does so earlier."""
SEGMENTS_TRIM_S: Final = 30.0
"""A segment of shared memory that no message needed for this time is given back to the system."""
COPY_TURN_LIMIT_S: Final = 0.05
"""A large buffer's turn to be copied into shared memory, measured by the thread that copies; then it copies at once."""
POOL_TICK_S: Final = 0.001
"""Interval at which the pool's monitor looks whether jobs wait for a thread."""
POOL_CORE_DELAY_S: Final = 0.001
"""A job waits this long before another thread is worth its switches."""
POOL_STALL_S: Final = 0.005
"""No job has ended for this long while others wait: handlers block, and the pool gets more threads."""
POOL_IDLE_LIMIT_S: Final = 5.0
"""A thread of the pool that had nothing to do for this long ends."""
SELECT_LIMIT_S: Final = 3600.0
"""One call of `select`, whose argument the operating system limits; the wait then goes on."""
SELECT_LIMIT_MS: Final = round(1000 * SELECT_LIMIT_S)
"""The same for `poll`, which counts milliseconds."""
IDLE_RECHECK_S: Final = 60.0
"""A group's thread without work wakes up this often; it is woken by work at once."""
FUTEX_WAIT_S: Final = 0.01
"""A rank that sleeps on shared memory looks this often whether its group has failed; others wake it at once."""
PROGRESS_GRACE_S: Final = 0.001
"""Messages whose owner may be about to wait for them are left alone this long by the own thread of their group."""
SPIN_LIMIT_S: Final = 500e-6
"""A rank that waits for another one tries for so long before it sleeps, at most; 1 MiB takes 300 us on one host."""
REFUSAL_POLL_S: Final = 0.001
"""A thread that sends messages reads at most this often whether the receiver refused some."""
NCCL_POLL_S: Final = 0.002
"""Interval at which the watchdog looks whether operations on the device are done or late."""
NCCL_WORK_POLL_S: Final = 0.0005
"""Interval at which a thread that waits with a timeout looks at the device."""
MPI_SHORT_PAUSE_S: Final = 50e-6
"""Between looks at an MPI request that was not done after spinning."""
MPI_LONG_PAUSE_S: Final = 0.001
"""Between looks at an MPI request that takes long."""
