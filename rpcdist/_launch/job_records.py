"""The jobs of this user that `launch` runs on this machine: one file for each running job.

A file contains the process that runs the job and the states of its ranks, but no secrets. The folder is the user's own.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rpcdist.errors import ConfigError
from rpcdist.private_files import runtime_folder

if TYPE_CHECKING:
    from rpcdist._launch.job_plan import RankPlan
    from rpcdist._launch.progress import Progress


logger = logging.getLogger("rpcdist.launch")

_SUFFIX: Final = ".json"
_UNFINISHED: Final = ".json.new"
_numbers: Final = count()


@dataclass(frozen=True, slots=True)
class LaunchedJob:
    """The content of a file: `pid` and `started` identify the process that called `launch`; `states` are the ranks'."""

    name: str
    address: str
    pid: int
    started: str
    log_dir: str | None
    states: dict[str, str] = field(default_factory=dict)

    def is_called(self, wanted: str) -> bool:
        return wanted in (self.name, self.address, str(self.pid))


@contextmanager
def job_record(
    name: str | None, address: str, log_dir: str | None
) -> Iterator[Callable[[Sequence[RankPlan], Progress], None]]:
    """Keeps the file of a job of this process within the context; yields a function that writes the ranks' states.

    If no folder is available, the job runs without the file, and the log says so.

    Raises:
        ConfigError: another job with this name or address is running, or commands could not be given the name.
    """
    job = LaunchedJob(name or address, address, os.getpid(), start_of(os.getpid()), log_dir)
    if not isinstance(job.name, str) or not job.name.isprintable() or job.name.startswith("-"):
        raise ConfigError(f"name={name!r}: the name of a job is a printable text that does not begin with '-'")
    for other in jobs():
        if other.address == address:
            raise ConfigError(
                f"process {other.pid} already runs the job {other.name!r} at {address}: choose another port"
            )
        if other.name == job.name:
            raise ConfigError(f"process {other.pid} already runs a job {other.name!r}: choose another name")
    path: str | None = None

    def save() -> None:
        nonlocal path
        try:
            if path is None:
                return
            temporary = path.removesuffix(_SUFFIX) + _UNFINISHED
            with open(temporary, "w") as file:
                json.dump(asdict(job), file)
            os.replace(temporary, path)
        except OSError as exc:  # for example a full disk; the job continues
            logger.info("`python -m rpcdist status` will not know this job: %s", exc)
            path = None

    def write(plans: Sequence[RankPlan], progress: Progress) -> None:
        job.states.update({one.name: progress.state(rank) for rank, one in enumerate(plans)})
        save()

    try:
        path = os.path.join(runtime_folder(create=True), f"{os.getpid()}-{next(_numbers)}{_SUFFIX}")
    except OSError as exc:
        logger.info("`python -m rpcdist status` will not know this job: %s", exc)
    save()
    try:
        yield write
    finally:
        if path is not None:
            Path(path).unlink(missing_ok=True)


def jobs() -> Iterator[LaunchedJob]:
    """Yields the jobs of this user whose program runs. Removes files that killed programs left."""
    try:
        folder = runtime_folder(create=False)
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        path = Path(folder, name)
        pid = name.partition("-")[0]
        if name.endswith(_UNFINISHED) and pid.isdecimal() and not start_of(int(pid)):
            path.unlink(missing_ok=True)  # its program was killed meanwhile
        if not name.endswith(_SUFFIX) or not path.is_file():
            continue
        try:
            job = LaunchedJob(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, RecursionError):
            continue  # the job has just ended, or another version wrote the file
        if start_of(job.pid) == job.started != "":
            yield job
        else:
            path.unlink(missing_ok=True)


def find_job(wanted: str) -> LaunchedJob:
    """Returns the job with this name or address. Raises `ConfigError`."""
    known = list(jobs())
    for job in known:
        if job.is_called(wanted):
            return job
    running = ", ".join(job.name for job in known) or "none"
    raise ConfigError(f"no job {wanted!r} of this user runs on this machine; running jobs: {running}")


def address_of(wanted: str) -> str:
    """Returns the address of the job of `launch` with this name on this host; other texts are returned as addresses."""
    return next((job.address for job in jobs() if job.is_called(wanted)), wanted)


def start_of(pid: int) -> str:
    """Returns when a process was started, to detect reuse of its id; empty if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""
