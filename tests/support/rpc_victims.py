"""Worker processes that a test may kill, stop and start again.

They are forked from a server that has imported torch and `rpcdist.rpc` and does nothing else, so one costs milliseconds
instead of seconds. Each runs what it is told, one thing after the other, on its main thread:

    with Victims() as victims:
        world = victims.world("a", "b", peer_timeout=UNIT_S)
        world["a"].run(functions.count_rrefs)
        world["b"].kill()

Everything waits for `LIMIT_S` at most, and the end of the `with` block ends every process, by its id.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

__all__ = ["CALM_S", "LIMIT_S", "UNIT_S", "Ended", "Pending", "Victim", "Victims", "forkserver_pid", "until"]

LIMIT_S = 60.0
UNIT_S = 0.8
"""`peer_timeout` where a test is about silence or leases; the other times of the tests are multiples of it."""
CALM_S = 30.0
"""`peer_timeout` where it must play no part."""

T = TypeVar("T")
Order = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.utils.data", "rpcdist.rpc", "pytest"])


class Ended(Exception):
    """The process ended before it had done what it was told."""


def until(condition: Callable[[], T], what: str, limit_s: float = LIMIT_S) -> T:
    """The first true value of `condition`: for facts about other processes, of which nothing tells us."""
    limit = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < limit, f"{what} did not come true within {limit_s} s; the last value was {value!r}"
        time.sleep(0.01)
    return value


class Pending(Generic[T]):
    """Something that a victim was told to do."""

    def __init__(self, victim: Victim, number: int, what: str) -> None:
        self._victim = victim
        self._number = number
        self._what = what

    def result(self, limit_s: float = LIMIT_S) -> T:
        """What the function returned; raises what it raised.

        Raises:
            Ended: the process has ended.
        """
        value: T = self._victim._outcome(self._number, self._what, limit_s)
        return value

    def error(self, kind: type[BaseException] = Exception, limit_s: float = LIMIT_S) -> Any:
        """The exception that it raised, which is one of `kind`."""
        try:
            value = self.result(limit_s)
        except kind as exc:
            return exc
        raise AssertionError(f"{self._what} returned {value!r}, but {kind.__name__} was expected")


@dataclass(slots=True)
class _Failure:
    error: BaseException
    trace: str


class Victim:
    """One process."""

    def __init__(self, name: str, environment: dict[str, str | None], log: Path) -> None:
        self.name = name
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs, environment, str(log)), name=f"victim {name}")
        self._process.start()
        theirs.close()
        self._log = log
        self._numbers = 0
        self._outcomes: dict[int, object] = {}
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stopped = False

    def __repr__(self) -> str:
        return f"<Victim {self.name}, process {self.pid}>"

    def begin(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Pending[T]:
        """Tells it to call a function of a module; does not wait."""
        self._numbers += 1
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `result` says so
            _send(self._connection, (function, args, kwargs))
        return Pending(self, self._numbers, f"{self.name}: {getattr(function, '__qualname__', function)}{args}")

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Tells it to call a function, and waits for the result."""
        return self.begin(function, *args, **kwargs).result()

    def _outcome(self, number: int, what: str, limit_s: float) -> Any:
        limit = time.monotonic() + limit_s
        while number not in self._outcomes:
            assert self._connection.poll(max(0.0, limit - time.monotonic())), f"{what} did not end\n{self.log()}"
            try:
                done, outcome = _receive(self._connection)
            except (EOFError, ConnectionResetError):
                raise Ended(f"{what}: the process has ended\n{self.log()}") from None
            self._outcomes[done] = outcome
        outcome = self._outcomes.pop(number)
        if isinstance(outcome, _Failure):
            outcome.error.add_note(outcome.trace)
            raise outcome.error
        return outcome

    def log(self) -> str:
        """What the process has written to stdout and stderr."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL, and waits until the process is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Waits for the end of the process; its exit code, negative for a signal."""
        self._process.join(LIMIT_S)
        assert self._process.exitcode is not None, f"{self!r} still runs\n{self.log()}"
        return self._process.exitcode

    def stop(self) -> None:
        """SIGSTOP: to the others it looks like a host that hangs."""
        os.kill(self.pid, signal.SIGSTOP)
        self.stopped = True

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)
        self.stopped = False

    def end(self) -> None:
        """Ends the process, whatever it is doing; idempotent."""
        self._connection.close()
        if self._process.exitcode is None and not self.stopped:
            self._process.join(2.0)
        if self._process.exitcode is None:
            os.kill(self.pid, signal.SIGKILL)
            self._process.join(LIMIT_S)
        self._process.close()


class Victims:
    """All victims of one test. Use it as a context manager.

    Attributes:
        channels: `RPCDIST_CHANNELS` of those that start from now on; by default that of the test process.
    """

    def __init__(self) -> None:
        self.channels = os.environ.get("RPCDIST_CHANNELS", "auto")
        self._folder = tempfile.TemporaryDirectory(prefix="rpcdist-victims-")
        self.folder = Path(self._folder.name)
        self._all: list[Victim] = []
        self._worlds = 0

    def __enter__(self) -> Victims:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:  # pytest shows it with the failure
            for victim in self._all:
                print(f"--- {victim!r}\n{victim.log()}", file=sys.stderr)
        for victim in self._all:
            victim.end()
        self._folder.cleanup()

    def start(self, name: str, environment: dict[str, str | None] | None = None) -> Victim:
        """A process that has not joined anything yet.

        Args:
            name: for messages, and of its worker.
            environment: variables to set; None removes one.
        """
        token = os.environ.get("RPCDIST_TOKEN")
        environment = {"RPCDIST_TOKEN": token, "RPCDIST_CHANNELS": self.channels, **(environment or {})}
        victim = Victim(name, environment, self.folder / f"{len(self._all)}-{name}.log")
        self._all.append(victim)
        return victim

    def url(self) -> str:
        """An `init_method` for a new world."""
        self._worlds += 1
        return f"file://{self.folder}/world{self._worlds}"

    def world(self, *names: str, world_size: int | None = -1, url: str | None = None, **options: Any) -> World:
        """Starts processes, which join one job; ranks in the order of the names.

        Args:
            names: of the workers.
            world_size: -1 for as many as there are names; None for workers that come and go.
            url: the `init_method`.
            options: of `RpcOptions`.
        """
        world = self.new_world(len(names) if world_size == -1 else world_size, url, **options)
        joining = [world.begin_join(name, rank) for rank, name in enumerate(names)]
        for pending in joining:
            pending.result()
        return world

    def new_world(self, size: int | None, url: str | None = None, **options: Any) -> World:
        """A job that nobody has joined yet."""
        return World(self, url or self.url(), size, options)


class World:
    """The workers of one job, by name."""

    def __init__(self, victims: Victims, url: str, size: int | None, options: dict[str, Any]) -> None:
        self.url = url
        self.size = size
        self.options = options
        self._victims = victims
        self._workers: dict[str, Victim] = {}

    def __getitem__(self, name: str) -> Victim:
        return self._workers[name]

    def __iter__(self) -> Iterator[Victim]:
        return iter(self._workers.values())

    def begin_join(self, name: str, rank: int, **options: Any) -> Pending[None]:
        """Starts one more process, or the replacement of one."""
        worker = self._workers[name] = self._victims.start(name)
        return worker.begin(join, name, rank, self.size, self.url, **{**self.options, **options})

    def join(self, name: str, rank: int, **options: Any) -> Victim:
        self.begin_join(name, rank, **options).result()
        return self._workers[name]

    def shutdown(self, *names: str, **arguments: Any) -> None:
        """A regular end of the named workers, by default of all."""
        leaving = [worker.begin(leave, **arguments) for worker in self if not names or worker.name in names]
        for pending in leaving:
            pending.result()


def join(name: str, rank: int, world_size: int | None, url: str, **options: Any) -> None:
    """Runs in the victim."""
    from rpcdist import rpc

    options = {"rpc_timeout": LIMIT_S, **options}
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=rpc.RpcOptions(init_method=url, **options))


def leave(**arguments: Any) -> None:
    """Runs in the victim."""
    from rpcdist import rpc

    rpc.shutdown(**arguments)


def forkserver_pid() -> int:
    """The process that the victims are forked from; it outlives the tests."""
    forkserver.ensure_running()
    pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # there is no public way
    return pid


def _send(connection: Connection[Any, Any], what: object) -> None:
    connection.send_bytes(pickle.dumps(what, 5))  # `send` would put tensors into shared memory


def _receive(connection: Connection[Any, Any]) -> Any:
    return pickle.loads(connection.recv_bytes())


def _serve(connection: Connection[Any, Any], environment: dict[str, str | None], log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for variable, value in environment.items():
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value
    for number in range(1, 1_000_000):
        try:
            function, args, kwargs = _receive(connection)
        except (EOFError, OSError):
            break
        try:
            outcome = function(*args, **kwargs)
        except BaseException as exc:
            outcome = _Failure(exc, traceback.format_exc())
        _answer(connection, number, outcome)
        del function, args, kwargs, outcome  # a victim holds what it is told to hold, and nothing else
    os._exit(0)  # the test is over; a worker that was not shut down has nobody left to talk to


def _answer(connection: Connection[Any, Any], number: int, outcome: object) -> None:
    try:
        _send(connection, (number, outcome))
    except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError) as exc:  # it cannot be pickled
        error = RuntimeError(f"{exc!r} when sending {outcome!r}")
        _send(connection, (number, _Failure(error, traceback.format_exc())))
