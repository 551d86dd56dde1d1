"""How the ranks of a host synchronise: flags in shared memory, fingerprints, and waiting.

[Note: steps] Ranks use the segment in numbered steps, the same on all ranks; step s uses half s mod 2 of each header,
table and buffer. In each step, a rank

    1. writes its own header, table and buffer of that half, as far as the step needs them,
    2. raises its flag in that header to s,
    3. waits until the flags of all ranks are at s,
    4. reads the others' headers, tables and buffers of that half; it may read buffers until 2. of step s + 1.

No rank overwrites bytes that a slow rank still reads: step s writes where step s - 2 was read, after 3. of step s - 1,
when all flags were at s - 1. A rank raises its flag to s - 1 after it has finished reading step s - 2. So two halves
are enough, and no rank waits a second time for the others to finish reading. For the same reason a flag that a rank
waits for is never beyond s: it is in the half of s, and is overwritten only in step s + 2, which begins after all flags
were at s + 1.

This holds across operations of any kind, since every rank takes part in every step of every operation.

[Note: fingerprints] In its first step an operation compares the fingerprints of all ranks, before it trusts data. All
ranks compare the same bytes, so if one rank finds a mismatch then all do, and a rank that continues knows that no other
rank can find one. Ranks that disagree stop in that step, and no rank writes to this segment afterwards.

[Note: sleep] A rank that has spun long enough sleeps on the half's wakeup word, which all ranks share. The last rank to
reach a step finds all flags raised, writes the step into that word, and wakes the sleepers with one system call; each
wakes once. No wakeup is lost: a rank raises its flag before it reads the others' flags, so of several ranks that arrive
at once, one finds all flags raised, provided that no rank's loads move before its store. Only a locked instruction
prevents that, and taking a lock has one. A sleeper marks itself as sleeping, reads the wakeup word, then reads the
flags a last time, and the kernel lets it sleep only if the word is still the same. The other rank reads these marks
after it has written the word, again with a locked instruction in between (the system call has one, too). Several ranks
may write the word at once, as they write the same value. (If all of this failed, the sleep would end after
`FUTEX_WAIT_S`.)

[Note: store order] On x86-64, other cores see the stores of a core in program order, and loads are in program order as
well (Intel SDM volume 3, 9.2; AMD64 APM volume 2, 7.2). A flag is one aligned store of 8 bytes (`memoryview.cast("Q")`
assigns and reads an item by a single move), after the stores of the data that it announces. The string instructions
with which the C library copies may reorder their own stores but not those before and after them; where the library
copies with non-temporal stores, it ends with a fence.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from itertools import chain
from typing import Final

from rpcdist.collectives._operations.operation import FINGERPRINT_BYTES, Operation, describe_fingerprint
from rpcdist.collectives._transports.shm import futex
from rpcdist.collectives._transports.shm.routes import LINE, Layout
from rpcdist.collectives._transports.transport_base import (
    Control,
    SpinPolicy,
    TransportMismatch,
    TransportTimeout,
    mismatched_sizes,
)
from rpcdist.time_limits import FUTEX_WAIT_S

_WORD: Final = 8


class Signals:
    """The flags of one group as one rank sees them. Used by one thread at a time."""

    def __init__(self, rank: int, layout: Layout, memory: mmap.mmap, address: int) -> None:
        self.step = 0
        self._rank = rank
        self._size = layout.size
        self._layout = layout
        self._address = address
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("Q")
        self._header = [self._headers(layout, half) for half in (0, 1)]
        self._flag = [layout.header(half, rank) // _WORD for half in (0, 1)]
        self._peers = [self._peer_flags(half) for half in (0, 1)]
        self._wakeup = [layout.wakeup(half) // _WORD for half in (0, 1)]
        self._mark = layout.sleepers + rank
        self._sleepers = range(layout.sleepers // _WORD, (layout.sleepers + layout.size + _WORD - 1) // _WORD)
        self._rows: dict[int, list[memoryview]] = {}  # of the tables, by half, once an operation has needed them
        self._fence = threading.Lock()
        self._is_first_step = False
        self._spin_policy = SpinPolicy(layout.size)

    def _headers(self, layout: Layout, half: int) -> memoryview:
        start = layout.header(half, 0)
        return self._bytes[start : start + layout.size * LINE]

    def _peer_flags(self, half: int) -> list[tuple[int, int]]:
        """Returns the other ranks and their flags from this rank on, so that ranks begin with different flags."""
        first, stride = self._layout.header(half, 0) // _WORD, LINE // _WORD
        peers = [(self._rank + distance) % self._size for distance in range(1, self._size)]
        return [(peer, first + peer * stride) for peer in peers]

    def close(self) -> None:
        for view in (*self._header, *chain.from_iterable(self._rows.values()), self._words, self._bytes):
            view.release()

    def _rows_of(self, half: int) -> list[memoryview]:
        """Returns the ranks' tables: in each, the bytes of the inputs, then those of the outputs, then zeros."""
        if half not in self._rows:
            starts = [offset // _WORD for offset in self._layout.tables(half)]
            self._rows[half] = [self._words[start : start + 2 * self._size] for start in starts]
        return self._rows[half]

    # ------------------------------------------------------------ steps

    def begin_operation(self) -> None:
        """Makes the next step compare fingerprints."""
        self._is_first_step = True

    def begin_step(self) -> int:
        """Begins the next step; returns its half, which this rank may write to from now on."""
        self.step += 1
        return self.step & 1

    def synchronise(self, control: Control) -> None:
        """The barrier of a step: announces that this rank has written its data, and waits until all ranks have."""
        step = self.step
        half = step & 1
        words = self._words
        if self._is_first_step:
            start = self._rank * LINE + _WORD
            self._header[half][start : start + FINGERPRINT_BYTES] = control.fingerprint
        words[self._flag[half]] = step
        with self._fence:  # see [Note: sleep]
            pass
        last = True
        for _, flag in self._peers[half]:
            if words[flag] != step:
                last = False
                if not self._spin_for(flag):
                    self._sleep(control)
                    break
        if last:
            self._wake_sleepers(half)
        if self._is_first_step:
            self._is_first_step = False
            self._compare(control.fingerprint)

    def _compare(self, fingerprint: bytes) -> None:
        line = self.step.to_bytes(_WORD, "little") + fingerprint
        if self._header[self.step & 1].tobytes() != line.ljust(LINE, b"\0") * self._size:
            raise TransportMismatch(self._views(range(self._size)))

    def _views(self, ranks: range | list[int]) -> dict[int, str]:
        """Describes the operations of these ranks, which have raised their flags in an operation's first step."""
        headers = self._header[self.step & 1]
        starts = {rank: rank * LINE + _WORD for rank in ranks}
        return {
            rank: describe_fingerprint(bytes(headers[start : start + FINGERPRINT_BYTES]))
            for rank, start in starts.items()
        }

    def check(self, control: Control) -> None:
        """Raises if the operation has failed or its deadline has passed, between two steps for which no rank was late.

        `synchronise` checks only while this rank waits for another one.
        """
        control.check()
        if control.deadline.expired():
            raise TransportTimeout(frozenset(peer for peer, _ in self._peers[0]))

    # ------------------------------------------------------------ sizes of chunks, of operations where they may differ

    def publish_sizes(self, half: int, operation: Operation) -> None:
        """Writes this rank's chunk sizes, before the ranks synchronise in the first step of an operation."""
        row = self._rows_of(half)[self._rank]
        sizes = [tensor.nbytes for tensor in (*operation.inputs, *operation.outputs)]
        for index in range(len(row)):
            row[index] = sizes[index] if index < len(sizes) else 0

    def compare_sizes(self, half: int, operation: Operation) -> int:
        """Returns the bytes of the longest chunk of all ranks, after they have synchronised in that step.

        Raises:
            TransportMismatch: sizes differ; all ranks raise it.
        """
        rows = [row.tolist() for row in self._rows_of(half)]
        if problems := mismatched_sizes(operation.kind, rows):
            views = self._views(list(problems))
            raise TransportMismatch({rank: f"{views[rank]}, which {text}" for rank, text in problems.items()})
        return max(map(max, rows))

    # ------------------------------------------------------------ waiting

    def _wake_sleepers(self, half: int) -> None:
        wakeup = self._wakeup[half]
        self._words[wakeup] = self.step
        with self._fence:
            pass
        for word in self._sleepers:
            if self._words[word]:
                futex.wake(self._address + wakeup * _WORD)
                return

    def _spin_for(self, flag: int) -> bool:
        """Yields to other threads and processes a few times; returns whether the flag was raised meanwhile."""
        words, step, policy = self._words, self.step, self._spin_policy
        began = now = time.monotonic()
        while True:
            os.sched_yield()
            if now - began >= policy.spin_s:
                return False
            if words[flag] == step:
                policy.spin_succeeded()
                return True
            now = time.monotonic()

    def _sleep(self, control: Control) -> None:
        words, step = self._words, self.step
        flags = [flag for _, flag in self._peers[step & 1]]
        wakeup = self._wakeup[step & 1]
        self._bytes[self._mark] = 1
        began = time.monotonic()
        try:
            while True:
                seen = words[wakeup]
                if all(words[flag] == step for flag in flags):
                    return
                self._check(control)
                futex.wait(self._address + wakeup * _WORD, seen, FUTEX_WAIT_S)
        finally:
            self._bytes[self._mark] = 0
            self._spin_policy.slept(time.monotonic() - began)

    def _check(self, control: Control) -> None:
        control.check()
        step = self.step
        late = [peer for peer, flag in self._peers[step & 1] if self._words[flag] != step]
        if self._is_first_step:
            views = self._views([rank for rank in range(self._size) if rank not in late])
            if any(view != views[self._rank] for view in views.values()):
                raise TransportMismatch(views)
        if control.deadline.expired() and late:
            raise TransportTimeout(frozenset(late))
