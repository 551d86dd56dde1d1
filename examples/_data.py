"""The data of the examples: scikit-learn's handwritten digits, and the source of Python's standard library."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from _shared import NUM_TRAIN
from torch import Tensor

NUM_IMAGES = 1797
MAX_CHARACTERS = 2_000_000  # of the standard library, which has more
Digits = tuple[Tensor, Tensor]  # images (n, 64) float32 from 0 to 1, labels (n,) int64
WORD = re.compile(r"[A-Za-z]\w+")


def load_digits(seed: int) -> tuple[Digits, Digits]:
    """The digits in random order, as a training set and a test set."""
    from sklearn.datasets import load_digits as load_sklearn_digits  # slow to import, and some processes need none

    digits = load_sklearn_digits()
    order = torch.randperm(NUM_IMAGES, generator=torch.Generator().manual_seed(seed))
    images = torch.as_tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.as_tensor(digits.target, dtype=torch.int64)[order]
    return (images[:NUM_TRAIN], labels[:NUM_TRAIN]), (images[NUM_TRAIN:], labels[NUM_TRAIN:])


def percent_right(scores: Tensor, labels: Tensor) -> float:
    """The percentage of rows of `scores` (n, classes) whose highest score is that of the label (n,)."""
    return 100 * (scores.argmax(dim=1) == labels).double().mean().item()


def library_text() -> str:
    """The beginning of the standard library's source."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.py")))[:MAX_CHARACTERS]


def guessing_loss(numbers: Tensor, size: int) -> float:
    """The loss, in nats, of a model that knows only how frequent each of `size` numbers is."""
    shares = torch.bincount(numbers, minlength=size).double() / len(numbers)
    return float(-torch.special.xlogy(shares, shares).sum())


def library_functions(package: str) -> Iterator[tuple[str, list[str]]]:
    """The name of every function in a package of the standard library, and the words in its source; not of tests."""
    folder = Path(sysconfig.get_paths()["stdlib"]) / package
    for path in sorted(folder.rglob("*.py")):
        if {"test", "tests"} & set(path.parts[len(folder.parts) :]):
            continue
        source = path.read_text(errors="replace")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node.name, WORD.findall("\n".join(lines[node.lineno - 1 : node.end_lineno]))
