"""Docstrings, comments, error texts and pages are plain technical English: each sentence has a noun as its subject.

The rules are those that a search can hold. A file that keeps them leaves `not_yet_plain_english.txt`,
and cannot come back.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import house_size
import pytest
from docs_programs import FENCE, ROOT

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


def texts_of_source(path: Path) -> Iterator[str]:
    """Docstrings, comments (those of adjacent lines are one text), and strings in which there is a space."""
    source = path.read_text()
    comment: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment.append(token.string.lstrip("#:").strip())
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT) and comment:
            yield " ".join(comment)
            comment = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "X"
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def texts_of_page(path: Path) -> Iterator[str]:
    """Paragraphs, list entries and cells of tables, without code and headings."""
    text = re.sub(r"`[^`\n]+`", "`X`", FENCE.sub("", path.read_text()))
    for line in re.split(r"\n(?=\s*[-*|>] |\s*\d+\. )|\n\n", text):
        if not line.startswith(("#", "    ")):
            yield from re.sub(r"^\s*(?:[-*>] |\d+\. )", "", line).split("|")


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
