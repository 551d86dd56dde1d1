"""The texts of a source file and of a page, for checks of their words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from docs_programs import FENCE


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
