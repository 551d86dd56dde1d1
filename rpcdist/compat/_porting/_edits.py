"""Changes of a text at places that a syntax tree names; what is between them stays as it is."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class _Edit:
    start: int
    end: int
    text: str


class Text:
    """The source of a module, and what is to be changed in it.

    Positions are indices of characters in the source.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._lines = source.encode().split(b"\n")
        starts = [0]
        for line in source.split("\n"):
            starts.append(starts[-1] + len(line) + 1)
        self._line_starts = starts
        self._edits: list[_Edit] = []

    def start_of(self, node: ast.expr | ast.stmt | ast.alias) -> int:
        """Where a node starts."""
        return self._position(node.lineno, node.col_offset)

    def end_of(self, node: ast.expr | ast.stmt | ast.alias) -> int:
        """Where a node ends."""
        assert node.end_lineno is not None and node.end_col_offset is not None, "ast.parse sets both"
        return self._position(node.end_lineno, node.end_col_offset)

    def replace(self, start: int, end: int, text: str) -> None:
        """Puts `text` in the place of what is from `start` to `end`; the changes of one text must not overlap."""
        self._edits.append(_Edit(start, end, text))

    def add_after(self, statement: ast.stmt, lines: list[str]) -> None:
        """Adds statements after one: on lines of their own with its indentation, or else on its line."""
        start, end = self.start_of(statement), self.end_of(statement)
        line_start = self._line_starts[statement.lineno - 1]
        indentation = self.source[line_start:start]
        rest = re.compile(r"[ \t\f]*(#[^\r\n]*)?(?=\r?\n|\Z)").match(self.source, end)
        if indentation.strip() or rest is None:
            self.replace(end, end, "".join(f"; {line}" for line in lines))
            return
        end_of_line = "\r\n" if self.source.startswith("\r\n", rest.end()) else "\n"
        self.replace(rest.end(), rest.end(), "".join(f"{end_of_line}{indentation}{line}" for line in lines))

    def remove_from_import(self, statement: ast.ImportFrom, gone: list[ast.alias]) -> dict[ast.alias, str]:
        """Takes names out of a `from` import, of which at least one name stays.

        Returns:
            For each of the names the comment that stood on its line, if it had the line for itself.
        """
        kept = [alias for alias in statement.names if alias not in gone]
        comments = {}
        for alias in gone:
            start, end = self.start_of(alias), self.end_of(alias)
            after = re.compile(r"\s*,[ \t]*").match(self.source, end)
            end = after.end() if after is not None else end
            line_start = self._line_starts[alias.lineno - 1]
            rest = re.compile(r"[ \t]*(#[^\n\r]*)?\r?\n").match(self.source, end)
            if rest is not None and not self.source[line_start:start].strip():
                comments[alias] = (rest[1] or "").strip()
                start, end = line_start, rest.end()
            self.replace(start, end, "")
        # After the last name that stays there may be a comma that belonged to one that is gone.
        after_kept = re.compile(r"\s*,\s*").match(self.source, self.end_of(kept[-1]))
        if statement.names[-1] in gone and after_kept is not None and not self._has_parentheses(statement):
            self.replace(self.end_of(kept[-1]), after_kept.end(), "")
        return comments

    def changed(self) -> str:
        """The text with all changes."""
        parts, position = [], 0
        for edit in sorted(self._edits, key=lambda edit: (edit.start, edit.end)):
            parts += [self.source[position : edit.start], edit.text]
            position = max(position, edit.end)
        return "".join([*parts, self.source[position:]])

    def _has_parentheses(self, statement: ast.ImportFrom) -> bool:
        return self.source[self.end_of(statement) - 1] == ")"

    def _position(self, line: int, column_bytes: int) -> int:
        return self._line_starts[line - 1] + len(self._lines[line - 1][:column_bytes].decode())
