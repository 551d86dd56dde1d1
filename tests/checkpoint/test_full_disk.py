"""A disk that fills up while a checkpoint is written: the old one stays, and nothing else does."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from rpcdist import checkpoint
from rpcdist.errors import CheckpointError

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
STATE: dict[str, Any] = {"weight": torch.ones(1000), "step": 1}


class FullFile(io.RawIOBase):
    """Takes so many bytes, and then what a full disk takes."""

    def __init__(self, file: IO[bytes], num_bytes_left: int) -> None:
        self._file = file
        self._num_bytes_left = num_bytes_left

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._num_bytes_left -= len(memoryview(data).cast("B"))
        if self._num_bytes_left < 0:
            raise FULL
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def fileno(self) -> int:
        return self._file.fileno()


def fill_up(patch: pytest.MonkeyPatch, of: str, num_bytes_left: int) -> None:
    """Files whose name ends so find the disk full after so many bytes."""
    create = FileSystem.create_stream

    @contextmanager
    def create_stream(self: FileSystem, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with create(self, path, mode) as file:
            full = mode == "wb" and os.fspath(path).endswith(of)
            yield FullFile(cast(IO[bytes], file), num_bytes_left) if full else file

    patch.setattr(FileSystem, "create_stream", create_stream)


def refuse(*_: object, **__: object) -> None:
    raise FULL


@pytest.mark.parametrize("moment", ["folder", "first byte", "tensors", "index", "link", "rename"])
def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "checkpoint"
    checkpoint.save(path, {"weight": torch.zeros(1000), "step": 0})
    before = sorted(os.listdir(tmp_path))
    with monkeypatch.context() as patch:
        if moment == "folder":
            patch.setattr(Path, "mkdir", refuse)
        elif moment in ("first byte", "tensors"):
            fill_up(patch, ".distcp", 0 if moment == "first byte" else 2000)
        elif moment == "index":
            fill_up(patch, ".metadata.tmp", 100)
        elif moment == "link":
            patch.setattr(Path, "symlink_to", refuse)
        else:
            patch.setattr(os, "replace", refuse)
        with pytest.raises(CheckpointError, match=rf"into {tmp_path}.* its disk has [\d,.]+ MiB free.*Make room"):
            checkpoint.save(path, STATE)
    assert sorted(os.listdir(tmp_path)) == before
    found: dict[str, Any] = {"weight": torch.ones(1000), "step": 9}
    checkpoint.load(path, found)
    assert found["step"] == 0 and not found["weight"].any()
    checkpoint.save(path, STATE)
    checkpoint.load(path, found)
    assert found["step"] == 1 and torch.equal(found["weight"], STATE["weight"])
