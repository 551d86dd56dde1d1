"""The folder of a checkpoint: a link to the newest complete one.

`out/checkpoint` is a symbolic link to a folder beside it, `.checkpoint-8f3c...`. A save writes into a new folder; then
one `rename` replaces the old link, and the old folder is removed. Whenever a process dies, the link leads to a complete
checkpoint, and the next save removes incomplete folders.

A process that writes a folder holds a lock on it, which ends with the process. So a second save to the same path is
refused, and removes no folder that another process is writing or has just published. File systems that cannot
lock folders (NFS) have no such protection.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rpcdist.errors import CheckpointError, ConfigError, RpcdistError, text_of
from rpcdist.own_shortage import own_shortage

NUM_RANDOM_BYTES = 8


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a checkpoint.

    Raises:
        ConfigError: `path` is not a path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(
            f"the path of a checkpoint is a {type(path).__name__}: the path comes first, then the state, such as "
            "checkpoint.save('out/checkpoint', {'model': model})"
        )
    return Path(path).absolute()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Makes the folder for a new checkpoint at `path`, and removes folders that were never published.

    The new folder belongs to the caller until the context ends; it is then removed unless it was published.

    Raises:
        ConfigError: `path` is something else than a checkpoint, or another save to it runs.
    """
    is_ours = path.is_symlink() and _name_pattern(path).fullmatch(os.readlink(path))
    if not is_ours and (path.exists() or path.is_symlink()):
        raise ConfigError(f"{path} exists, and no checkpoint.save() made it: use an unused path")
    folder = path.with_name(f".{path.name}-{secrets.token_hex(NUM_RANDOM_BYTES)}")
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    try:
        with _locked(folder) as is_free:
            if not is_free or not _remove_all_but(path, folder):
                text = f"another checkpoint.save() to {path} is running: wait until it ends, or use another path"
                raise ConfigError(text)
            yield folder
    finally:
        if _published(path) != folder:
            discard(folder)


def publish(folder: Path, path: Path) -> None:
    """Makes the folder the checkpoint at `path`, in one step; then removes the previous one."""
    _sync(folder)
    link = folder.with_name(f"{folder.name}.link")
    try:
        link.symlink_to(folder.name)
        os.replace(link, path)
    finally:
        link.unlink(missing_ok=True)
    _sync(path.parent)
    _remove_all_but(path, folder)


_OF_FILES = "inline_container"  # in the error of torch's file writer when the disk fails


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns the error of a full or broken disk into one that names the disk; torch's error names a file position.

    Raises:
        CheckpointError: a file could not be written into the folder, or a value not be serialized.
    """
    try:
        yield
    except RpcdistError:
        raise
    except Exception as exc:
        if not (isinstance(exc, OSError) or (isinstance(exc, RuntimeError) and _OF_FILES in text_of(exc))):
            raise CheckpointError(
                f"a value of the checkpoint at {folder} cannot be turned into bytes ({type(exc).__name__}: "
                f"{text_of(exc)[:300]}): leave it out, or save a value from which it can be rebuilt. The previous "
                "checkpoint is intact"
            ) from exc
        if (shortage := own_shortage(exc)) is not None:
            text = f"writing the checkpoint into {folder} failed: {shortage}. The previous checkpoint is intact"
            raise CheckpointError(text) from exc
        raise CheckpointError(
            f"writing the checkpoint into {folder} failed ({type(exc).__name__}: {text_of(exc)[:300]}); its disk has "
            f"{_free_mib(folder)}. The previous checkpoint is intact. Make room, and save again"
        ) from exc


def _free_mib(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:,.1f} MiB free"
    except OSError as exc:
        return f"no answer ({exc})"


def discard(folder: Path) -> None:
    """Removes a folder that was not published."""
    shutil.rmtree(folder, ignore_errors=True)  # the next checkpoint removes the rest


def _published(path: Path) -> Path | None:
    return path.with_name(os.readlink(path)) if path.is_symlink() else None


def _name_pattern(path: Path) -> re.Pattern[str]:
    return re.compile(rf"\.{re.escape(path.name)}-[0-9a-f]{{{2 * NUM_RANDOM_BYTES}}}(\.link)?")


def _remove_all_but(path: Path, own: Path) -> bool:
    """Removes all folders of `path` except `own` and the published one. False if others are being written."""
    ours, none_is_written = _name_pattern(path), True
    for found in list(path.parent.iterdir()):
        if not ours.fullmatch(found.name) or found == own:
            continue
        if found.is_symlink():
            found.unlink(missing_ok=True)
            continue
        with _locked(found) as is_free:
            none_is_written = none_is_written and is_free
            if is_free and found != _published(path):  # read after locking: its writer may just have published it
                discard(found)
    return none_is_written


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Takes the lock of a folder; False if another process holds it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # another process has removed it
        yield True
        return
    try:
        is_free = _lock(descriptor)
        yield is_free
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """False if another process holds the lock."""
    import fcntl  # not on Windows

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system cannot lock folders
        return True
    return True


def _sync(folder: Path) -> None:
    """Flushes the names in a folder to the disk, before any step that relies on them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
