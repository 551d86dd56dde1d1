"""Plans, files and their index, by the planners and the file system of `torch.distributed.checkpoint`.

torch's `save` and `load` work with torch's own process groups only. This module has their intermediate steps, which the
ranks of our groups and the owners of remote references can call.

Digests detect damaged files before any of their contents are used. They are in a file of our own beside torch's files,
`.digests`, so torch can still read the checkpoint. Each chunk of each file has a digest, so that a partial load
reads little more than its tensors, and the digests have one themselves.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    SavePlan,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils._pytree import tree_map_only

from rpcdist.checkpoint._entries import Entries, TensorAt, is_stateful, of_module
from rpcdist.checkpoint._folders import writing
from rpcdist.errors import CheckpointError, ConfigError, RpcdistError, described_error, raised_as, text_of
from rpcdist.own_shortage import own_shortage

DIGESTS_NAME: Final = ".digests"
CHUNK_BYTES: Final = 4 << 20
_ALGORITHMS: Final[dict[str, Callable[[bytes], Any]]] = {"xxh3": xxhash.xxh3_128, "sha256": hashlib.sha256}

FileDigests = dict[str, list[str]]
"""By the name of a file: its size in bytes as a string, followed by the digest of each chunk."""


def algorithm_of(name: str) -> str:
    """Checks and returns the name. Raises `ConfigError`."""
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
    """The digests of a checkpoint to read. Without the file, as in a checkpoint that torch wrote, none is compared.

    Raises:
        CheckpointError: the file is damaged.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._compared: set[tuple[str, int]] = set()
        self._files: FileDigests | None = None
        self._algorithm = ""
        self._check_kind(DIGESTS_NAME)
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
        """Reads the chunks that contain a part of a file, and compares their digests.

        Args:
            start, length: the part, in bytes; by default the whole file.

        Raises:
            CheckpointError: the file is damaged, cut short, or missing.
        """
        self._check_kind(name)
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
            text = f"the file {path} of a checkpoint cannot be read: {own_shortage(exc) or exc.strerror or exc}"
            raise CheckpointError(text) from exc

    def _check_kind(self, name: str) -> None:
        """Refuses names that are not files of this folder: reading a pipe would block, and a device has no end."""
        path = self._folder / name
        if Path(name).name != name or (path.exists() and not path.is_file()):
            raise self._damaged(name)

    def _damaged(self, name: str, at: int | None = None) -> CheckpointError:
        where = "" if at is None else f" between bytes {at} and {at + CHUNK_BYTES}"
        return CheckpointError(
            f"the checkpoint at {self._folder} is damaged: {name}{where} is not what was written. Load another "
            "checkpoint, and check the disk"
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


INDEX_NAME = ".metadata"
NUM_ENTRIES_SHOWN = 10  # in an error


class CheckpointPart:
    """The part of one process: it makes a plan first and, when all plans are known, writes its share of the files."""

    def __init__(self, folder: str, entries: Entries, algorithm: str) -> None:
        self._algorithm = algorithm
        self._planner = _SavePlanner()
        self._folder = Path(folder)
        self._writer = FileSystemWriter(folder)
        self._planner.set_up_planner(entries, self._writer.storage_meta(), is_coordinator=False)
        self._writer.set_up_storage_writer(is_coordinator=False)

    def plan(self) -> SavePlan:
        """A plan of all entries of this process; `plan_together` then assigns each entry to one process."""
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def write(self, plan: SavePlan) -> WrittenFiles:
        """Writes the entries assigned to this process, and syncs them to the disk. Raises `CheckpointError`."""
        plan = self._planner.finish_plan(plan)
        with writing(self._folder):
            results = self._writer.write_data(plan, self._planner).wait()
            files = sorted({result.storage_data.relative_path for result in results})
            return results, digests_of(self._folder, files, self._algorithm)


WrittenFiles = tuple[list[WriteResult], FileDigests]
"""The entries that one process has written, and the digests of its files."""


def plan_together(folder: str, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Assigns the entries to processes, and makes the index. An entry that several have is written once."""
    planner = _SavePlanner()
    together, metadata = planner.create_global_plan(list(plans))
    return FileSystemWriter(folder).prepare_global_plan(together), metadata


def end_with_index(folder: str, metadata: Metadata, written: Sequence[WrittenFiles], algorithm: str) -> None:
    """Writes the index and the digests after all files are written.

    Raises:
        CheckpointError: a file of another process is not in the folder, or the disk is full.
    """
    digests = {name: each for _, part in written for name, each in part.items()}
    missing = sorted(name for name in digests if not (Path(folder) / name).exists())
    if missing:
        raise CheckpointError(
            f"other workers wrote {', '.join(missing)}, which this one does not see in {folder}: a checkpoint needs a "
            "folder on a file system that all workers share"
        )
    with writing(Path(folder)):
        FileSystemWriter(folder).finish(metadata, [results for results, _ in written])
        write_digests(Path(folder), digests | digests_of(Path(folder), [INDEX_NAME], algorithm), algorithm)


class StoredEntries:
    """A checkpoint that this process reads.

    Raises:
        ConfigError: there is no checkpoint.
        CheckpointError: its index cannot be read.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._reader = FileSystemReader(folder)
        if not (Path(folder) / INDEX_NAME).is_file():
            raise ConfigError(f"there is no checkpoint at {folder}: checkpoint.save() writes one")
        with self._explained():
            self._digests = Digests(folder)
            self._digests.compare(INDEX_NAME)  # before it is unpickled
            self._metadata: Metadata = self._reader.read_metadata()

    def restore(self, key: str, value: object) -> object:
        """Restores a value: in place if it has a state; otherwise the result replaces it.

        Raises:
            ConfigError: the checkpoint has other entries, or other shapes.
            CheckpointError: its files are damaged.
        """
        if isinstance(value, Tensor):
            self._read({key: value.detach()})
            return value
        if isinstance(value, nn.Module):
            entries = of_module(key, value)
            self._read(entries)
            value.load_state_dict({name.removeprefix(f"{key}."): entry for name, entry in entries.items()})
            return value
        structure: Entries = {key: None}
        self._read(structure)
        tensors: Entries = {}

        def tensor_of(marker: TensorAt) -> Tensor:
            tensor = tensors[marker.key] = self._empty(marker.key)
            return tensor

        found = tree_map_only(TensorAt, tensor_of, structure[key])
        self._read(tensors)
        if not is_stateful(value):
            return found
        try:
            value.load_state_dict(found)
        except (ValueError, KeyError, TypeError) as exc:
            if isinstance(exc, RpcdistError):
                raise
            raise ConfigError(
                f"what was saved as {key!r} does not fit this {type(value).__name__}: {text_of(exc)}"
            ) from exc
        return value

    def _read(self, entries: Entries) -> None:
        """Fills tensors in place, and replaces other objects. Raises `CheckpointError` if files are damaged."""
        for key, entry in entries.items():
            self._check(key, entry)
        with self._explained():
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            planner.set_up_planner(entries, self._metadata, is_coordinator=False)
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            for item in plan.items:
                stored = self._metadata.storage_data[item.storage_index]
                self._digests.compare(stored.relative_path, stored.offset, stored.length)
            self._reader.read_data(planner.finish_plan(plan), planner).wait()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what pickle, zip files and torch raise for damaged files into one error that names the checkpoint."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as exc:
            why = "it is damaged, was replaced by a newer one meanwhile, or has classes that this process cannot import"
            text = f"the checkpoint at {self._folder} cannot be read ({described_error(exc)[:300]})"
            raise CheckpointError(f"{text}: {own_shortage(exc) or why}") from exc

    def _empty(self, key: str) -> Tensor:
        found = self._metadata.state_dict_metadata.get(key)
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"the checkpoint's structure names a tensor {key!r} that it does not have")
        size = found.size.numel() * found.properties.dtype.itemsize
        stored = sum(info.length for index, info in self._metadata.storage_data.items() if index.fqn == key)
        if size > stored:
            raise CheckpointError(
                f"the index of the checkpoint at {self._folder} says that {key!r} has {size} bytes, of which "
                f"{stored} are stored: it is damaged"
            )
        return torch.empty(found.size, dtype=found.properties.dtype, device="cpu")

    def _check(self, key: str, entry: object) -> None:
        found = self._metadata.state_dict_metadata.get(key)
        if found is None:
            raise ConfigError(self._missing(key))
        shape = tuple(found.size) if isinstance(found, TensorStorageMetadata) else None
        wanted = tuple(entry.shape) if isinstance(entry, Tensor) else None
        if shape != wanted:
            stored, expected = (f"a tensor {size}" if size is not None else "no tensor" for size in (shape, wanted))
            text = f"the entry {key!r} of the checkpoint is {stored}, but the object to load it into has {expected}"
            raise ConfigError(text)

    def _missing(self, key: str) -> str:
        known = sorted(self._metadata.state_dict_metadata)
        if any(name.startswith(f"{key}.") for name in known):
            return f"{key!r} was saved as a module: give a module with the same parameters to be filled"
        shown = ", ".join(known[:NUM_ENTRIES_SHOWN]) + (", ..." if len(known) > NUM_ENTRIES_SHOWN else "")
        return f"the checkpoint has no entry {key!r}; it has {shown or 'none'}"


class _SavePlanner(DefaultSavePlanner):
    """Adds the name of an entry that cannot be written to the error."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        with raised_as(ConfigError, f"{write_item.index.fqn!r} cannot be pickled", Exception):
            return super().transform_object(write_item, object)
