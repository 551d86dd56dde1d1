"""Files and folders that are this user's alone, so that what they hold can be believed, or kept secret.

Among them are those to which the flight recorders of a process, of calls and of collectives, write what they remember
when a job fails. `RPCDIST_FLIGHT_RECORDER_SIZE` says how much each remembers (1,000; 0 switches them off),
`RPCDIST_FLIGHT_RECORDER_DIR` where they write (by default the folder `rpcdist-flight-<user id>` of the system's
temporary folder).
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rpcdist.errors import ConfigError


def why_not_private(status: os.stat_result, *, is_folder: bool = False, may_be_read: bool = False) -> str | None:
    """Why others may have a hand in a file or folder, as a clause for a message; None if it is this user's alone.

    Args:
        status: of the opened file, so that nobody can exchange it between the look and the use.
        is_folder: a folder is wanted, not a regular file.
        may_be_read: others may read it, and only must not write.
    """
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(status.st_mode):
        return f"is not a {'folder' if is_folder else 'regular file'}"
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        return f"belongs to user id {status.st_uid}, and this process runs as {os.geteuid()}"
    refused = 0o022 if may_be_read else 0o077
    if status.st_mode & refused:
        could = "written" if may_be_read else "read or written"
        return f"can be {could} by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def runtime_folder(create: bool) -> str:
    """This user's folder for what lasts until the machine starts again, which must be this user's alone.

    Args:
        create: make it if it is missing.

    Raises:
        OSError: it is missing, cannot be made, or others may write there.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    user = os.geteuid() if hasattr(os, "geteuid") else os.getlogin()
    folder = os.path.join(runtime, "rpcdist") if os.path.isdir(runtime) else f"{tempfile.gettempdir()}/rpcdist-{user}"
    if create:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    if why := why_not_private(os.lstat(folder), is_folder=True):
        raise PermissionError(f"the folder {folder} {why}")
    return folder


logger = logging.getLogger(__name__)

DEFAULT_SIZE: Final = 1000
KEPT_FILES: Final = 20
SIZE_VARIABLE: Final = "RPCDIST_FLIGHT_RECORDER_SIZE"
FOLDER_VARIABLE: Final = "RPCDIST_FLIGHT_RECORDER_DIR"
_writing: Final = threading.Lock()
_listeners: Final[list[Callable[[BaseException], object]]] = []


def hear_failures(listener: Callable[[BaseException], object]) -> None:
    """Has a function called with the exception with which the program of this process fails."""
    _listeners.append(listener)


def forget_failures(listener: Callable[[BaseException], object]) -> None:
    """Undoes `hear_failures`, if it was called."""
    if listener in _listeners:
        _listeners.remove(listener)


def note_failure(error: BaseException) -> None:
    """The program of this process fails with an exception. Its launcher calls this before it reports that."""
    for listener in list(_listeners):
        try:
            listener(error)
        except Exception:
            logger.exception("a flight recorder could not write")


def flight_recorder_size() -> int:
    """How many operations, or calls, a recorder remembers. Raises `ConfigError`."""
    text = os.environ.get(SIZE_VARIABLE, str(DEFAULT_SIZE))
    if not text.isdigit():
        raise ConfigError(f"{SIZE_VARIABLE} must be a whole number of operations, not {text!r}")
    return int(text)


def flight_folder() -> Path:
    """The folder that failures are written to."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(os.environ.get(FOLDER_VARIABLE) or Path(tempfile.gettempdir()) / f"rpcdist-flight-{user}")


def write_flight_file(name: str, kin: str, text: str) -> Path | None:
    """Writes a file in one step, in a folder that only this user can read.

    Args:
        name: of the file; one that is there is replaced.
        kin: a pattern of names, of which the newest `KEPT_FILES` are kept.
        text: the content.

    Returns:
        The file; None, with a warning in the log, when it could not be written: that must not hide the failure itself.
    """
    folder = flight_folder()
    path = folder / name
    try:
        with _writing:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if FOLDER_VARIABLE not in os.environ and (why := why_not_private(folder.lstat(), is_folder=True)):
                raise PermissionError(f"the folder {why}. Set {FOLDER_VARIABLE} to a folder of your own")
            handle, temporary = tempfile.mkstemp(prefix=f".{name[:4]}", dir=folder)
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(temporary, path)
            for old in sorted(folder.glob(kin))[:-KEPT_FILES]:
                old.unlink(missing_ok=True)  # another process may do the same
    except OSError as exc:
        logger.warning("the flight recorder could not write %s: %s", path, exc)
        return None
    return path
