"""Digests of a checkpoint's files, which tell damaged files from whole ones before anything of them is used.

They lie beside torch's files in one of our own, `.digests`, so that torch reads the checkpoint as before: of each chunk
of each file one, so that a partial load reads little more than its tensors, and one of the digests themselves.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import xxhash

from rpcdist.errors import CheckpointError, ConfigError
from rpcdist.own_shortage import own_shortage

DIGESTS_NAME: Final = ".digests"
CHUNK_BYTES: Final = 4 << 20
_ALGORITHMS: Final[dict[str, Callable[[bytes], Any]]] = {"xxh3": xxhash.xxh3_128, "sha256": hashlib.sha256}

FileDigests = dict[str, list[str]]
"""By the name of a file: its size in bytes as a text, and then the digest of each chunk."""


def algorithm_of(name: str) -> str:
    """The name, checked. Raises `ConfigError`."""
    if name not in _ALGORITHMS:
        raise ConfigError(f"checkpoints have digests by {' or '.join(map(repr, _ALGORITHMS))}, not {name!r}")
    return name


def digests_of(folder: Path, names: Iterable[str], algorithm: str) -> FileDigests:
    """Reads files of the folder that were just written. Raises `OSError`."""
    found: FileDigests = {}
    for name in names:
        path = folder / name
        size = path.stat().st_size
        found[name] = [str(size), *(_digest(algorithm, chunk) for _, chunk in _chunks(path, range(_num_chunks(size))))]
    return found


def write_digests(folder: Path, found: FileDigests, algorithm: str) -> None:
    """Writes the file of digests. Raises `OSError`."""
    body = json.dumps({"algorithm": algorithm, "chunk_bytes": CHUNK_BYTES, "files": found}).encode()
    with open(folder / DIGESTS_NAME, "wb") as file:
        file.write(body + b"\n" + _digest(algorithm, body).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


class Digests:
    """Those of a checkpoint that is read. Without the file, as in a checkpoint that torch wrote, nothing is compared.

    Raises:
        CheckpointError: the file is damaged.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._compared: set[tuple[str, int]] = set()
        self._files: FileDigests | None = None
        self._algorithm = ""
        try:
            body, _, end = (self._folder / DIGESTS_NAME).read_bytes().partition(b"\n")
        except FileNotFoundError:
            return
        try:
            content = json.loads(body)
            self._algorithm = algorithm_of(content["algorithm"])
            is_whole = end == _digest(self._algorithm, body).encode() + b"\n" and content["chunk_bytes"] == CHUNK_BYTES
            self._files = content["files"]
        except Exception as exc:
            raise self._damaged(DIGESTS_NAME) from exc
        if not is_whole:
            raise self._damaged(DIGESTS_NAME)

    def compare(self, name: str, start: int = 0, length: int | None = None) -> None:
        """Reads what a part of a file is in, and compares it.

        Args:
            name: of the file.
            start, length: the part, in bytes; by default the whole file.

        Raises:
            CheckpointError: the file is damaged, cut short, or missing.
        """
        if self._files is None:
            return
        if name not in self._files:
            raise self._damaged(name)
        size, *digests = self._files[name]
        end = int(size) if length is None else start + length
        path = self._folder / name
        try:
            if path.stat().st_size != int(size) or not 0 <= start <= end <= int(size):
                raise self._damaged(name)
            wanted = range(start // CHUNK_BYTES, _num_chunks(end))
            for number, chunk in _chunks(path, (each for each in wanted if (name, each) not in self._compared)):
                if _digest(self._algorithm, chunk) != digests[number]:
                    raise self._damaged(name, number * CHUNK_BYTES)
                self._compared.add((name, number))
        except OSError as exc:
            raise CheckpointError(
                f"the file {path} of a checkpoint cannot be read: {own_shortage(exc) or exc.strerror or exc}"
            ) from exc

    def _damaged(self, name: str, at: int | None = None) -> CheckpointError:
        where = "" if at is None else f" between bytes {at} and {at + CHUNK_BYTES}"
        return CheckpointError(
            f"the checkpoint at {self._folder} is damaged: {name}{where} is not what was written. Load another "
            "checkpoint, and look at the disk"
        )


def _num_chunks(size: int) -> int:
    return -(-size // CHUNK_BYTES)


def _chunks(path: Path, numbers: Iterable[int]) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        for number in numbers:
            file.seek(number * CHUNK_BYTES)
            yield number, file.read(CHUNK_BYTES)


def _digest(algorithm: str, data: bytes) -> str:
    digest: str = _ALGORITHMS[algorithm](data).hexdigest()
    return digest
