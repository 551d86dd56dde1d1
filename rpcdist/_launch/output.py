"""The output of the ranks of a job: copies each line to the streams of this process, with a name, and to a file."""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Final

from rpcdist.errors import ConfigError, raised_as
from rpcdist.own_shortage import own_shortage

logger = logging.getLogger("rpcdist.launch")

ERROR_LINES: Final = 20
"""The number of lines of a failed rank's output in the error."""

KEPT_LINES: Final = 200
_LONGEST_LINE_BYTES: Final = 1 << 13
_PIECE_BYTES: Final = 1 << 12  # a pipe that takes more takes this much without waiting
_COLOURS: Final = (36, 33, 35, 32, 34, 31)  # terminal codes


class JobOutput:
    """The destinations of a job's output.

    Args:
        prefix: whether each line on the terminal begins with the worker's name.
        log_dir: a folder for the files `NAME.ATTEMPT.log`; made if necessary.
        takes_output: whether a descriptor takes `_PIECE_BYTES` without waiting.

    Attributes:
        is_ending: set when the job ends, which it must do even if the terminal was closed, or `head` has seen enough:
            output that cannot be shown is then dropped.
        is_unwanted: set when the user has ended the job: what its reader has not read by then is dropped.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(
        self,
        prefix: bool = False,
        log_dir: str | os.PathLike[str] | None = None,
        takes_output: Callable[[int], bool] = lambda descriptor: True,
    ) -> None:
        self.is_ending = False
        self.is_unwanted = False
        self._takes_output = takes_output
        self._prefix = prefix
        self.log_dir = None if log_dir is None else os.path.abspath(log_dir)
        self._workers: dict[str, WorkerOutput] = {}
        self._unwritten = {"stdout": bytearray(), "stderr": bytearray()}
        if self.log_dir is not None:
            with raised_as(ConfigError, f"log_dir={self.log_dir!r} cannot be made", OSError):
                os.makedirs(self.log_dir, exist_ok=True)

    def open(self, name: str, attempt: int) -> WorkerOutput:
        """Returns the output for the process of worker `name` in this attempt."""
        path = None if self.log_dir is None else os.path.join(self.log_dir, f"{name}.{attempt}.log")
        before = self._workers.get(name)
        colour = _COLOURS[len(self._workers) % len(_COLOURS)] if before is None else before.colour
        self._workers[name] = WorkerOutput(name if self._prefix else None, path, colour, self.show)
        return self._workers[name]

    def tail(self, name: str, num_lines: int) -> str:
        """Returns the last lines of a worker's last process."""
        return self._workers[name].tail(num_lines) if name in self._workers else ""

    def show(self, stream: str, data: bytes) -> None:
        """Writes to the terminal, or to whatever takes its place, as much as that takes now; see `blocked`.

        Raises:
            BrokenPipeError: nobody reads it any more.
            ConfigError: it cannot be written for another reason, such as a full disk.
        """
        if not data:
            return
        self._unwritten[stream] += data
        self.write_on(stream)

    def write_on(self, stream: str) -> None:
        """Writes what `show` has kept, as much as is possible without waiting; raises as `show` does."""
        target, rest = getattr(sys, stream), self._unwritten[stream]
        try:
            descriptor = _descriptor_of(target)
            if target is None:  # in pythonw and daemons
                rest.clear()
            elif descriptor is None:  # in a notebook
                data = bytes(rest)
                rest.clear()
                if hasattr(target, "buffer"):
                    target.flush()
                    target.buffer.write(data)
                else:
                    target.write(data.decode(errors="replace"))
                target.flush()
            while rest and descriptor is not None and self._takes_output(descriptor):
                target.flush()
                del rest[: os.write(descriptor, rest[:_PIECE_BYTES])]
        except BlockingIOError:  # another process has made the pipe non-blocking, and has just filled it
            pass
        except OSError as exc:
            rest.clear()
            if self.is_ending:
                return
            if isinstance(exc, BrokenPipeError):
                raise
            text = f"the output of the ranks cannot be written to {stream}: {exc.strerror}. Write it to another place"
            raise ConfigError(text) from exc

    def blocked(self) -> dict[str, int]:
        """The streams, with their descriptors, whose reader has not read what is already there: it is slow, or stopped.

        Until the descriptor takes more, the output of the ranks should not be read, so that they wait as well.
        """
        streams = (name for name, rest in self._unwritten.items() if rest)
        return {name: descriptor for name in streams if (descriptor := _descriptor_of(getattr(sys, name))) is not None}


def _descriptor_of(target: object) -> int | None:
    """The descriptor of an output; None if it is not a file, or closed."""
    try:
        return target.fileno()  # type: ignore[no-any-return, attr-defined]
    except (OSError, ValueError, AttributeError):
        return None


def _opened(path: str) -> IO[bytes]:
    """An empty file for a log, locked against other jobs.

    Raises:
        ConfigError: a running job writes this log, or somebody has put something else there, such as a link to a file.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as exc:
        raise ConfigError(f"the log {path} cannot be written: {exc.strerror}; use another log_dir") from exc
    file = open(descriptor, "wb", buffering=0)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise ConfigError(f"the log {path} is not a regular file; use another log_dir")
    try:
        os.lockf(descriptor, os.F_TLOCK, 0)  # this process holds it, not those that inherit the file
    except (BlockingIOError, PermissionError) as exc:
        file.close()
        raise ConfigError(f"another job that is running writes the log {path}; use another log_dir") from exc
    except OSError as exc:  # the file system has no locks
        logger.debug("the log %s is not locked: %s", path, exc)
    file.truncate()
    return file


class WorkerOutput:
    """The two output streams of one process. Used on one thread; `tail` on any thread."""

    def __init__(self, prefix: str | None, path: str | None, colour: int, show: Callable[[str, bytes], object]) -> None:
        self.colour = colour
        self._show = show
        self._prefix = prefix
        self._path = path
        self._file: IO[bytes] | None = None if path is None else _opened(path)
        self._kept: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._begun = {"stdout": b"", "stderr": b""}  # lines without an end so far

    def write(self, stream: str, data: bytes) -> None:
        if self._file is not None:
            try:
                self._file.write(data)
            except OSError as exc:  # for example a full disk; the job continues
                logger.warning("the log %s ends here: %s", self._path, own_shortage(exc) or exc.strerror)
                self._file.close()
                self._file = None
        # A carriage return also ends a line, since progress bars write only these.
        whole = self._begun[stream] + data
        lines = whole.splitlines(keepends=True)
        begun = b"" if not lines or lines[-1].endswith((b"\r", b"\n")) else lines.pop()
        while len(begun) > _LONGEST_LINE_BYTES:
            lines.append(begun[:_LONGEST_LINE_BYTES])
            begun = begun[_LONGEST_LINE_BYTES:]
        self._begun[stream] = begun
        self._kept.extend(lines)
        self._show(stream, data if self._prefix is None else self._named(stream, lines))

    def close(self) -> None:
        """Shows an incomplete last line, and closes the file."""
        for stream, begun in self._begun.items():
            if begun:
                self._kept.append(begun + b"\n")
                if self._prefix is not None:
                    with suppress(BrokenPipeError):  # nobody reads it, and the process has ended
                        self._show(stream, self._named(stream, [begun + b"\n"]))
            self._begun[stream] = b""
        if self._file is not None:
            self._file.close()
            self._file = None

    def tail(self, num_lines: int) -> str:
        return b"".join(list(self._kept)[-num_lines:]).decode(errors="replace")

    def _named(self, stream: str, lines: list[bytes]) -> bytes:
        """Returns the lines, each with the worker's name before it if `prefix` is set."""
        target = getattr(sys, stream)
        name = f"[{self._prefix}] ".encode()
        if target is not None and target.isatty():
            name = b"\x1b[%dm%s\x1b[0m" % (self.colour, name)
        return b"".join(name + line for line in lines)
