"""Docstrings, comments, error texts and pages are plain technical English: each sentence has a noun as its subject.

The rules are those that a search can hold. A file that keeps them leaves `not_yet_plain_english.txt`,
and cannot come back.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import house_size
import pytest
from docs_programs import ROOT
from prose import texts_of_page, texts_of_source

CLAUSE = "Write a noun as the subject: not `who waits reads`, but `the thread that waits reads`."
RULES = {
    r"\b(?:is|are|was|were) (?:not )?to be\b": "Write `must be`, `should be` or the imperative.",
    r"\banew\b": "Write `again`.",
    r"\bbesides\b": "Write `also`, or `apart from`.",
    r"\bbut for\b": "Write `except`.",
    r"\bmend(?:s|ed|ing)?\b": "Write `fix` or `repair`.",
    r"\b[Ww]hoever\b": CLAUSE,
    r"(?:^|(?<=[.!?] ))(?:Who|What|Whatever)\b(?![^.!?]*\?)": CLAUSE,
    r"(?<=[;:] )(?:who|whatever)\b(?![^.!?]*\?)": CLAUSE,
    r"(?<=; )what\b(?![^.!?]*\?)": CLAUSE,
}

NOT_YET = set((Path(__file__).parent / "not_yet_plain_english.txt").read_text().split())
"""Files that break a rule so far. Rewrite one and remove its line."""


def findings(text: str) -> Iterator[str]:
    """What breaks a rule, with its surroundings and the advice."""
    for paragraph in re.split(r"\n\s*\n", text):
        flat = " ".join(paragraph.split())
        for rule, advice in RULES.items():
            for match in re.finditer(rule, flat):
                yield f"...{flat[max(0, match.start() - 30) : match.end() + 40]}... {advice}"


def files() -> Iterator[Path]:
    yield from house_size.sources()
    for folder in ("tests", "tools", "benchmarks", "examples"):
        yield from (path for path in (ROOT / folder).rglob("*.py") if path != Path(__file__))  # has bad examples
    yield ROOT / "README.md"
    yield from (ROOT / "docs").glob("*.md")


FILES = {str(path.relative_to(ROOT)): path for path in sorted(files())}


@functools.cache
def found_in(path: Path) -> list[str]:
    texts = texts_of_page(path) if path.suffix == ".md" else texts_of_source(path)
    return sorted({finding for text in texts for finding in findings(text)})


def test_texts_keep_the_rules() -> None:
    broken = {name: found for name, path in FILES.items() if name not in NOT_YET and (found := found_in(path))}
    assert not broken, "\n".join(f"{name}: {finding}" for name, found in broken.items() for finding in found)


def test_the_list_only_shrinks() -> None:
    clean = sorted(name for name in NOT_YET if name not in FILES or not found_in(FILES[name]))
    assert not clean, f"these keep the rules, or are gone: remove their lines from not_yet_plain_english.txt: {clean}"


@pytest.mark.parametrize(
    "text",
    [
        "Whoever waits for it leads.",
        "A rule. Who waits reads.",
        "What nobody waits for is moved.",
        "A message; what is left of it waits.",
        "All are gone but for one.",
        "Nothing is to be set.",
        "The next call tries\nanew.",
    ],
)
def test_what_is_found(text: str) -> None:
    assert list(findings(text))


@pytest.mark.parametrize(
    "text",
    [
        "What time is it?",
        "The thread that waits reads.",
        "Says what is missing.",
        "It recommends a fix.",
        "path: what it is",
    ],
)
def test_what_is_not_found(text: str) -> None:
    assert not list(findings(text))
