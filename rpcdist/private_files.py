"""Whether files and folders are this user's alone, so that what they hold can be believed, or kept secret."""

from __future__ import annotations

import os
import stat
import tempfile


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
