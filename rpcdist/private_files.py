"""Files and folders that no other user can read or write, so that their contents are trusted, or secret.

The flight recorders of calls and of collectives write such files when a job fails. `RPCDIST_FLIGHT_RECORDER_SIZE` is
the number of records of each (1,000; 0 turns them off), and `RPCDIST_FLIGHT_RECORDER_DIR` their folder (by default
`rpcdist-flight-<user id>` in the system's temporary folder).
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
    """Why a file or folder is not private, as a clause for a message; None if it is private.

    Args:
        status: of the opened file, so that it cannot be replaced between the check and the use.
        is_folder: whether it must be a folder, and not a regular file.
        may_be_read: whether others may read it, and only must not write.
    """
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(status.st_mode):
        return f"is not a {'folder' if is_folder else 'regular file'}"
    if status.st_uid != os.geteuid():
        return f"belongs to user id {status.st_uid}, and this process runs as {os.geteuid()}"
    refused = 0o022 if may_be_read else 0o077
    if status.st_mode & refused:
        could = "written" if may_be_read else "read or written"
        return f"can be {could} by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def runtime_folder(create: bool) -> str:
    """This user's private folder for files that last until the machine is restarted.

    Args:
        create: whether to create the folder if it is missing.

    Raises:
        OSError: the folder is missing, cannot be created, or is not private.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    shared = f"{tempfile.gettempdir()}/rpcdist-{os.geteuid()}"
    folder = os.path.join(runtime, "rpcdist") if os.path.isdir(runtime) else shared
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


def add_failure_listener(listener: Callable[[BaseException], object]) -> None:
    """Registers a function to be called with the exception that ends the program of this process."""
    _listeners.append(listener)


def remove_failure_listener(listener: Callable[[BaseException], object]) -> None:
    """Removes a registered function, if it is registered."""
    if listener in _listeners:
        _listeners.remove(listener)


def note_failure(error: BaseException) -> None:
    """Calls the listeners: an exception ends the program. The launcher calls this before it reports the failure."""
    for listener in list(_listeners):
        try:
            listener(error)
        except Exception:
            logger.exception("a flight recorder could not write")


def flight_recorder_size() -> int:
    """The number of operations, or calls, that a flight recorder keeps. Raises `ConfigError`."""
    text = os.environ.get(SIZE_VARIABLE, str(DEFAULT_SIZE))
    if not text.isdigit():
        raise ConfigError(f"{SIZE_VARIABLE} must be a whole number of operations, not {text!r}")
    return int(text)


def flight_folder() -> Path:
    """The folder of the flight files."""
    return Path(os.environ.get(FOLDER_VARIABLE) or Path(tempfile.gettempdir()) / f"rpcdist-flight-{os.getuid()}")


def write_flight_file(name: str, kin: str, text: str) -> Path | None:
    """Writes a file atomically, in the private folder of the flight files.

    Args:
        name: the name of the file; an existing file is replaced.
        kin: a glob pattern; only the newest `KEPT_FILES` files that match it are kept.
        text: the content.

    Returns:
        The file; None, with a warning in the log, if it could not be written, which must not hide the failure itself.
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
