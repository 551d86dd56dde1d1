"""Checkpoints whose files are damaged on the disk, or lie: nothing of them is loaded as if it were whole."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from full_sets import num_examples
from torch.distributed import checkpoint as torch_checkpoint

from rpcdist import checkpoint
from rpcdist.checkpoint import _storage
from rpcdist.checkpoint._storage import DIGESTS_NAME, INDEX_NAME, Digests, digests_of, write_digests
from rpcdist.errors import CheckpointError, ConfigError

STATE: dict[str, Any] = {"a": torch.arange(3000.0), "b": torch.full((30, 30), 2.0), "step": 5, "text": "hello"}


def saved(path: Path, **options: Any) -> Path:
    checkpoint.save(path, STATE, **options)
    return path.resolve()


def loaded(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = {"a": torch.zeros(3000) - 1, "b": torch.zeros(30, 30) - 1, "step": -1, "text": ""}
    checkpoint.load(path, state)
    return state


def spoil(data: bytes, how: str, at: int) -> bytes:
    if how == "a bit":
        return data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
    if how == "zeros":
        return data[:at] + bytes(len(data[at : at + 64])) + data[at + 64 :]
    return data[:at]


@pytest.mark.parametrize("options", [{}, {"digest": "sha256"}], ids=["xxh3", "sha256"])
def test_no_damage_is_read_as_other_values(tmp_path: Path, options: dict[str, str]) -> None:
    folder = saved(tmp_path / "checkpoint", **options)
    files = {file: file.read_bytes() for file in sorted(folder.iterdir())}
    assert {DIGESTS_NAME, INDEX_NAME} < {file.name for file in files}
    drawn = random.Random(7)
    for _ in range(num_examples(40, 400)):
        file, how = drawn.choice(list(files)), drawn.choice(["a bit", "zeros", "cut short"])
        damaged = spoil(files[file], how, drawn.randrange(len(files[file])))
        if damaged == files[file]:
            continue
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"damaged|cannot be read"):
            loaded(tmp_path / "checkpoint")
        file.write_bytes(files[file])
    assert all(torch.equal(loaded(tmp_path / "checkpoint")[key], STATE[key]) for key in "ab")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint")
    [data] = folder.glob("*.distcp")
    data.unlink()
    with pytest.raises(CheckpointError, match=rf"{data.name} of a checkpoint cannot be read: No such file"):
        loaded(tmp_path / "checkpoint")


def test_a_partial_load_reads_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_storage, "CHUNK_BYTES", 1024)
    folder = saved(tmp_path / "checkpoint")
    read: list[int] = []
    chunks = _storage._chunks

    def counting(path: Path, numbers: Any) -> Any:
        for number, chunk in chunks(path, numbers):
            if path.suffix == ".distcp":
                read.append(len(chunk))
            yield number, chunk

    monkeypatch.setattr(_storage, "_chunks", counting)
    small: dict[str, Any] = {"b": torch.zeros(30, 30)}
    checkpoint.load(tmp_path / "checkpoint", small)
    assert torch.equal(small["b"], STATE["b"])
    assert small["b"].nbytes <= sum(read) < STATE["a"].nbytes
    [data] = folder.glob("*.distcp")
    assert sum(read) < data.stat().st_size


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_it_and_what_torch_wrote_is_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint")
    state = {"a": torch.zeros(3000), "b": torch.zeros(30, 30)}
    torch_checkpoint.load(state, checkpoint_id=str(folder), no_dist=True)
    assert torch.equal(state["a"], STATE["a"])
    torch_checkpoint.save({"a": STATE["a"]}, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    ours: dict[str, object] = {"a": torch.zeros(3000)}
    checkpoint.load(tmp_path / "theirs", ours)
    assert torch.equal(ours["a"], STATE["a"])  # type: ignore[arg-type]


def test_an_index_that_lies_about_a_size_is_named(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "checkpoint", {"nested": {"big": torch.ones(3)}})
    folder = (tmp_path / "checkpoint").resolve()
    metadata = pickle.loads((folder / INDEX_NAME).read_bytes())
    [key] = [key for key in metadata.state_dict_metadata if "big" in key]
    metadata.state_dict_metadata[key].size = torch.Size([1 << 50])
    (folder / INDEX_NAME).write_bytes(pickle.dumps(metadata))
    names = [file.name for file in folder.iterdir() if file.name != DIGESTS_NAME]
    write_digests(folder, digests_of(folder, names, "xxh3"), "xxh3")  # by somebody who can write the folder
    with pytest.raises(CheckpointError, match=r"says that .* has 4503599627370496 bytes, of which"):
        checkpoint.load(tmp_path / "checkpoint", {"nested": None})


def test_a_digest_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'xxh3' or 'sha256', not 'md5'"):
        saved(tmp_path / "checkpoint", digest="md5")
    assert not list(tmp_path.iterdir())
    folder = tmp_path / "empty"
    folder.mkdir()
    Digests(str(folder)).compare("anything")  # without digests nothing is compared


def rewritten(folder: Path, change: Callable[[Any], object], has_digests: bool) -> None:
    """The index as somebody has changed it who can write the folder."""
    index = pickle.loads((folder / INDEX_NAME).read_bytes())
    changed = change(index)
    (folder / INDEX_NAME).write_bytes(pickle.dumps(index if changed is None else changed))
    (folder / DIGESTS_NAME).unlink()
    if has_digests:
        write_digests(folder, digests_of(folder, [file.name for file in folder.iterdir()], "xxh3"), "xxh3")


def stored_elsewhere(**where: Any) -> Callable[[Any], object]:
    def change(index: Any) -> None:
        for key, stored in index.storage_data.items():
            index.storage_data[key] = replace(stored, **where)

    return change


CHANGES: dict[str, Callable[[Any], object]] = {
    "before the file": stored_elsewhere(offset=-5),
    "behind the file": stored_elsewhere(offset=1 << 62),
    "less than nothing": stored_elsewhere(length=-5),
    "a fraction": stored_elsewhere(offset=1.5),
    "another folder": stored_elsewhere(relative_path="../other.distcp"),
    "a file without end": stored_elsewhere(relative_path="/dev/zero"),
    "no name": stored_elsewhere(relative_path=5),
    "nowhere": lambda index: index.storage_data.clear(),
    "no index": lambda index: [1],
}


@pytest.mark.parametrize("has_digests", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_index_that_says_what_cannot_be_is_named(
    tmp_path: Path, change: Callable[[Any], object], has_digests: bool
) -> None:
    folder = saved(tmp_path / "checkpoint")
    [data] = folder.glob("*.distcp")
    (tmp_path / "other.distcp").write_bytes(data.read_bytes())
    rewritten(folder, change, has_digests)
    with pytest.raises(CheckpointError, match=r"damaged|cannot be read"):
        loaded(tmp_path / "checkpoint")


def no_file(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("has_digests", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_not_read(tmp_path: Path, kind: str, has_digests: bool) -> None:
    """A pipe was waited for without end, and a device filled the memory."""
    for pattern in ("*.distcp", DIGESTS_NAME):
        folder = saved(tmp_path / "checkpoint")
        if not has_digests:
            (folder / DIGESTS_NAME).unlink()
            pattern = "*.distcp"
        [path] = folder.glob(pattern)
        no_file(path, kind)
        with pytest.raises(CheckpointError, match=r"damaged|cannot be read"):
            loaded(tmp_path / "checkpoint")


@pytest.mark.parametrize("digests", [7, [], ["x", "0"], ["9" * 5000, "0"], ["50"]])
def test_digests_that_are_none_are_named(tmp_path: Path, digests: object) -> None:
    folder = saved(tmp_path / "checkpoint")
    names = [file.name for file in folder.iterdir() if file.name != DIGESTS_NAME]
    forged: Any = dict.fromkeys(names, digests)
    write_digests(folder, forged, "xxh3")
    with pytest.raises(CheckpointError, match=r"damaged|cannot be read"):
        loaded(tmp_path / "checkpoint")
