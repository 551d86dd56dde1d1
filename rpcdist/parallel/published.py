"""Tensors that one worker publishes and any number of workers pull: whole versions, and nobody stops.

    weights = Published("policy")                           # a name in the job; any worker may hold one
    version = weights.publish(model)                        # the trainer: returns when it may go on changing them
    version = weights.pull_into(model, newer_than=version)  # a generator: the newest version, into its own tensors

On the publisher's host, every consumer reads the publisher's shared memory. On every other host, the first consumer
fetches each version once, for all consumers there. `docs/weights.md` tells when to take this, and when a broadcast.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from rpcdist import rpc
from rpcdist.backoff import backoff
from rpcdist.deadline import Deadline
from rpcdist.errors import (
    ActorNameTaken,
    CallRefused,
    ConfigError,
    DeadlineExceeded,
    TransportError,
    UnknownActor,
    WorkerLost,
    listed,
)
from rpcdist.parallel._published._hosts import Description, HostCopy, Publisher
from rpcdist.parallel._published._layout import VersionLayout, tensors_of
from rpcdist.parallel._published._reader import VersionReader
from rpcdist.parallel._published._source import purpose_of, worker_of
from rpcdist.parallel._published._words import MAX_SEGMENTS
from rpcdist.rpc._current import current_agent
from rpcdist.rpc._executors.async_forms import async_form, off_loop
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.time_limits import (
    ASK_FOR_NAMES_LIMIT_S,
    CHECK_INTERVAL_S,
    CONNECT_FIRST_PAUSE_S,
    CONNECT_LONGEST_PAUSE_S,
    HOST_PROBE_LIMIT_S,
    MIN_WAIT_S,
)
from rpcdist.transport import Node
from rpcdist.transport.sockets import SocketHub

if TYPE_CHECKING:
    from rpcdist.rpc._agent import Agent

__all__ = ["Published"]

_ACTOR: Final = "rpcdist published: "


class Published:
    """Tensors under a name: one worker publishes versions of them, and others pull the newest one.

    A consumer gets all tensors of one version, or keeps what it has: also when the publisher dies in the middle, and
    when it publishes faster than anybody pulls. The numbers of versions grow by one, and go on when another worker
    takes the place of a publisher that died. Any thread may use it; one call at a time reads or publishes.

    Args:
        name: in the job. The worker that publishes first is its publisher until it ends.
        keep: how many versions the publisher, and the first consumer of each other host, have in memory at most beside
            the newest one: older ones that are still read, and the next one while it is written. Memory of those that
            nobody reads is used again.

    Raises:
        ConfigError: the arguments cannot be used.
    """

    def __init__(self, name: str, *, keep: int = 2) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of published tensors is a text, such as 'policy', not {name!r:.100}")
        if isinstance(keep, bool) or not isinstance(keep, int) or not 1 <= keep < MAX_SEGMENTS:
            raise ConfigError(f"keep is the number of versions to keep, 1 to {MAX_SEGMENTS - 1}, not {keep!r:.100}")
        self.name = name
        self._keep = keep
        self._version = 0
        self._origin: Publisher | None = None
        self._reader: VersionReader | None = None
        self._publisher = ""
        self._copy: HostCopy | None = None
        self._is_viewing = False
        self._retry_at = 0.0
        self._publishing = threading.Lock()
        self._reading = threading.Lock()

    def __repr__(self) -> str:
        role = "publisher" if self._origin is not None else "consumer" if self._reader is not None else "not connected"
        return f"<Published {self.name!r} [{role}, version {self._version}]>"

    @property
    def version(self) -> int:
        """The number of the version that was published or pulled last through this object; 0 for none."""
        return self._version

    # ------------------------------------------------------------ publishing

    @off_loop("await published.publish_async(...)")
    def publish(
        self,
        tensors: nn.Module | Mapping[str, Tensor],
        *,
        dtype: torch.dtype | None = None,
        version: int | None = None,
        within: int | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> int:
        """Makes tensors the newest version. They are copied: the caller may change them when this returns.

        No consumer is waited for, unless `within` asks for it. Without it, a version is left out where others are still
        being read in all of the memory that `keep` allows; this is logged, and the number of the last one returned.

        Args:
            tensors: a module, whose `state_dict` counts, or tensors by name; the same names and shapes in all versions.
            dtype: to which tensors of floating point are converted, for all consumers; given with the first version.
            version: its number, such as one more than that of a checkpoint; by default one more than the last.
            within: waits until every consumer that is connected has this version, or one of the `within` before it; and
                before, if need be, for memory in which no other version is read.
            timeout: limit of that wait, and of finding out at the first version whether there is a publisher already,
                in seconds; 0 for none; by default the `rpc_timeout` of `init_rpc`.

        Returns:
            The number of the newest version.

        Raises:
            ConfigError: the tensors are not those of the versions before, or another worker publishes under this name.
            DeadlineExceeded: consumers did not come within the bound in time; the text says which, and whether the
                version is published.
        """
        deadline = Deadline.after(current_agent().caller.timeout_of(timeout))
        if within is not None and (isinstance(within, bool) or not isinstance(within, int) or within < 0):
            raise ConfigError(f"within is a number of versions, 0 or more, not {within!r:.100}")
        values = tensors_of(tensors, f"the values of {self.name!r}")
        with self._publishing:
            origin = self._origin
            if origin is None:
                origin = self._origin = self._become_publisher(VersionLayout.of(values, dtype), deadline)
            origin.layout.check_published(values, self.name)
            published = origin.publish(values, version, None if within is None else deadline)
        self._version = published
        _known(self.name).saw(published)
        if within is not None and (behind := origin.all_behind(published - within, deadline)):
            texts = [f"{worker!r} ({have or 'none'})" for worker, have in sorted(behind.items())]
            raise DeadlineExceeded(
                f"version {published} of {self.name!r} is published, but not all consumers have version "
                f"{published - within} or a newer one: {listed(texts)}. Are they busy, or do they not pull any more?"
            )
        return published

    publish_async = async_form(publish)

    def _become_publisher(self, layout: VersionLayout, deadline: Deadline) -> Publisher:
        agent = current_agent()
        pauses = backoff(CONNECT_FIRST_PAUSE_S, CONNECT_LONGEST_PAUSE_S, deadline)
        while True:
            try:
                made = rpc.remote(
                    agent.worker_name,
                    Publisher,
                    (self.name, layout.plain(), self._keep),
                    timeout=_limit_s(deadline),
                    name=_ACTOR + self.name,
                )
                break
            except ActorNameTaken as exc:
                origin = self._taken(exc, deadline)
                if origin is not None:
                    return origin
            except WorkerLost:  # the coordinator; another process may take its place
                if deadline.expired():
                    raise
            time.sleep(next(pauses))
        origin = made.local_value()
        # The numbers go on where consumers of an earlier publisher have come to, and its hosts follow this one. A
        # worker that dies, or does not answer, says when it connects what it has seen.
        others = [worker for worker in rpc.workers() if worker.id != agent.worker_id]
        description = origin.describe(0)
        for seen in rpc.call_each(
            others, _follow, self.name, description, return_exceptions=True, timeout=ASK_FOR_NAMES_LIMIT_S
        ):
            if isinstance(seen, int):
                origin.start_at(seen)
        origin.start_at(_known(self.name).newest)
        return origin

    def _taken(self, taken: ActorNameTaken, deadline: Deadline) -> Publisher | None:
        """The source of this worker, if it publishes under this name already; None if the publisher has died."""
        try:
            found = rpc.get_actor(_ACTOR + self.name, _limit_s(deadline))
            if found.is_owner():
                origin: Publisher = found.local_value()
                return origin
            found.rpc_sync(timeout=_limit_s(deadline)).describe(0)
        except (UnknownActor, TransportError) as exc:
            if not deadline.expired():
                return None
            raise ConfigError(f"{self.name!r} has a publisher that does not answer: {exc}") from taken
        raise ConfigError(
            f"{found.owner_name()!r} publishes under the name {self.name!r} already, and one worker does so until it "
            "ends: take another name, or call publish there"
        ) from taken

    # ------------------------------------------------------------ pulling

    @off_loop("await published.pull_into_async(...)")
    def pull_into(
        self,
        target: nn.Module | Mapping[str, Tensor],
        newer_than: int = 0,
        *,
        wait: bool = False,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> int:
        """Copies the newest version into tensors, if it is newer than what the caller has.

        It waits for the first version, if nobody has published one yet. Otherwise it does not wait: not for the
        publisher, and not for other consumers. The publisher does not notice.

        Args:
            target: a module that has exactly the published tensors, or a dictionary with some of them. Values are
                converted to the dtypes of the target.
            newer_than: the number of the version that is in the target already; 0 for none.
            wait: wait for a version that is newer, if there is none.
            timeout: limit of the waits in seconds; 0 for none; by default the `rpc_timeout` of `init_rpc`.

        Returns:
            The number of the version that is in the target now: `newer_than` if there is no newer one.

        Raises:
            ConfigError: the target's tensors are not those that are published; nothing was copied.
            DeadlineExceeded: nobody has published under this name in time.
        """
        targets = tensors_of(target, f"the targets for {self.name!r}")

        def copy(reader: VersionReader) -> int:
            me = current_agent().worker_name
            indices = reader.layout.matched(targets, isinstance(target, nn.Module), self.name, self._publisher, me)
            done = 0
            version, views = reader.begin()
            try:
                with torch.no_grad():
                    torch._foreach_copy_(list(targets.values()), [views[index] for index in indices])
                done = version
            finally:
                reader.end(done)
            return done

        if not targets:
            raise ConfigError(f"there is nothing to pull {self.name!r} into: the module or dictionary is empty")
        return self._read(copy, newer_than, wait, timeout) or newer_than

    pull_into_async = async_form(pull_into)

    @off_loop("await published.view_async(...)")
    def view(self, *, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Tensor]:
        """The tensors of the newest version, without a copy; `version` has its number.

        They lie in memory that may only be read: writing to them ends the process by SIGSEGV. They are valid until the
        next `view`, `pull_into` or `close` of this object; then other versions may overwrite them.

        Args:
            timeout: limit of the wait for the first version in seconds; 0 for none; by default the `rpc_timeout` of
                `init_rpc`.

        Raises:
            DeadlineExceeded: nobody has published under this name in time.
        """
        found: dict[str, Tensor] = {}

        def look(reader: VersionReader) -> int:
            version, views = reader.begin()
            found.update(zip(reader.layout.names, views, strict=True))
            reader.note(version)
            self._is_viewing = True
            return version

        self._read(look, 0, False, timeout)
        return found

    view_async = async_form(view)

    def _read(self, take: Callable[[VersionReader], int], newer_than: int, wait: bool, timeout: float) -> int:
        """Takes the newest version, if it is newer; its number, or 0."""
        with self._reading:
            reader = self._reader
            if self._is_viewing and reader is not None:
                self._is_viewing = False
                reader.end(0)
            deadline: Deadline | None = None
            while True:
                reader = self._living_reader()
                if reader is not None and reader.newest > max(newer_than, self._version - 1):
                    version = take(reader)
                    self._version = version
                    _known(self.name).saw(version)
                    return version
                if newer_than and not wait:
                    return 0
                if deadline is None:
                    deadline = Deadline.after(current_agent().caller.timeout_of(timeout))
                if deadline.expired():
                    newer = (
                        f"a version of {self.name!r} that is newer than {newer_than}" if newer_than else repr(self.name)
                    )
                    raise DeadlineExceeded(
                        f"nobody published {newer} in time. Call publish on the worker that has the tensors, and check "
                        "the name"
                    )
                if reader is not None and not reader.has_ended:
                    # Not to the end: the source may be here, and its publisher on another host may have ended.
                    reader.wait_for_newer(
                        max(newer_than, self._version - 1), Deadline.after(CHECK_INTERVAL_S).earlier(deadline)
                    )
                else:
                    _known(self.name).wait_for_publisher(deadline)

    def _living_reader(self) -> VersionReader | None:
        """The reader of a source that lives, or else of one that has ended; None if there has been none yet."""
        reader, copy = self._reader, self._copy
        if reader is None or reader.has_ended or (copy is not None and not copy.follows_living):
            if time.monotonic() >= self._retry_at:
                try:
                    self._connect()
                except (UnknownActor, TransportError, DeadlineExceeded):
                    self._retry_at = time.monotonic() + CHECK_INTERVAL_S
        return self._reader

    def _connect(self) -> None:
        """Finds the source of this host, or becomes it."""
        origin: rpc.RRef[Publisher] = rpc.get_actor(_ACTOR + self.name, ASK_FOR_NAMES_LIMIT_S)
        self._publisher = origin.owner_name()
        if origin.is_owner():
            self._reader = origin.local_value().reader()
            return
        while True:
            have = max(self._version, _known(self.name).newest)
            description: Description = origin.rpc_sync(timeout=ASK_FOR_NAMES_LIMIT_S).describe(have)
            source_name, plain, keep, num_changes, addresses = description
            layout = VersionLayout.from_plain(plain)
            copy = self._copy
            if copy is not None and copy.layout == layout:  # only its publisher has died
                copy.join(source_name, None)
                return
            if copy is not None:
                self._copy = None
                copy.close()
            reader = self._reader_of_host(layout, addresses)
            if reader is not None:
                self._reader = reader
                return
            copy = HostCopy(self.name, layout, keep, source_name)
            if copy.join(source_name, num_changes):
                self._copy = copy
                self._reader = copy.reader()
                _known(self.name).copies.add(copy)
                return
            copy.close()

    def _reader_of_host(self, layout: VersionLayout, addresses: list[str]) -> VersionReader | None:
        """A reader of the first source that this process can share memory with."""
        agent = current_agent()
        network = agent.network
        if not isinstance(network, Node) or not agent.options.share_payloads:
            return None
        hub = SocketHub(network)
        try:
            for address in addresses:
                try:
                    connection = hub.connect(address, purpose_of(agent.worker_name), HOST_PROBE_LIMIT_S, unix=True)
                except TransportError:
                    continue  # on another host
                try:
                    return VersionReader.received(layout, connection)
                except OSError:
                    connection.close()
        finally:
            hub.close()
        return None

    def close(self) -> None:
        """Ends pulling, and the tensors of `view`. Versions that this worker has published stay. Idempotent."""
        with self._reading:
            reader, self._reader = self._reader, None
            copy, self._copy = self._copy, None
            self._is_viewing = False
        if reader is not None:
            reader.close()
        if copy is not None:
            copy.leave()


class _Known:
    """The state of a name at a worker: the newest version that it has seen, and the copies that it holds."""

    def __init__(self) -> None:
        self.newest = 0
        self.copies: weakref.WeakSet[HostCopy] = weakref.WeakSet()
        self._came = threading.Condition()

    def saw(self, version: int) -> None:
        self.newest = max(self.newest, version)

    def wait_for_publisher(self, deadline: Deadline) -> None:
        """Waits a while, or until a publisher says that it begins; one that did before is found by its name."""
        with self._came:
            self._came.wait(min(CHECK_INTERVAL_S, deadline.remaining_s()))

    def publisher_came(self, description: Description) -> None:
        """A publisher begins, which is described."""
        for copy in list(self.copies):
            copy.follow(description)
        with self._came:
            self._came.notify_all()


_names: Final[weakref.WeakKeyDictionary[Agent, dict[str, _Known]]] = weakref.WeakKeyDictionary()


def _known(name: str) -> _Known:
    return _names.setdefault(current_agent(), {}).setdefault(name, _Known())


def _follow(name: str, description: Description) -> int:
    """At every worker: another publisher begins; the newest version that was seen here."""
    known = _names.get(current_agent(), {}).get(name)
    if known is None:  # nothing is kept for a name of which nobody here knows
        return 0
    if known.copies:
        publisher = worker_of(description[0])
        owner = rpc.get_actor(_ACTOR + name, ASK_FOR_NAMES_LIMIT_S).owner_name()
        if owner != publisher:  # else any worker could have the copies here fetch from it
            raise CallRefused(f"{publisher!r} does not publish {name!r}: {owner!r} does")
    known.publisher_came(description)
    return known.newest


def _limit_s(deadline: Deadline) -> float:
    """The time that is left, as users write it."""
    return max(MIN_WAIT_S, deadline.remaining_s()) if deadline.is_finite else 0
