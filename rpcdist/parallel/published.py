"""Tensors that one worker publishes and any number of workers pull, in complete versions and without waiting.

    weights = Published("policy")                           # a name in the job; any worker may hold one
    version = weights.publish(model)                        # the trainer: returns when it may go on changing them
    version = weights.pull_into(model, newer_than=version)  # a generator: the newest version, into its own tensors

On the publisher's host, every consumer reads the publisher's shared memory. On every other host, the first consumer
fetches each version once, for all consumers there. `docs/weights.md` says when to use a broadcast instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rpcdist import rpc
from rpcdist.deadline import Deadline, backoff
from rpcdist.errors import (
    ActorNameTaken,
    ConfigError,
    DeadlineExceeded,
    TransportError,
    UnknownActor,
    WorkerLost,
    listed,
)
from rpcdist.parallel._published._hosts import MAX_SHARDS, MAX_VERSION, Comparison, Publisher
from rpcdist.parallel._published._layout import ShardCopies, VersionLayout, copies_for, whole_copies
from rpcdist.parallel._published._parts import (
    MAX_SEGMENTS,
    Pieces,
    SeenTensors,
    TensorPart,
    Value,
    check_targets,
    pieces_of,
)
from rpcdist.parallel._published._reader import SmallTensors, VersionReader, copy_tensors
from rpcdist.parallel._published._shard_connection import ShardConnection, actor_name, follow, known
from rpcdist.rpc._calling.new_calls import Invocation
from rpcdist.rpc._current import current_agent
from rpcdist.rpc._executors.blocking import async_form, off_loop
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.time_limits import CHECK_INTERVAL_S, FIRST_PAUSE_S, LONGEST_PAUSE_S, MIN_ATTEMPT_S

__all__ = ["Published", "TensorPart"]


class Published:
    """Tensors under a name: one worker publishes versions of them, and others pull the newest one.

    A consumer gets all tensors of one version or keeps its current ones, even if the publisher dies while it publishes,
    or publishes faster than consumers pull. Version numbers increase by one, and continue when another worker replaces
    a dead publisher. Any thread may use it; one call at a time reads or publishes.

    Args:
        name: unique in the job. The worker that publishes first is its publisher until it ends.
        keep: the maximum number of versions in memory, apart from the newest one, at the publisher and at the first
            consumer of each other host: older ones that are still read, and the next one while it is written. Memory of
            versions that no consumer reads is reused.
        dtype: the dtype to which floating-point tensors are converted for this consumer, once for all consumers of a
            host that request it, and before they are sent to another host; the published dtypes by default.

    Raises:
        ConfigError: the arguments cannot be used.
    """

    def __init__(self, name: str, *, keep: int = 2, dtype: torch.dtype | None = None) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of published tensors must be a string, such as 'policy', not {name!r:.100}")
        if isinstance(keep, bool) or not isinstance(keep, int) or not 1 <= keep < MAX_SEGMENTS:
            raise ConfigError(
                f"keep must be the number of versions to keep, 1 to {MAX_SEGMENTS - 1}, not {keep!r:.100}"
            )
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(
                f"dtype={dtype!r:.100} of {name!r}: pass a floating-point dtype, or leave it out to pull tensors in "
                "their own dtype"
            )
        self.name = name
        self._keep = keep
        self._dtype = dtype
        self._version = 0
        self._origin: Publisher | None = None
        self._shards: list[ShardConnection] = []
        self._is_viewing = False
        self._into: SmallTensors | None = None
        self._checked: object = None  # the `seen` of targets that can be written
        self._whole: tuple[object, object] = (None, None)  # a layout, and the `seen` of targets that equal it
        self._seen_values: SeenTensors = []
        self._seen_targets: SeenTensors = []
        self._publishing = threading.Lock()
        self._reading = threading.Lock()

    def __repr__(self) -> str:
        role = "publisher" if self._origin is not None else "consumer" if self._shards else "not connected"
        return f"<Published {self.name!r} [{role}, version {self._version}]>"

    @property
    def version(self) -> int:
        """The number of the version that this object last published or pulled; 0 for none."""
        return self._version

    def state_dict(self) -> dict[str, int]:
        """Returns the number of the version, for a checkpoint that also contains the tensors."""
        return {"version": self._version}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Makes the next version that this object publishes or pulls newer than that of a checkpoint.

        Raises:
            ConfigError: the state is invalid, or this object has already published or pulled.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < MAX_VERSION:
            raise ConfigError(f"the state of {self.name!r} must be {{'version': number}}, not {state!r:.100}")
        if self._origin is not None or self._shards:
            raise ConfigError(
                f"{self.name!r} already has version {self._version}; load its state before the first version"
            )
        self._version = version

    # ------------------------------------------------------------ publishing

    @off_loop("await published.publish_async(...)")
    def publish(
        self,
        tensors: nn.Module | Mapping[str, Value],
        *,
        dtype: torch.dtype | None = None,
        version: int | None = None,
        within: int | None = None,
        skip_unchanged: Comparison | None = None,
        shard: tuple[int, int] = (0, 1),
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> int:
        """Publishes tensors as the newest version. They are copied, so the caller may change them when this returns.

        Without `within` it does not wait for consumers. If all memory that `keep` allows is still being read, it skips
        the version, logs that, and returns the number of the last version.

        Args:
            tensors: a module, whose `state_dict` is used, or tensors by name; the same names and shapes in all
                versions. A value may be a `DTensor`, a `TensorPart`, or a list of those.
            dtype: the dtype to which floating-point tensors are converted, for all consumers; only in the first call.
            version: its number, such as one more than that of a checkpoint; by default one more than the last.
            within: waits until every connected consumer has this version or one of the `within` versions before it;
                before that, if necessary, until memory is free.
            skip_unchanged: neither copies nor sends tensors that equal those of the last version: with "counter", those
                to which torch has not written since (torch does not count writes through `.data` or NumPy); with
                "value", those with the same bytes, which takes the time to read them.
            shard: the number of this publisher and the number of all publishers, if several workers publish shards of
                the tensors under one name, such as `(rank, world_size)`; only in the first call. A version is available
                when all of them have published its number.
            timeout: limit of the waits, and of the first call's questions to other workers about the name, in seconds;
                0 for none; by default the `rpc_timeout` of `init_rpc`.

        Returns:
            The number of the newest version.

        Raises:
            ConfigError: the tensors differ from those of earlier versions, or another worker publishes under this name.
            DeadlineExceeded: consumers did not get the version in time (the text names them, and says whether the
                version is published); or another worker did not report in time which versions it has seen.
        """
        deadline = Deadline.after(current_agent().caller.timeout_of(timeout))
        if within is not None and (isinstance(within, bool) or not isinstance(within, int) or within < 0):
            raise ConfigError(f"within must be a number of versions, 0 or more, not {within!r:.100}")
        if skip_unchanged not in (None, "counter", "value"):
            raise ConfigError(f"skip_unchanged must be 'counter' or 'value', not {skip_unchanged!r:.100}")
        with self._publishing:
            pieces = pieces_of(tensors, f"the values of {self.name!r}", self._seen_values)
            origin = self._origin
            if origin is not None and origin.agent is not current_agent():  # from a job that this process has left
                origin.close()
                origin = None
            if origin is None:
                layout = VersionLayout.of(pieces, dtype)
                origin = self._origin = self._become_publisher(layout, _checked_shard(shard), deadline)
            values = pieces.tensors
            if pieces.seen is None or pieces.seen is not origin.in_order:
                values = origin.layout.in_order(pieces, self.name)
                origin.in_order = pieces.seen if values is pieces.tensors else None
            published = origin.publish(
                values, version, None if within is None else deadline, skip_unchanged, pieces.seen
            )
        self._version = published
        known(self.name).saw(published, origin.shard)
        if within is not None and (behind := origin.all_behind(published - within, deadline)):
            texts = [f"{worker!r} ({have or 'none'})" for worker, have in sorted(behind.items())]
            raise DeadlineExceeded(
                f"version {published} of {self.name!r} is published, but not all consumers have version "
                f"{published - within} or a newer one: {listed(texts)}. Are they busy, or do they not pull any more?"
            )
        return published

    publish_async = async_form(publish)

    def _become_publisher(self, layout: VersionLayout, shard: tuple[int, int], deadline: Deadline) -> Publisher:
        agent = current_agent()
        pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, deadline)
        number = shard[0]
        while True:
            try:
                made = rpc.remote(
                    agent.worker_name,
                    Publisher,
                    (self.name, layout.plain(), self._keep, shard),
                    timeout=deadline.timeout_s(),
                    name=actor_name(self.name, number),
                )
                origin: Publisher = made.local_value()
                break
            except ActorNameTaken as exc:
                found = self._taken(exc, number, deadline)
                if found is not None:
                    origin = found
                    break
            except WorkerLost:  # the coordinator, which another process may replace
                if deadline.expired():
                    raise
            time.sleep(next(pauses))
        if not origin.has_asked:
            origin.start_at(self._version)
            self._ask_what_was_seen(origin, deadline)
        return origin

    def _ask_what_was_seen(self, origin: Publisher, deadline: Deadline) -> None:
        """Continues the version numbers of an earlier publisher, and makes its hosts follow this publisher."""
        agent = current_agent()
        description = origin.describe(known(self.name).newest(origin.shard))
        others = [worker for worker in rpc.workers() if worker.id != agent.worker_id]
        what = Invocation(follow, (self.name, origin.shard, description), None, deadline.timeout_s())
        asked = agent.caller.start_each(others, what)
        for worker, answer in zip(others, asked, strict=True):
            try:
                origin.start_at(answer.wait())
            except DeadlineExceeded as exc:
                raise DeadlineExceeded(
                    f"nothing was published under the name {self.name!r}: worker {worker.name!r} did not report in "
                    "time which versions it has seen, and the next version must have a higher number. Call publish "
                    "again when it answers, or is lost"
                ) from exc
            except TransportError:
                continue  # it is lost; if it comes back, it reports what it has seen when it connects
        origin.has_asked = True

    def _taken(self, taken: ActorNameTaken, shard: int, deadline: Deadline) -> Publisher | None:
        """Returns the source of this worker, if it already publishes under this name; None if the publisher died."""
        try:
            found = rpc.get_actor(actor_name(self.name, shard), deadline.timeout_s())
            if found.is_owner():
                origin: Publisher = found.local_value()
                return origin
            found.rpc_sync(timeout=deadline.timeout_s()).describe(0)
        except (UnknownActor, TransportError, DeadlineExceeded) as exc:
            if not deadline.expired():
                return None
            raise ConfigError(f"{self.name!r} has a publisher that does not answer: {exc}") from taken
        which = "" if shard == 0 else f"shard {shard} "
        raise ConfigError(
            f"{found.owner_name()!r} already publishes {which}under the name {self.name!r}, and only one worker may "
            "do so until it ends: use another name, or call publish on that worker"
        ) from taken

    # ------------------------------------------------------------ pulling

    @off_loop("await published.pull_into_async(...)")
    def pull_into(
        self,
        target: nn.Module | Mapping[str, Value],
        newer_than: int = 0,
        *,
        wait: bool = False,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> int:
        """Copies the newest version into tensors, if it is newer than the caller's.

        It waits for the first version, if none has been published yet. Otherwise it waits neither for the publisher nor
        for other consumers.

        Args:
            target: a module that has exactly the published tensors, or a dictionary with some of them. Values are
                converted to the dtypes of the target. A value may be a `DTensor`, a `TensorPart`, or a list of those:
                only these parts are copied, from the shards that have them.
            newer_than: the number of the version that the target already has; 0 for none.
            wait: whether to wait for a newer version.
            timeout: limit of the waits in seconds; 0 for none; by default the `rpc_timeout` of `init_rpc`.

        Returns:
            The number of the version in the target: `newer_than` if no newer one exists.

        Raises:
            ConfigError: the target's tensors differ from the published ones; nothing was copied.
            DeadlineExceeded: no worker published under this name in time.
        """
        if isinstance(newer_than, bool) or not isinstance(newer_than, int) or newer_than < 0:
            raise ConfigError(
                f"newer_than must be the number of a version of {self.name!r}, or 0, not {newer_than!r:.100}"
            )
        with self._reading:
            purpose = f"the targets for {self.name!r}"
            targets = pieces_of(target, purpose, self._seen_targets)
            if targets.seen is None or targets.seen is not self._checked:
                check_targets(targets, purpose)
                self._checked = targets.seen
        if not targets.names:
            raise ConfigError(f"there is nothing to pull {self.name!r} into: the module or dictionary is empty")
        plans: dict[int, ShardCopies] = {}
        planned_for: list[VersionReader | None] = []

        def choose(shards: Sequence[ShardConnection]) -> list[ShardConnection]:
            readers = [shard.reader for shard in shards]
            if readers != planned_for:
                plans.clear()
                plans.update(self._copies_into(targets, isinstance(target, nn.Module), shards))
                planned_for[:] = readers
            return [shard for shard in shards if shard.shard in plans]

        def copy(views: dict[int, list[Tensor]]) -> None:
            for number, plan in plans.items():
                theirs, reader = views[number], planned_for[number]
                # Looked up now, because the tensors may have got other memory during the wait.
                into = self._small_targets(reader, targets) if plan.is_whole else None
                if into is not None and reader is not None:
                    torch.autograd.graph.increment_version(reader.small_of(targets.tensors))  # as a write by torch does
                    copy_tensors([plan.targets[i] for i in reader.large], [theirs[i] for i in reader.large])
                    reader.small_tensors().copy_to(into)
                elif plan.is_whole:
                    copy_tensors(plan.targets, theirs)
                else:
                    sources = [theirs[i] if part is None else theirs[i][part] for i, part in plan.sources]
                    copy_tensors(plan.targets, sources)

        return self._read(targets, choose, copy, newer_than, wait, timeout) or newer_than

    pull_into_async = async_form(pull_into)

    @off_loop("await published.view_async(...)")
    def view(self, *, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Value]:
        """Returns the tensors of the newest version, without a copy; `version` has its number.

        Their memory is read-only: writing to them ends the process with SIGSEGV. They are valid until the next `view`,
        `pull_into` or `close` of this object; then other versions may overwrite them.

        Args:
            timeout: limit of the wait for the first version in seconds; 0 for none; by default the `rpc_timeout` of
                `init_rpc`.

        Returns:
            A tensor for each name; a `TensorPart` if only a part of it was published, or a list of parts, in the order
            of the shards.

        Raises:
            DeadlineExceeded: no worker published under this name in time.
        """
        found: dict[str, Value] = {}

        def look(views: dict[int, list[Tensor]]) -> None:
            parts: dict[str, list[TensorPart]] = {}
            for number, tensors in views.items():
                layout = self._layout_of(self._shards[number])
                for index, (name, tensor) in enumerate(zip(layout.names, tensors, strict=True)):
                    part = layout.parts.get(index)
                    if part is None:
                        found[name] = tensor
                    else:
                        parts.setdefault(name, []).append(TensorPart(tensor, *part))
            for name, of_name in parts.items():
                found.setdefault(name, of_name[0] if len(of_name) == 1 else of_name)
            self._is_viewing = True

        self._read(None, list, look, 0, False, timeout)
        return found

    view_async = async_form(view)

    def _small_targets(self, reader: VersionReader | None, targets: Pieces) -> SmallTensors | None:
        """Returns the memory of small targets with the published dtypes; None if torch must copy them."""
        if reader is not None and reader.small:
            self._into = SmallTensors.of(reader.small_of(targets.tensors), self._into, targets.seen)
        return self._into

    def _copies_into(
        self, targets: Pieces, is_whole: bool, shards: Sequence[ShardConnection]
    ) -> Mapping[int, ShardCopies]:
        """Returns the copies from each required shard."""
        layouts = [self._layout_of(shard) for shard in shards]
        layout, seen = self._whole
        if len(layouts) == 1 and layout is layouts[0] and seen is targets.seen is not None:
            return {0: ShardCopies([], targets.tensors, True)}
        publishers = [shard.publisher for shard in shards]
        me = current_agent().worker_name
        published = [shard.published for shard in shards if shard.published is not None]
        if published != layouts:  # only parts are here, but errors describe all
            copies_for(published, targets, is_whole, self.name, publishers, me)
        if len(layouts) == 1 and (copies := whole_copies(layouts[0], targets)) is not None:
            self._whole, self._into = (layouts[0], targets.seen), None
            return {0: copies}
        found = copies_for(layouts, targets, is_whole, self.name, publishers, me)
        return {number: copies for number, copies in enumerate(found) if copies.targets} or {0: found[0]}

    def _layout_of(self, shard: ShardConnection) -> VersionLayout:
        assert shard.reader is not None
        return shard.reader.layout

    def _read(
        self,
        wanted: Pieces | None,
        choose: Callable[[Sequence[ShardConnection]], Sequence[ShardConnection]],
        take: Callable[[dict[int, list[Tensor]]], None],
        newer_than: int,
        wait: bool,
        timeout: float,
    ) -> int:
        """Takes the newest version, if it is newer; returns its number, or 0.

        Args:
            wanted: the targets, the only values that another host needs; None for all tensors.
            choose: returns the required shards.
            take: gets their tensors.
            newer_than: the version must be newer than this one.
            wait: whether to wait for a newer version.
            timeout: limit, as the user passed it.
        """
        with self._reading:
            if self._is_viewing:
                self._is_viewing = False
                for shard in self._shards:
                    if shard.reader is not None:
                        shard.reader.end(0)
            deadline: Deadline | None = None
            floor = max(newer_than, self._version - 1)
            while True:
                # An attempt ends with the pull. The last one still gets an answer, which says what is missing.
                left_s = timeout if deadline is None else max(MIN_ATTEMPT_S, deadline.remaining_s())
                shards = self._refreshed(wanted, left_s)
                newest = [shard.newest for shard in shards]  # the wait below ends for every later version
                if min(newest) > floor:
                    needed = choose(shards)
                    if version := self._take(needed, take, floor, None if len(shards) == 1 else shards):
                        self._version = version
                        return version
                if newer_than and not wait:
                    return 0
                if deadline is None:
                    deadline = Deadline.after(current_agent().caller.timeout_of(timeout))
                if deadline.expired():
                    raise DeadlineExceeded(self._why_none(shards, newer_than))
                if all(shard.reader is not None for shard in shards):
                    choose(shards)  # now, and not later, when consumers compete for the processor
                slowest = min(range(len(shards)), key=newest.__getitem__)
                self._wait_for(shards[slowest].reader, max(floor, newest[slowest]), deadline)

    def _take(
        self,
        needed: Sequence[ShardConnection],
        take: Callable[[dict[int, list[Tensor]]], None],
        floor: int,
        shards: Sequence[ShardConnection] | None,
    ) -> int:
        """Takes the newest version; returns 0 if none is newer than `floor`, or it was overwritten meanwhile.

        Args:
            needed: the shards from which it is taken.
            take: see `_read`.
            floor: the version must be newer than this one.
            shards: all shards, which must have reached the version; None if the tensors have one shard.
        """
        readers = [shard.reader for shard in needed if shard.reader is not None]
        version = 0
        try:
            if shards is None:
                found = [reader.begin() for reader in readers]
                version = readers[0].beginning
            else:
                last = min(shard.newest for shard in shards)
                held = set.intersection(*(reader.versions() for reader in readers))
                version = max((each for each in held if each <= last), default=0)
                if version <= floor:
                    version = 0
                    return 0
                found = [reader.begin(version) for reader in readers]
            views = {shard.shard: each for shard, each in zip(needed, found, strict=True) if each is not None}
            if len(views) < len(needed) or not known(self.name).may_take(version, needed):
                version = 0  # it was overwritten meanwhile, or its publisher was replaced
                return 0
            take(views)
        except BaseException:
            version = 0
            raise
        finally:
            if not self._is_viewing:
                for reader in readers:
                    reader.end(version)
        for reader in readers if self._is_viewing else ():
            reader.note(version)
        return version

    def _refreshed(self, wanted: Pieces | None, timeout: float) -> list[ShardConnection]:
        """Returns the connections to all known shards; some may have no version yet."""
        shards = self._shards
        while shards and shards[0].agent is not current_agent():  # from a job that this process has left
            shards.pop().close()
        if not shards:
            shards.append(self._new_connection(0))
        shards[0].refresh(wanted, (), timeout)
        num = shards[0].num_shards
        while len(shards) > num:
            shards.pop().close()
        for number in range(1, num):
            if number == len(shards):
                shards.append(self._new_connection(number))
            shards[number].refresh(wanted, shards[:number], timeout)
        return shards

    def _new_connection(self, shard: int) -> ShardConnection:
        # In another job, or after a checkpoint, the publisher may not know that its numbers must continue from here.
        known(self.name).saw(self._version, shard)
        return ShardConnection(self.name, shard, self._dtype)

    def _wait_for(self, reader: VersionReader | None, have: int, deadline: Deadline) -> None:
        """Waits briefly for a newer version, or for a publisher."""
        # Not until the deadline, since the publisher of a source here may have ended on another host.
        soon = Deadline.after(CHECK_INTERVAL_S).earlier(deadline)
        if reader is not None and not reader.has_ended:
            reader.wait_for_newer(have, soon)
        else:
            known(self.name).wait_for_publisher(soon)

    def _why_none(self, shards: Sequence[ShardConnection], newer_than: int) -> str:
        newer = f"a version of {self.name!r} that is newer than {newer_than}" if newer_than else repr(self.name)
        text = (
            f"no worker published {newer} in time. Call publish on the worker that has the tensors, and check the name"
        )
        if problems := [(shard.publisher, shard.problem) for shard in shards if shard.problem]:
            publisher = f"publisher {problems[0][0]!r}" if problems[0][0] else "publisher"
            text = f"{current_agent().worker_name!r} did not get {newer} in time from its {publisher}: {problems[0][1]}"
        if len(shards) > 1:
            have = listed(f"{shard.shard} ({shard.newest or 'none'})" for shard in shards)
            text += (
                f". Its shards have these versions: {have}; a version is available when all shards have published it"
            )
        return text

    def close(self) -> None:
        """Ends pulling, and invalidates tensors of `view`. Versions that this worker published stay. Idempotent."""
        with self._reading:
            shards, self._shards = self._shards, []
            self._is_viewing = False
        for shard in shards:
            shard.close()


def _checked_shard(shard: tuple[int, int]) -> tuple[int, int]:
    if (
        not isinstance(shard, tuple)
        or len(shard) != 2
        or any(isinstance(number, bool) or not isinstance(number, int) for number in shard)
        or not 0 <= shard[0] < shard[1] <= MAX_SHARDS
    ):
        raise ConfigError(
            "shard must be the number of this publisher and the number of all publishers, such as (0, 2), not "
            f"{shard!r:.100}"
        )
    return shard
