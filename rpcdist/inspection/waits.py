"""Explains which worker waits for which: follows calls over all workers, from waiting threads to the causes.

Pure: facts in, an explanation out. A node waits for other nodes, which `_WaitGraph.after` returns, or other nodes wait
for it. A chain begins at a node for which no other node waits. It ends at a node that waits for no known node, or at a
node that it has passed, which is a deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, NamedTuple

from rpcdist.inspection.facts import (
    CallMade,
    CallServed,
    Frame,
    GroupFacts,
    OperationFacts,
    PassFacts,
    SilentWorker,
    ThreadState,
    WorkerFacts,
)
from rpcdist.time_limits import LONG_WAIT_S

GATHERING_CALLS: Final = {
    "rpcdist.rpc._membership.gatherings:contribute": "barrier",
    "rpcdist.rpc._membership.shutdown:depart": "shutdown",
}
MAIN_THREAD: Final = "MainThread"
_COLLECTIVE_FILES: Final = ("/collectives/",)
_AUTOGRAD_FILES: Final = ("/autograd/_",)
MAX_LINKS: Final = 50
MAX_CHAINS: Final = 200
MAX_STEPS: Final = 100_000
"""Limit on the nodes that are compared and the links that are described: facts of a misbehaving worker may say that
everything waits for everything. Beyond it, the explanation has fewer chains."""
MAX_STACK: Final = 12


class WaitNode(NamedTuple):
    """`kind` is "made" or "served" for a call, "thread", "operation", "pass", or "silent" for a silent worker."""

    kind: str
    worker: str
    key: object = None


@dataclass(frozen=True, slots=True)
class WaitLink:
    """One step of a chain.

    Attributes:
        worker: its worker.
        text: the waiter, the duration, and the object of the wait.
        stack: its lines, the outermost first, without those of this package at the ends.
        details: more text, such as the stacks that a process has written itself.
    """

    worker: str
    text: str
    stack: tuple[Frame, ...] = ()
    details: str = ""


@dataclass(frozen=True, slots=True)
class Chain:
    """The path from one waiter to the end. `is_circle`: whether the chain has passed the end before."""

    links: tuple[WaitLink, ...]
    is_circle: bool = False


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reasons why a job does not continue.

    Attributes:
        chains: one for each waiter, the longest first.
        deadlocks: each circle in a sentence.
        culprits: the ends of chains, in a sentence each, with the number of chains, the largest first. A chain that
            ends at a young call has none, as the work at its end makes progress.
    """

    chains: tuple[Chain, ...]
    deadlocks: tuple[str, ...]
    culprits: tuple[tuple[str, int], ...]


def explain(
    workers: Sequence[WorkerFacts], silent: Sequence[SilentWorker] = (), older_than_s: float = LONG_WAIT_S
) -> Explanation:
    """Explains the waits of the workers of a job.

    Args:
        workers: the workers that have answered.
        silent: the workers that have not.
        older_than_s: younger calls and operations count as healthy.
    """
    graph = _WaitGraph(workers, silent, older_than_s)
    chains: list[Chain] = []
    circles: dict[frozenset[WaitNode], str] = {}
    ends: Counter[str] = Counter()
    reached: set[WaitNode] = set()
    of_shutdown: set[Chain] = set()
    for root in graph.roots():
        if len(chains) >= MAX_CHAINS or not graph.may_go_on():
            break
        if root in reached:
            continue
        for path, is_circle in _paths(graph, root):
            if not graph.may_go_on(len(path)):
                break
            reached.update(path)
            chain = Chain(tuple(graph.link(node, after) for node, after in zip_longest(path, path[1:])), is_circle)
            chains.append(chain)
            if graph.is_in_shutdown(root):
                of_shutdown.add(chain)
                if ends or circles:  # otherwise it waits only for the end of the job, or for what others wait for
                    continue
            if is_circle:
                circle = path[path.index(path[-1]) : -1]
                circles.setdefault(frozenset(circle), _sentence(graph, circle))
            elif not graph.goes_on(path):
                ends[graph.culprit(path[-1])] += 1
    chains.sort(key=lambda chain: (not chain.is_circle, chain in of_shutdown, -len(chain.links)))
    return Explanation(tuple(chains), tuple(circles.values()), tuple(ends.most_common()))


def _paths(graph: _WaitGraph, root: WaitNode) -> Iterator[tuple[list[WaitNode], bool]]:
    """Yields the paths from a node to the ends, one for each end, and whether each ends in a circle."""
    seen: set[WaitNode] = {root}

    def follow(path: list[WaitNode]) -> Iterator[tuple[list[WaitNode], bool]]:
        followed = False
        for after in graph.after(path[-1]):
            if after in path:
                followed = True
                yield [*path, after], True
            elif after not in seen and len(path) < MAX_LINKS:
                seen.add(after)
                followed = True
                yield from follow([*path, after])
            else:
                followed = followed or after in seen
        if not followed:
            yield path, False

    yield from follow([root])


def _sentence(graph: _WaitGraph, circle: Sequence[WaitNode]) -> str:
    """Describes a circle, from one of its calls. A thread is one step with the call that it serves."""
    if circle[0].kind == "thread" and circle[-1].kind == "served":
        circle = [circle[-1], *circle[:-1]]
    steps: list[WaitNode] = []
    locks: list[str] = []  # the lock for which each step waits, or ""
    before = ""
    for node in circle:
        if node.kind == "thread" and before == "served":
            locks[-1] = graph.lock(node)
        elif node.kind in ("served", "thread"):
            steps.append(node)
            locks.append(graph.lock(node))
        before = node.kind
    if not steps:
        steps, locks = list(circle), [""] * len(circle)
    names = [graph.name(node) for node in steps]
    if len(set(names)) < len(names):
        names = [f"{name}{graph.caller(node)}" for name, node in zip(names, steps, strict=True)]
    if len(names) == 1 and locks[0]:
        return f"{names[0]} waits for the lock `{locks[0]}`, which it holds itself"
    awaited = zip(locks, [*names[1:], names[0]], strict=True)
    parts = [f"the lock `{lock}`, held by {name}" if lock else name for lock, name in awaited]
    return f"{names[0]} waits for " + ", which waits for ".join(parts)


class _WaitGraph:
    """The nodes of one job."""

    def __init__(self, workers: Sequence[WorkerFacts], silent: Sequence[SilentWorker], older_than_s: float) -> None:
        self._older_than_s = older_than_s
        self._steps_left = MAX_STEPS
        self._facts = {facts.worker: facts for facts in workers}
        self._silent = {one.worker: one for one in silent}
        self._made: dict[WaitNode, CallMade] = {}
        self._served: dict[WaitNode, CallServed] = {}
        self._threads: dict[WaitNode, ThreadState] = {}
        self._by_thread: dict[WaitNode, WaitNode] = {}  # the call that each thread serves
        self._by_call: dict[tuple[str, int], WaitNode] = {}  # the served call, by session and number
        self._operations: dict[WaitNode, tuple[GroupFacts, OperationFacts]] = {}
        self._passes: dict[WaitNode, PassFacts] = {}
        self._of_worker: dict[str, list[WaitNode]] = {}  # the calls that each worker serves
        self._read: dict[tuple[str, int], list[str]] = {}  # the sessions of the streams that each worker reads
        for facts in workers:
            name = facts.worker
            self._made |= {WaitNode("made", name, call.id): call for call in facts.calls_made}
            self._threads |= {WaitNode("thread", name, thread.id): thread for thread in facts.threads}
            self._passes |= {WaitNode("pass", name, current.id): current for current in facts.backward_passes}
            for served in facts.calls_served:
                node = WaitNode("served", name, (served.session, served.id))
                self._served[node] = served
                self._of_worker.setdefault(name, []).append(node)
                self._by_call[served.session or f"to itself: {name}", served.id] = node
                if served.thread is not None:
                    self._by_thread[WaitNode("thread", name, served.thread)] = node
            for stream in facts.streams:
                if stream.role == "reads":
                    self._read.setdefault((name, stream.id), []).append(stream.session)
            for group in facts.groups:
                for operation in group.operations:
                    self._operations[WaitNode("operation", name, (group.name, operation.sequence))] = group, operation

    def may_go_on(self, num_steps: int = 0) -> bool:
        """Counts steps; whether some are left."""
        self._steps_left -= num_steps
        return self._steps_left > 0

    # ------------------------------------------------------------ where chains begin

    def roots(self) -> Iterator[WaitNode]:
        """Yields nodes for which no other is known to wait, the surest first; later ones may be on earlier chains."""
        waiting = [
            node
            for node, thread in self._threads.items()
            if node not in self._by_thread and self._waits_long(node, thread)
        ]
        yield from (node for node in waiting if not self.is_in_shutdown(node))
        for node, (_, operation) in self._operations.items():
            if operation.age_s >= self._older_than_s:
                yield node
        yield from (node for node, current in self._passes.items() if current.parent == "")
        waiters: list[tuple[WaitNode, ThreadState | CallServed]] = [*self._threads.items(), *self._served.items()]
        awaited = {WaitNode("made", node.worker, id) for node, waiter in waiters for id in waiter.waits_for}
        for made_node, made in self._made.items():
            if made.age_s >= self._older_than_s and made_node not in awaited:
                yield made_node
        called = {self._callee(node, call) for node, call in self._made.items()}
        for node, call in self._served.items():
            if call.age_s >= self._older_than_s and node not in called:
                yield node
        yield from (node for node in waiting if self.is_in_shutdown(node))
        yield from (WaitNode("silent", name) for name in self._silent)
        yield from (node for node, call in self._served.items() if call.age_s >= self._older_than_s)  # circles

    def is_in_shutdown(self, node: WaitNode) -> bool:
        """Whether the node is a thread in `shutdown`, in which workers serve others until the end of the job."""
        thread = self._threads.get(node)
        waited = [self._made.get(WaitNode("made", node.worker, id)) for id in thread.waits_for] if thread else []
        return any(call is not None and GATHERING_CALLS.get(call.function) == "shutdown" for call in waited)

    def goes_on(self, path: Sequence[WaitNode]) -> bool:
        """Whether a chain ends at a young call, so that the work at its end makes one call after the other."""
        ages_s = [call.age_s for node in path if (call := self._made.get(node) or self._served.get(node)) is not None]
        is_call = path[-1].kind in ("made", "served", "thread")
        return is_call and len(ages_s) > 1 and ages_s[-1] < self._older_than_s

    def _waits_long(self, node: WaitNode, thread: ThreadState) -> bool:
        waited = [self._made.get(WaitNode("made", node.worker, id)) for id in thread.waits_for]
        if not waited:
            return False
        return any(call is None or call.age_s >= self._older_than_s for call in waited)

    # ------------------------------------------------------------ what waits for what

    def after(self, node: WaitNode) -> list[WaitNode]:
        """Returns the known nodes for which a node waits."""
        found: Iterable[WaitNode]
        if not self.may_go_on():
            return []
        match node.kind:
            case "made":
                found = self._after_made(node, self._made[node])
            case "served":
                found = self._after_served(node, self._served[node])
            case "thread":
                found = self._after_thread(node, self._threads[node])
            case "operation":
                found = self._late_ranks(node)
            case "pass":
                found = self._after_pass(node)
            case _:
                found = ()
        distinct = list(dict.fromkeys(found))
        self.may_go_on(1 + len(distinct))
        return distinct

    def _callee(self, node: WaitNode, call: CallMade) -> WaitNode | None:
        return self._by_call.get((call.session or f"to itself: {node.worker}", call.id))

    def _after_made(self, node: WaitNode, call: CallMade) -> Iterator[WaitNode]:
        callee = self._callee(node, call)
        if callee is not None:
            yield callee
        elif call.to in self._silent:
            yield WaitNode("silent", call.to)

    def _after_served(self, node: WaitNode, call: CallServed) -> Iterator[WaitNode]:
        worker = node.worker
        if call.phase == "producing" and self._why_producing(call):
            return  # its reader is to blame
        yield from (WaitNode("made", worker, id) for id in call.waits_for if WaitNode("made", worker, id) in self._made)
        if call.thread is not None and (thread := WaitNode("thread", worker, call.thread)) in self._threads:
            yield thread
        elif call.phase == "queued" and not call.is_coroutine:
            yield from self._running_in_pool(worker)
        elif call.phase == "in line":
            yield from self._running_at(worker, call)
        elif call.phase == "waiting" and call.on:
            yield from (other for other, made in self._served_at(worker) if made.creates == call.on and other != node)
        elif kind := GATHERING_CALLS.get(call.function):
            yield from self._missing(worker, kind, call.caller)
        elif call.is_coroutine:
            for other, running in self._served_at(worker):
                if running.is_coroutine and running.thread is not None:
                    yield other

    def _served_at(self, worker: str) -> Iterator[tuple[WaitNode, CallServed]]:
        nodes = self._of_worker.get(worker, [])
        self.may_go_on(len(nodes) // 4)  # each is compared, and few are followed
        return ((node, self._served[node]) for node in nodes)

    def _running_in_pool(self, worker: str) -> Iterator[WaitNode]:
        """Yields the calls that occupy the threads, for which a queued call waits if the pool cannot grow."""
        pool = self._facts[worker].pool
        if pool is not None and pool.threads >= pool.max_threads:
            for node, call in self._served_at(worker):
                if call.thread is not None and call.phase == "running":
                    yield node

    def _running_at(self, worker: str, waiting: CallServed) -> Iterator[WaitNode]:
        for node, call in self._served_at(worker):
            if call.on == waiting.on and call.phase == "running":
                yield node

    def _missing(self, host: str, kind: str, caller: str) -> Iterator[WaitNode]:
        """Yields the main threads of the workers that have not joined a gathering."""
        for gathering in self._facts[host].gatherings:
            if gathering.kind == kind and caller in gathering.came:
                yield from (main for name in gathering.missing if (main := self._main(name)) is not None)

    def _main(self, worker: str) -> WaitNode | None:
        if worker in self._silent:
            return WaitNode("silent", worker)
        threads = self._facts[worker].threads if worker in self._facts else ()
        return next((WaitNode("thread", worker, thread.id) for thread in threads if thread.name == MAIN_THREAD), None)

    def _after_thread(self, node: WaitNode, thread: ThreadState) -> Iterator[WaitNode]:
        for id in thread.waits_for:
            if (made := WaitNode("made", node.worker, id)) in self._made:
                yield made
            else:
                for session in self._read.get((node.worker, id), ()):
                    producer = self._by_call.get((session or f"to itself: {node.worker}", id))
                    if producer is not None:
                        yield producer
        if thread.lock_holder is not None:
            holder = WaitNode("thread", node.worker, thread.lock_holder)
            if (held_in := self._by_thread.get(holder)) is not None or holder in self._threads:
                yield held_in or holder
        if _is_in(thread, _COLLECTIVE_FILES):
            yield from (one for one in self._operations if one.worker == node.worker)

    def _late_ranks(self, node: WaitNode) -> Iterator[WaitNode]:
        """Yields the main threads of the ranks that have not called an operation."""
        group, operation = self._operations[node]
        for name, facts in self._facts.items():
            for theirs in facts.groups:
                if theirs.name == group.name and theirs.last_sequence < operation.sequence:
                    main = self._main(name)
                    if main is not None:
                        yield main
        for name in self._silent:
            yield WaitNode("silent", name)

    def _after_pass(self, node: WaitNode) -> Iterator[WaitNode]:
        waits = dict(self._passes[node].waits_for)
        for name in waits:
            if name in self._silent:
                yield WaitNode("silent", name)
            elif (theirs := WaitNode("pass", name, node.key)) in self._passes:
                yield theirs
        if not waits:
            for one, thread in self._threads.items():
                if one.worker == node.worker and _is_in(thread, _AUTOGRAD_FILES) and not thread.waits_for:
                    yield one

    # ------------------------------------------------------------ in words

    def link(self, node: WaitNode, after: WaitNode | None) -> WaitLink:
        """Returns a node as a step of a chain."""
        text, details = self.name(node), ""
        stack: tuple[Frame, ...] = ()
        match node.kind:
            case "thread":
                thread = self._threads[node]
                text = self._thread_text(thread)
                stack = _users_part(thread.stack)
            case "made":
                made = self._made[node]
                text = f"waits {made.age_s:.1f} s for {_called(made.function)} at {made.to}{_left(made.remaining_s)}"
                if after is None:
                    text += f": {self._why_unanswered(made)}"
            case "served":
                call = self._served[node]
                does = _PHASES.get(call.phase, call.phase)
                text = f"{does} {_called(call.function)} for {call.caller}, {self._ages(call)}"
                if after is None or call.thread is None:
                    text += self._why_stuck(node, call, after)
                stack = _users_part(call.stack)
            case "operation":
                group, operation = self._operations[node]
                # The other rank of a message; for a collective, the detail is its reduction.
                whom = f", {operation.detail}," if operation.detail.startswith(("to ", "from ")) else ""
                text = (
                    f"rank {group.rank} is in {operation.name} #{operation.sequence} of group {group.name!r}{whom} for "
                    f"{operation.age_s:.1f} s"
                )
                if after is not None:
                    text += f", which {after.worker} has not called"
            case "pass":
                current = self._passes[node]
                waits = "; ".join(f"{name} {why}" for name, why in current.waits_for) or "it runs here"
                text = f"is in the backward pass of autograd context {current.context}"
                text += f"{_left(current.remaining_s)}: {waits}"
            case "silent":
                one = self._silent[node.worker]
                text, details = f"did not answer: {one.detail}", one.stacks
        return WaitLink(node.worker, text, stack, details)

    def _thread_text(self, thread: ThreadState) -> str:
        what = "a callback on thread" if thread.is_callback else "thread"
        text = f"{what} {thread.name or thread.id}"
        if thread.lock:
            holder = thread.lock_holder
            of_holder = "whose holder is unknown" if holder is None else "which another thread of this worker holds"
            if holder == thread.id:
                of_holder = "which it holds itself"
            text += f" waits for the lock `{thread.lock}`, {of_holder}"
        return text

    def _ages(self, call: CallServed) -> str:
        ages = f"{call.age_s:.1f} s old"
        if call.running_s is not None:
            ages += f", running for {call.running_s:.1f} s"
        return ages + (", cancelled by its caller" if call.is_cancelled else "") + _left(call.remaining_s)

    def _why_stuck(self, node: WaitNode, call: CallServed, after: WaitNode | None) -> str:
        pool = self._facts[node.worker].pool
        if call.phase == "queued" and pool is not None and pool.threads >= pool.max_threads:
            return f": all {pool.max_threads} threads of the pool are taken (max_worker_threads)"
        if call.phase == "queued":
            return ": it waits for a thread" if not call.is_coroutine else ": the loop of coroutines has not started it"
        if call.phase == "in line":
            return f": the actor {call.on} runs another call"
        if call.function in GATHERING_CALLS:
            return ", and waits for the workers that have not joined"
        if call.phase == "producing":
            return self._why_producing(call)
        if call.phase == "waiting" and call.on:
            return f": the value of {call.on} does not exist yet"
        if call.phase == "waiting" and not call.waits_for:
            return ": the future that it has returned is not complete, and no call of this worker would complete it"
        if call.is_coroutine and call.thread is None and not call.waits_for:
            if after is not None:
                return ": another coroutine blocks the loop"
            return ": it awaits an object that is not a call, such as a future, an event or a sleep"
        return ""

    def _why_producing(self, call: CallServed) -> str:
        reader = self._facts.get(call.caller)
        for stream in reader.streams if reader is not None else ():
            if (stream.session, stream.id, stream.role) == (call.session, call.id, "reads") and stream.num_waiting:
                unread = "" if stream.unread_s is None else f" for {stream.unread_s:.1f} s"
                return f": no thread at {call.caller} has taken an item{unread}, and {stream.num_waiting} wait there"
        return ""

    def _why_unanswered(self, call: CallMade) -> str:
        if call.phase == "sending":
            return f"{call.bytes_done / 2**20:.1f} of {call.bytes_total / 2**20:.1f} MiB of its arguments are sent"
        if call.phase == "unsent":
            return "it is not sent: there is no connection yet, or no room for its bytes"
        if call.to not in self._facts:
            return f"{call.to} was not queried"
        return f"{call.to} has no such call, or has already answered it"

    def name(self, node: WaitNode) -> str:
        """Names a node in a sentence."""
        match node.kind:
            case "served":
                return f"{node.worker}'s {self._served[node].function}"
            case "made":
                return f"{node.worker}'s call of {self._made[node].function}"
            case "thread":
                serves = self._by_thread.get(node)
                return self.name(serves) if serves is not None else f"{node.worker}'s thread {self._threads[node].name}"
            case "operation":
                return f"{node.worker}'s {self._operations[node][1].name}"
            case "pass":
                return f"{node.worker}'s backward pass"
        return node.worker

    def lock(self, node: WaitNode) -> str:
        """Returns the name of the lock for which a thread waits; "" for other nodes."""
        return self._threads[node].lock if node.kind == "thread" else ""

    def caller(self, node: WaitNode) -> str:
        """Distinguishes a call from others of the same function."""
        return f" (called by {self._served[node].caller})" if node.kind == "served" else ""

    def culprit(self, node: WaitNode) -> str:
        """Describes the end of a chain in a sentence."""
        text = self.link(node, None).text
        if node.kind != "thread":
            return f"{node.worker} {text}"
        thread = self._threads[node]
        serves = self._by_thread.get(node)
        stack = _users_part(thread.stack)
        where = f" at {stack[-1].file}:{stack[-1].line} in {stack[-1].function}" if stack else ""
        what = f"{node.worker}, {text}" if serves is None else f"{self.name(serves)} on {text}"
        return f"{what}, is{where}"


_PHASES: Final = {
    "queued": "has queued",
    "in line": "has queued at the actor",
    "running": "runs",
    "waiting": "waits in",
    "producing": "produces the items of",
}


def _called(function: str) -> str:
    kind = GATHERING_CALLS.get(function)
    return function if kind is None else f"the {kind}"


def _left(remaining_s: float | None) -> str:
    if remaining_s is None:
        return ", without a deadline"
    return f", {remaining_s:.0f} s before its deadline" if remaining_s > 0 else ", past its deadline"


def _is_in(thread: ThreadState, places: Sequence[str]) -> bool:
    return any(place in frame.file for frame in thread.stack for place in places)


def _is_ours(frame: Frame) -> bool:
    file = frame.file
    return "/rpcdist/" in file or file.endswith("/threading.py") or file.startswith("<frozen")


def _users_part(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Returns the user's lines, without those of this package before and after them; all lines if there are none."""
    first = next((at for at, frame in enumerate(stack) if not _is_ours(frame)), None)
    if first is None:
        return stack[-3:]
    last = max(at for at, frame in enumerate(stack) if not _is_ours(frame))
    return stack[first : last + 1][-MAX_STACK:]
