"""Which gradients an iteration waits for, and which parameters it averages. Pure: indices in, decisions out.

Rules:
 1. A forward pass that synchronises opens an iteration. So does a backward pass that belongs to such a forward pass
    after its iteration has ended. A gradient that arrives outside of an iteration, e.g. under `no_sync`, stays on its
    rank.
 2. `EVERY`: the iteration ends with the backward pass in which the last parameter gets its gradient. Each gets one.
 3. `FOUND`: the iteration ends with the first backward pass. Due are the parameters to which that pass will add.
 4. `STATIC`: the first iteration is like `FOUND`, and counts. Each later one ends with the pass in which every
    parameter has got as many gradients as in the first one.
 5. `FOUND` and `STATIC`: a rank contributes every gradient that it has. A parameter is averaged if on some rank a
    gradient was added to it since its last average, by whichever pass; all others keep what they have.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class DueRule(Enum):
    """Which parameters get gradients in an iteration."""

    EVERY = 1
    FOUND = 2
    STATIC = 3


class UnexpectedGradient(Exception):
    """A parameter got a gradient that the rules do not allow.

    Attributes:
        index: the parameter.
        count: how many gradients it has got in this iteration.
        allowed: how many it may get; None where the rule allows one, of which no pass has told before.
    """

    def __init__(self, index: int, count: int, allowed: int | None) -> None:
        super().__init__(index, count, allowed)
        self.index = index
        self.count = count
        self.allowed = allowed


class DueGradients:
    """The state of one iteration at a time; see the rules at the top of the file.

    Attributes:
        is_open: whether an iteration is open.
        has_begun: whether a gradient has arrived in this iteration.
        missing: the parameters whose gradients the iteration waits for.
        unaveraged: the parameters to whose `.grad` something was added since their last average; empty under `EVERY`.
        static_use: the parameters that some rank uses in a static graph, once the ranks have agreed on them.
        could_be_static: whether every iteration so far used the same parameters on this rank.
    """

    def __init__(self, count: int, rule: DueRule) -> None:
        self.static_use: frozenset[int] | None = None
        self.could_be_static = True
        self.is_open = self.has_begun = False
        self.missing: set[int] = set()
        self.unaveraged: set[int] = set()
        self._captured: set[int] = set()  # in this iteration by a distributed pass, which leaves `.grad` alone
        self._rule = rule
        self._all = frozenset(range(count))
        self._calls = [0] * count
        self._expected: list[int] | None = None
        self._expects = self._all
        self._unused: set[int] = set()  # in this iteration, and in the one before it
        self._unused_before: set[int] | None = None

    def restart(self) -> None:
        """The ranks changed: the static graph is found out again. Gradients that were not averaged yet stay so."""
        self.is_open = False
        self.static_use = self._expected = None
        self._expects = self._all

    @property
    def ends_with_pass(self) -> bool:
        """Whether the iteration ends with the next backward pass, whatever is missing then."""
        return self._rule is DueRule.FOUND or (self._rule is DueRule.STATIC and self._expected is None)

    @property
    def tracks(self) -> bool:
        """Whether parameters may stay without gradients (rule 5)."""
        return self._rule is not DueRule.EVERY

    def open(self) -> None:
        """Begins an iteration, from nothing or again."""
        self.is_open = True
        self.has_begun = False
        self.missing = set(self._expects)
        self._captured.clear()
        if self._rule is DueRule.STATIC:
            self._calls = [0] * len(self._all)

    def begin_pass(self, due: Iterable[int]) -> set[int]:
        """A backward pass that ends the iteration begins.

        Args:
            due: the parameters to which it will add.

        Returns:
            The parameters for which nobody has to wait any more.
        """
        if self._rule is not DueRule.FOUND:
            return set()  # the first iteration of a static graph: everything is reduced at its end
        ready = self.missing.difference(due)
        self.missing -= ready
        self._unused = ready
        return ready

    def add(self, index: int, captured: bool = False) -> bool:
        """A gradient was added in an iteration; whether it is the last one that its parameter gets there.

        Args:
            index: the parameter.
            captured: whether a distributed pass has it, and not `.grad`.

        Raises:
            UnexpectedGradient: it is one too many.
        """
        self.has_begun = True
        if self._rule is not DueRule.EVERY:
            (self._captured if captured else self.unaveraged).add(index)
        if self._rule is DueRule.STATIC and not self._is_last(index):
            return False
        if index not in self.missing:
            raise UnexpectedGradient(index, 2, None)
        self.missing.discard(index)
        return True

    def _is_last(self, index: int) -> bool:
        """Counts a gradient of a static graph."""
        self._calls[index] += 1
        if self._expected is None:
            return False  # the first iteration only counts
        if self._calls[index] > self._expected[index]:
            raise UnexpectedGradient(index, self._calls[index], self._expected[index])
        return self._calls[index] == self._expected[index]

    def add_outside(self, index: int) -> None:
        """A gradient was added outside of an iteration.

        Raises:
            UnexpectedGradient: the static graph has none of this parameter, so that no iteration would average it.
        """
        if not self.tracks:
            return
        if self.static_use is not None and index not in self.static_use:
            raise UnexpectedGradient(index, 1, 0)
        self.unaveraged.add(index)

    @property
    def in_graph(self) -> frozenset[int]:
        """The parameters that the static graph of this rank uses, once its first iteration has ended."""
        return frozenset() if self._expected is None else self._expects

    @property
    def unused(self) -> frozenset[int]:
        """The parameters that this rank did not use in the last iteration, where that is known."""
        if self._rule is DueRule.STATIC:
            return self._all - self._expects
        return frozenset(self._unused_before or ())

    def uses(self, index: int) -> bool:
        """Whether this rank may contribute something to a parameter in this iteration."""
        if not self.tracks or index in self.unaveraged or index in self._captured:
            return True
        return self._expected is not None and self._expected[index] > 0

    def end_pass(self) -> bool:
        """A backward pass has ended; whether the iteration ends with it."""
        if self.ends_with_pass:
            if self._rule is DueRule.STATIC:
                self._expected = list(self._calls)
                self._expects = frozenset(index for index, calls in enumerate(self._calls) if calls)
            else:
                self._compare_use(self._unused | self.missing)
            self.missing.clear()
        return not self.missing

    def _compare_use(self, unused: set[int]) -> None:
        self.could_be_static = self.could_be_static and self._unused_before in (None, unused)
        self._unused_before = unused

    def close(self) -> None:
        """Ends the iteration; further gradients are outside of it."""
        self.is_open = False

    def settle(self) -> None:
        """The gradients that this rank had added are averaged now."""
        self.unaveraged.clear()
