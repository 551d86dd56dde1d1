"""The data of the examples: scikit-learn's handwritten digits, and the source of Python's standard library."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from _shared import NUM_TRAIN
from torch import Tensor, nn

NUM_IMAGES = 1797
MAX_CHARACTERS = 2_000_000  # of the standard library, which has more
Digits = tuple[Tensor, Tensor]  # images (n, 64) float32 from 0 to 1, labels (n,) int64
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # other characters are read as "?"
NAME = re.compile(r"[A-Za-z]\w+")
WORD = re.compile(r"\n *|\w+|[^\w\s]")  # a word, a sign, or a new line with its indentation
# Some systems leave a few of them out.
PACKAGES = (
    "asyncio",
    "email",
    "encodings",
    "http",
    "importlib",
    "json",
    "logging",
    "multiprocessing",
    "unittest",
    "xml",
)


def load_digits(seed: int) -> tuple[Digits, Digits]:
    """The digits in random order, as a training set and a test set."""
    from sklearn.datasets import load_digits as load_sklearn_digits  # slow to import, and some processes need none

    digits = load_sklearn_digits()
    order = torch.randperm(NUM_IMAGES, generator=torch.Generator().manual_seed(seed))
    images = torch.as_tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.as_tensor(digits.target, dtype=torch.int64)[order]
    return (images[:NUM_TRAIN], labels[:NUM_TRAIN]), (images[NUM_TRAIN:], labels[NUM_TRAIN:])


def new_classifier(seed: int) -> nn.Module:
    """A small network for the digits; the same on every process."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def percent_right(scores: Tensor, labels: Tensor) -> float:
    """The percentage of rows of `scores` (n, classes) whose highest score is that of the label (n,)."""
    return 100 * (scores.argmax(dim=1) == labels).double().mean().item()


def library_text() -> str:
    """The beginning of the standard library's source."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.py")))[:MAX_CHARACTERS]


def numbers_of_characters(text: str) -> Tensor:
    """Positions in `ALPHABET`, (number of characters) int64."""
    number_of = {character: number for number, character in enumerate(ALPHABET)}
    return torch.tensor([number_of.get(character, number_of["?"]) for character in text])


def split_text(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The first 19/20 are the training set, the others the validation set."""
    split = len(numbers) * 19 // 20
    return numbers[:split], numbers[split:]


@dataclass(frozen=True)
class Words:
    """The standard library as numbers of words."""

    train: Tensor  # (number of words) int64
    test: Tensor


def library_words(num_words: int) -> Words:
    words = WORD.findall(library_text())
    frequent = Counter(words).most_common(num_words - 1)
    number_of = {word: number for number, (word, _) in enumerate(frequent, start=1)}  # 0 stands for all others
    return Words(*split_text(torch.tensor([number_of.get(word, 0) for word in words])))


def guessing_loss(numbers: Tensor, size: int) -> float:
    """The loss, in nats, of a model that knows only how frequent each of `size` numbers is."""
    shares = torch.bincount(numbers, minlength=size).double() / len(numbers)
    return float(-torch.special.xlogy(shares, shares).sum())


@dataclass(frozen=True)
class Functions:
    """Functions of the standard library as bags of words: those of all functions, and where each bag begins."""

    words: Tensor  # (number of words) int64
    starts: Tensor  # (number of functions) int64
    labels: Tensor  # (number of functions) int64: the package

    def __len__(self) -> int:
        return len(self.labels)

    def pick(self, chosen: Tensor) -> Functions:
        """The chosen functions, in this order."""
        ends = torch.cat([self.starts[1:], torch.tensor([len(self.words)])])
        return make_functions([self.words[self.starts[each] : ends[each]] for each in chosen], self.labels[chosen])


def make_functions(bags: list[Tensor], labels: Tensor) -> Functions:
    lengths = torch.tensor([len(bag) for bag in bags])
    return Functions(torch.cat(bags), lengths.cumsum(0) - lengths, labels)


@dataclass(frozen=True)
class Library:
    """Which package of the standard library each function comes from."""

    packages: list[str]
    names: list[str]  # of the test functions
    train: Functions
    test: Functions


def load_functions(num_words: int, seed: int) -> Library:
    """The functions of the standard library; one eighth of them is the test set."""
    functions = {package: those for package in PACKAGES if (those := list(library_functions(package)))}
    packages = list(functions)
    found = [(name, words, label) for label, package in enumerate(packages) for name, words in functions[package]]
    frequent = Counter(word for _, words, _ in found for word in words).most_common(num_words)
    number_of = {word: number for number, (word, _) in enumerate(frequent)}
    bags = [torch.tensor([number_of[word] for word in words if word in number_of] or [0]) for _, words, _ in found]
    everything = make_functions(bags, torch.tensor([label for _, _, label in found]))
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(order) // 8], order[len(order) // 8 :]
    return Library(packages, [found[int(number)][0] for number in test], everything.pick(train), everything.pick(test))


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
                yield node.name, NAME.findall("\n".join(lines[node.lineno - 1 : node.end_lineno]))
