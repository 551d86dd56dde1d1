"""`IterationState`: the gradients that an iteration waits for, its reductions, and its end. A pure state machine.

Rules:
 1. A forward pass that synchronises opens an iteration. So does a backward pass that belongs to such a forward pass
    after its iteration has ended. A gradient that arrives outside an iteration, e.g. under `no_sync`, stays on its
    rank.
 2. `EVERY`: every parameter gets one gradient. The iteration ends with the backward pass that adds the last of them.
 3. `FOUND`: the iteration ends with the first backward pass, and waits for the parameters to which that pass will add.
 4. `STATIC`: the first iteration is like `FOUND`, and counts gradients. Each later one ends with the pass in which
    every parameter has got as many gradients as in the first one.
 5. `FOUND` and `STATIC`: a rank contributes every gradient that it has. A parameter is averaged if any pass on some
    rank has added a gradient to it since its last average; the gradients of other parameters stay unchanged.
 6. Buckets are reduced in order, each as soon as it and all buckets before it are complete; the rest are reduced at
    the end of the iteration.
 7. If the program ends iterations itself, an iteration with all its gradients is closed and waits for the program.
    Until then no iteration may open, and no gradient may come. The program may also end it during its pass, when no
    gradient is missing.

The phases and their transitions (`arm` leads to ARMED from each phase except AWAITED, and `pause` ends a pass):

    IDLE      --begin_pass--> PASSING   --end_pass--> IDLE      no iteration is open
    ARMED     --begin_pass--> ENTERED   --end_pass--> ARMED     an iteration is open and has no gradient yet
    PARTIAL   --begin_pass--> AVERAGING --end_pass--> PARTIAL   the iteration has some of its gradients

`reopen` leads from IDLE to ARMED and from PASSING to ENTERED, `add` to AVERAGING; `finish` and `abandon` close. If the
program ends iterations, `finish` leads from PARTIAL to AWAITED, and `end_awaited` from there to IDLE.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Literal


class DueRule(Enum):
    """The rules for which parameters get gradients in an iteration."""

    EVERY = 1
    FOUND = 2
    STATIC = 3


class Phase(Enum):
    """Whether an iteration is open and has gradients, and whether a backward pass runs."""

    IDLE = "no iteration is open, and no backward pass runs", False, False
    PASSING = "a backward pass runs that adds nothing, or opens an iteration with its first gradient", False, True
    ARMED = "an iteration is open", True, False
    ENTERED = "a backward pass runs that has added nothing yet", True, True
    AVERAGING = "gradients arrive", True, True
    PARTIAL = "a backward pass has ended, and gradients are missing", True, False
    AWAITED = "an iteration is closed, and waits for the program to end it", False, False

    def __init__(self, _meaning: str, is_open: bool, in_pass: bool) -> None:
        self.is_open = is_open
        self.in_pass = in_pass


IDLE, PASSING, ARMED, ENTERED, AVERAGING, PARTIAL, AWAITED = Phase  # looked up quickly, as Enum members are not
_IN_PASS = {IDLE: PASSING, ARMED: ENTERED, PARTIAL: AVERAGING}
_OUT_OF_PASS = {inside: outside for outside, inside in _IN_PASS.items()}


class UnexpectedGradient(Exception):
    """A parameter got a gradient that the rules do not allow.

    Attributes:
        count: how many gradients it has got in this iteration.
        allowed: how many it may get; None if the rule allows one, and no pass has announced this parameter.
    """

    def __init__(self, index: int, count: int, allowed: int | None) -> None:
        super().__init__(index, count, allowed)
        self.index = index
        self.count = count
        self.allowed = allowed


class IterationState:
    """The state of one iteration at a time; see the rules at the top of the file.

    Attributes:
        iteration: the number of the last opened iteration, from 1.
        num_unused_forwards: forward passes that synchronised but had no backward pass yet.
        missing: the parameters for whose gradients the iteration waits.
        unaveraged: the parameters whose `.grad` has changed since their last average; empty under `EVERY`.
        ready_order: the parameters in the order in which their gradients became ready in this iteration.
        reduced: the buckets whose reductions were started in this iteration, in order.
        static_use: the parameters that some rank uses in a static graph, after the ranks have agreed on them.
        could_be_static: whether every iteration so far used the same parameters on this rank.
    """

    def __init__(self, count: int, rule: DueRule, skips_unused: bool = False) -> None:
        self.phase = IDLE
        self.iteration = self.num_unused_forwards = 0
        self.missing: set[int] = set()
        self.unaveraged: set[int] = set()
        self.ready_order: list[int] = []
        self.reduced: list[int] = []
        self.static_use: frozenset[int] | None = None
        self.could_be_static = True
        self._rule = rule
        self._skips_unused = skips_unused
        self._all = frozenset(range(count))
        # How passes reach the parameters, as far as hooks can see: "unseen" if the forward pass returned no tensor with
        # a graph; "watched" if passes of its loss go through the outputs; "differentiated" if gradients of the outputs
        # have a graph, whose passes may avoid the outputs.
        self._outputs: Literal["unseen", "watched", "differentiated"] = "unseen"
        self._pass = 0  # the number of the last backward pass
        self._has_reached = False  # whether that pass is known to belong to the forward pass
        # The notice to the other ranks of missing gradients in this iteration; "needless" if iterations are known to
        # take several backward passes.
        self._notice: Literal["due", "posted", "needless"] = "due"
        self._captured: set[int] = set()  # by a distributed pass of this iteration, which does not change `.grad`
        self._calls = [0] * count
        self._expected: list[int] | None = None
        self._expects = self._all
        self._unused: set[int] = set()  # in this iteration, and in the one before it
        self._unused_before: set[int] | None = None
        self.use_buckets([range(count)], keeps_last=True)

    def use_buckets(self, buckets: Sequence[Iterable[int]], keeps_last: bool) -> None:
        """Sets the buckets of later reductions; with `keeps_last`, the end of the iteration reduces the last one."""
        self._buckets = [frozenset(bucket) for bucket in buckets]
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket}
        self._num_early = len(self._buckets) - keeps_last
        self._expect_buckets()

    def _expect_buckets(self) -> None:
        self._next = 0
        self.reduced = []
        self._num_missing = [len(bucket & self.missing) for bucket in self._buckets]

    def restart(self) -> None:
        """The ranks changed: determines the static graph again. Gradients that were not averaged stay so."""
        self._close()
        self.ready_order = []
        self._notice = "due"
        self.static_use = self._expected = None
        self._expects = self._all

    # ------------------------------------------------------------ questions

    @property
    def ends_with_pass(self) -> bool:
        """Whether the iteration ends with the next backward pass, even if gradients are missing then."""
        return self._rule is DueRule.FOUND or self.counts

    @property
    def counts(self) -> bool:
        """Whether the iteration counts the gradients of a static graph, and so ends only with its pass."""
        return self._rule is DueRule.STATIC and self._expected is None

    @property
    def tracks(self) -> bool:
        """Whether parameters may stay without gradients (rule 5)."""
        return self._rule is not DueRule.EVERY

    @property
    def in_graph(self) -> frozenset[int]:
        """The parameters that the static graph of this rank uses, after its first iteration."""
        return frozenset() if self._expected is None else self._expects

    @property
    def unused(self) -> frozenset[int]:
        """The parameters that this rank did not use in the last iteration, if that is known."""
        if self._rule is DueRule.STATIC:
            return self._all - self._expects
        return frozenset(self._unused_before or ())

    def uses(self, index: int) -> bool:
        """Whether this rank may contribute a gradient of a parameter in this iteration."""
        if not self.tracks or index in self.unaveraged or index in self._captured:
            return True
        return self._expected is not None and self._expected[index] > 0

    def takes(self, syncs: bool) -> bool:
        """Whether a gradient that arrives now belongs to an iteration."""
        return self.phase not in (IDLE, AWAITED) or (self._outputs == "differentiated" and syncs)

    # ------------------------------------------------------------ forward passes

    def arm(self, watched: bool) -> None:
        """Opens an iteration after a forward pass that synchronises, and whose outputs may be `watched`."""
        if self.phase.is_open:
            self.num_unused_forwards += 1
        else:
            self.iteration += 1
        self._outputs = "watched" if watched else "unseen"
        self._open(ARMED)

    def reopen(self) -> None:
        """Begins an iteration in another backward pass of a forward pass whose iteration has ended."""
        self.num_unused_forwards = max(0, self.num_unused_forwards - 1)
        self.iteration += 1
        self._open(ENTERED if self.phase.in_pass else ARMED)

    def _open(self, phase: Phase) -> None:
        self.phase = phase
        self.missing = set(self._expects)
        self.ready_order = []
        if self._notice == "posted":
            self._notice = "due"
        self._captured.clear()
        if self._rule is DueRule.STATIC:
            self._calls = [0] * len(self._all)
        self._expect_buckets()

    def pause(self) -> None:
        """Notes a forward pass that does not synchronise, whose gradients belong to no iteration."""
        self.phase = _OUT_OF_PASS.get(self.phase, self.phase)
        if self._outputs == "differentiated":
            self._outputs = "watched"

    def mirror(self) -> list[int]:
        """Opens an iteration without gradients of this rank; returns the buckets to reduce before its end."""
        self.arm(watched=False)
        self.missing.clear()
        self._num_missing = [0] * len(self._buckets)
        return self._complete()

    # ------------------------------------------------------------ backward passes

    def reach(self, builds_graph: bool) -> None:
        """Notes that a pass has reached the outputs of the forward pass; it may build a graph (`create_graph=True`)."""
        if builds_graph:
            self._outputs = "differentiated"
        self._has_reached = True

    def begin_pass(self, due: Iterable[int]) -> int:
        """Begins a backward pass; returns its number.

        Args:
            due: the parameters to which it will add; used only if the iteration ends with the pass.
        """
        if self._rule is DueRule.FOUND:  # the first iteration of a static graph is reduced at its end
            self._unused = self.missing.difference(due)
            self.missing -= self._unused
            for index in self._unused:
                self._num_missing[self._bucket_of[index]] -= 1
        self.phase = _IN_PASS.get(self.phase, self.phase)
        self._has_reached = self._outputs != "watched"
        self._pass += 1
        return self._pass

    def add(self, index: int, captured: bool = False) -> Sequence[int]:
        """Notes that a gradient was added in an iteration; returns the buckets to reduce now.

        Args:
            captured: whether a distributed pass holds it instead of `.grad`.

        Raises:
            UnexpectedGradient: the parameter may not get another gradient.
        """
        self.phase = AVERAGING
        if self._rule is not DueRule.EVERY:
            (self._captured if captured else self.unaveraged).add(index)
        if self._rule is DueRule.STATIC and not self._is_last(index):
            return ()
        if index not in self.missing:
            raise UnexpectedGradient(index, 2, None)
        self.missing.discard(index)
        self.ready_order.append(index)
        number = self._bucket_of[index]
        self._num_missing[number] -= 1
        return () if self._num_missing[number] else self._complete()

    def _is_last(self, index: int) -> bool:
        """Counts a gradient of a static graph."""
        self._calls[index] += 1
        if self._expected is None:
            return False  # the first iteration only counts
        if self._calls[index] > self._expected[index]:
            raise UnexpectedGradient(index, self._calls[index], self._expected[index])
        return self._calls[index] == self._expected[index]

    def add_outside(self, index: int) -> None:
        """Notes that a gradient was added outside an iteration.

        Raises:
            UnexpectedGradient: the static graph does not contain this parameter, so no iteration would average it.
        """
        if not self.tracks:
            return
        if self.static_use is not None and index not in self.static_use:
            raise UnexpectedGradient(index, 1, 0)
        self.unaveraged.add(index)

    def runs(self, number: int) -> bool:
        """Whether a backward pass is still running."""
        return self.phase.in_pass and number == self._pass

    def end_pass(self, number: int) -> bool:
        """Ends a backward pass, unless it has ended, and those nested in it; returns whether the iteration ends."""
        if not self.runs(number):
            return False
        self.phase = _OUT_OF_PASS[self.phase]
        if not self.phase.is_open:
            return False
        if self.ends_with_pass:
            if self._rule is DueRule.STATIC:
                if not self._has_reached:
                    return False  # a pass of a penalty on the parameters alone; only the graph of the outputs is static
                self._expected = list(self._calls)
                self._expects = frozenset(index for index, calls in enumerate(self._calls) if calls)
            else:
                self._compare_use(self._unused | self.missing)
            self.missing.clear()
        return not self.missing

    def end_in_pass(self) -> bool:
        """Ends the iteration for the program while its pass runs; returns False if gradients are missing."""
        if self.phase is not AVERAGING or self.missing or self.counts:
            return False
        if self._rule is DueRule.FOUND:
            self._compare_use(self._unused)
        return True

    def _compare_use(self, unused: set[int]) -> None:
        self.could_be_static = self.could_be_static and self._unused_before in (None, unused)
        self._unused_before = unused

    def owes_notice(self) -> bool:
        """Whether to notify the other ranks now of missing gradients: once, if no other pass is expected."""
        if self.phase is not PARTIAL or self.ends_with_pass or self._notice != "due":
            return False
        self._notice = "posted"
        return True

    # ------------------------------------------------------------ reductions and the end

    def _complete(self) -> list[int]:
        found: list[int] = []
        while self._next < self._num_early and not self._num_missing[self._next]:
            found += self._reduce_next()
        return found

    def _reduce_next(self) -> list[int]:
        number = self._next
        self._next += 1
        if self._skips_unused and not any(map(self.uses, self._buckets[number])):
            return []
        self.reduced.append(number)
        return [number]

    def finish(self, awaits: bool = False) -> list[int]:
        """Closes the iteration, which has all gradients; returns the buckets that are not reduced yet.

        With `awaits`, the iteration then waits for the program to end it.
        """
        if self._notice == "posted":
            self._notice = "needless"
        self._close()
        if awaits:
            self.phase = AWAITED
        return [number for _ in range(self._next, len(self._buckets)) for number in self._reduce_next()]

    def end_awaited(self) -> None:
        """Notes that the program ends the iteration that awaits it."""
        self.phase = IDLE

    def settle(self) -> None:
        """Notes that the gradients of this rank are averaged."""
        self.unaveraged.clear()

    def abandon(self) -> list[int] | None:
        """Gives up a begun iteration; returns its parameters without gradients, or None if no iteration has begun.

        Later gradients do not belong to it.
        """
        if self.phase is not PARTIAL and self.phase is not AVERAGING:
            return None
        self._close()
        return sorted(self.missing)

    def _close(self) -> None:
        self.phase = PASSING if self.phase.in_pass else IDLE
