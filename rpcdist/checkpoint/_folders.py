"""The folder of a checkpoint: a link to the newest one that is whole.

`out/checkpoint` is a symbolic link to a folder beside it, `.checkpoint-8f3c...`. A new one is written into a folder of
its own; then one `rename` puts a new link in the place of the old one, and the old folder goes. Whenever a process
dies, the link leads to a whole checkpoint, and what was left half-way is removed by the next one.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from rpcdist.errors import ConfigError

__all__ = ["discard", "new_folder", "publish"]

NUM_RANDOM_BYTES = 8


def new_folder(path: Path) -> Path:
    """Makes the folder for a new checkpoint at `path`, and removes those that were never published.

    Raises:
        ConfigError: there is something else at `path`.
    """
    if path.exists() and not path.is_symlink():
        raise ConfigError(f"{path} exists, and no checkpoint.save() made it: name a path that is free")
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_all_but(path, _published(path))
    folder = path.with_name(f".{path.name}-{secrets.token_hex(NUM_RANDOM_BYTES)}")
    folder.mkdir()
    return folder


def publish(folder: Path, path: Path) -> None:
    """The folder becomes the checkpoint at `path`, in one step; then the one before is removed."""
    _sync(folder)
    link = folder.with_name(f"{folder.name}.link")
    link.symlink_to(folder.name)
    os.replace(link, path)
    _sync(path.parent)
    _remove_all_but(path, folder)


def discard(folder: Path) -> None:
    """Removes a folder that was not published."""
    shutil.rmtree(folder, ignore_errors=True)  # what stays is removed by the next checkpoint


def _published(path: Path) -> Path | None:
    return path.with_name(os.readlink(path)) if path.is_symlink() else None


def _remove_all_but(path: Path, kept: Path | None) -> None:
    ours = re.compile(rf"\.{re.escape(path.name)}-[0-9a-f]{{{2 * NUM_RANDOM_BYTES}}}(\.link)?")
    for found in path.parent.iterdir():
        if ours.fullmatch(found.name) and found != kept:
            found.unlink() if found.is_symlink() else discard(found)


def _sync(folder: Path) -> None:
    """Has the names in a folder on the disk before anything that relies on them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
