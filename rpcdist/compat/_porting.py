"""Replaces torch's names in a program by ours where possible; the text between the names stays as it is."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass

from rpcdist.compat._names_in_programs import Import, Meaning, Scope, Use, meaning_of, read_uses


class Text:
    """The source of a module, and the changes to make in it.

    Positions are indices of characters in the source.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._lines = source.encode().split(b"\n")
        starts = [0]
        for line in source.split("\n"):
            starts.append(starts[-1] + len(line) + 1)
        self._line_starts = starts
        self._edits: list[tuple[int, int, str]] = []  # start, end, and the new text

    def start_of(self, node: ast.expr | ast.stmt | ast.alias) -> int:
        """The position of a node's start."""
        return self._position(node.lineno, node.col_offset)

    def end_of(self, node: ast.expr | ast.stmt | ast.alias) -> int:
        """The position of a node's end."""
        assert node.end_lineno is not None and node.end_col_offset is not None, "ast.parse sets both"
        return self._position(node.end_lineno, node.end_col_offset)

    def replace(self, start: int, end: int, text: str) -> None:
        """Replaces the text from `start` to `end` by `text`; the changes of one text must not overlap."""
        self._edits.append((start, end, text))

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
        """Removes names from a `from` import, in which at least one name stays.

        Returns:
            For each removed name that had its own line, the comment on that line.
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
        # After the last remaining name there may be a comma that belonged to a removed one.
        after_kept = re.compile(r"\s*,\s*").match(self.source, self.end_of(kept[-1]))
        has_parentheses = self.source[self.end_of(statement) - 1] == ")"
        if statement.names[-1] in gone and after_kept is not None and not has_parentheses:
            self.replace(self.end_of(kept[-1]), after_kept.end(), "")
        return comments

    def changed(self) -> str:
        """The text with all changes."""
        parts, position = [], 0
        for start, end, text in sorted(self._edits, key=lambda edit: edit[:2]):
            parts += [self.source[position:start], text]
            position = max(position, end)
        return "".join([*parts, self.source[position:]])

    def _position(self, line: int, column_bytes: int) -> int:
        return self._line_starts[line - 1] + len(self._lines[line - 1][:column_bytes].decode())


@dataclass(frozen=True, order=True)
class Left:
    """A change to make by hand: the line in the original text, the name there, and advice."""

    line: int
    name: str
    advice: str


@dataclass(frozen=True)
class Result:
    """The new text of a program, and the changes left to make by hand; `changes` counts the changed places."""

    text: str
    left: list[Left]
    changes: int


def port(source: str) -> Result:
    """Changes imports of `torch.distributed`, its submodules, DDP, `SyncBatchNorm` and the sampler to ours, and full
    names of these. Everything else stays as it is.

    Raises:
        SyntaxError: `source` is not valid Python.
    """
    return _Porting(source).run()


class _Porting:
    def __init__(self, source: str) -> None:
        self._text = Text(source)
        self._tree = ast.parse(source)
        self._left: set[Left] = set()
        self._changes = 0
        self._added: defaultdict[ast.stmt, list[str]] = defaultdict(list)
        self._imported: defaultdict[Scope, set[str]] = defaultdict(set)
        """By scope, the modules that the new text imports under their full names."""

    def run(self) -> Result:
        imports, uses = read_uses(self._tree)
        by_statement: dict[ast.Import | ast.ImportFrom, list[Import]] = {}
        for bound in imports:
            by_statement.setdefault(bound.statement, []).append(bound)
        statements = [node for node in ast.walk(self._tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        for statement in sorted(statements, key=lambda node: (node.lineno, node.col_offset)):
            if statement in by_statement:
                self._change_import(statement, by_statement[statement])
        kept = [use for use in uses if not self._change_use(use)]
        for bound in imports:
            self._keep_torch(bound, imports, kept)
        for node in ast.walk(self._tree):
            self._look_at_string(node)
        for place, lines in self._added.items():
            self._text.add_after(place, lines)
        changed = self._text.changed()
        ast.parse(changed)
        return Result(changed, sorted(self._left), self._changes)

    def _change_import(self, statement: ast.Import | ast.ImportFrom, imports: list[Import]) -> None:
        if isinstance(statement, ast.ImportFrom):
            self._change_from_import(statement, imports[0].scope)
            return
        for bound in imports:
            alias = bound.alias
            meaning = self._meaning(alias.name, alias)
            if alias.asname is None:
                self._imported[bound.scope].add(meaning.ours or alias.name)
            if meaning.ours is not None:
                start = self._text.start_of(alias)
                self._replace(alias, start, start + len(alias.name), alias.name, meaning.ours)

    def _change_from_import(self, statement: ast.ImportFrom, scope: Scope) -> None:
        module = statement.module or ""
        if statement.names[0].name == "*":
            self._change_star_import(statement, module)
            return
        targets = {alias: self._target(module, alias) for alias in statement.names}
        stays = targets[statement.names[0]][0]
        others = [alias for alias in statement.names if targets[alias][0] != stays]
        if stays != module and not self._replace_module(statement, module, stays):
            return
        for alias in statement.names:
            new_name = targets[alias][1]
            if alias not in others and new_name != alias.name:
                new_text = new_name if alias.asname else f"{new_name} as {alias.name}"
                start = self._text.start_of(alias)
                self._replace(alias, start, start + len(alias.name), alias.name, new_text)
        if not others:
            return
        comments = self._text.remove_from_import(statement, others)
        self._changes += len(others)
        by_module: defaultdict[str, list[ast.alias]] = defaultdict(list)
        for alias in others:
            by_module[targets[alias][0]].append(alias)
        for new_module, aliases in by_module.items():
            renamed = [(targets[alias][1], alias.asname or alias.name) for alias in aliases]
            names = [name if name == local else f"{name} as {local}" for name, local in renamed]
            said = "  ".join(filter(None, (comments.get(alias, "") for alias in aliases)))
            line = f"from {new_module} import {', '.join(names)}"
            self._added[statement].append(f"{line}  {said}" if said else line)

    def _target(self, module: str, alias: ast.alias) -> tuple[str, str]:
        ours = self._meaning(f"{module}.{alias.name}", alias).ours
        if ours is None:
            return module, alias.name
        new_module, _, new_name = ours.rpartition(".")
        return new_module, new_name

    def _change_star_import(self, statement: ast.ImportFrom, module: str) -> None:
        ours = self._meaning(module, statement).ours
        if ours is not None and self._replace_module(statement, module, ours):
            self._leave(statement, f"from {module} import *", f"now imports the public names of {ours}; compare them")

    def _replace_module(self, statement: ast.ImportFrom, module: str, ours: str) -> bool:
        start = self._text.start_of(statement)
        found = re.compile(rf"from[\s\\]+({re.escape(module)})\b").match(self._text.source, start)
        if found is None:
            self._leave(statement, module, "is written with spaces in it: write it without, and port again")
            return False
        self._text.replace(*found.span(1), ours)
        self._changes += 1
        return True

    def _change_use(self, use: Use) -> bool:
        """Changes a name with its attributes if a changed import is not enough; returns whether it changed anything."""
        binding = use.binding
        meaning = meaning_of(use.means)
        new_binding = meaning_of(binding.means).ours
        rest = use.means.removeprefix(binding.means)
        if meaning.ours is None:
            if rest and meaning.advice is not None:
                self._leave(use.node, use.written, meaning.advice)
            elif rest and new_binding is not None:
                self._leave(use.node, use.written, f"stays torch's: write {use.means}, and import it")
            return False
        if meaning.ours == f"{new_binding or binding.means}{rest}":
            return False
        within = new_binding is not None and meaning.ours.startswith(f"{new_binding}.")
        new = binding.local + meaning.ours.removeprefix(new_binding or "") if within else meaning.ours
        if not self._replace(use.node, self._text.start_of(use.node), self._text.end_of(use.node), use.written, new):
            return False
        if not within and meaning.module not in self._imported[binding.scope]:
            self._imported[binding.scope].add(meaning.module)
            self._added[binding.statement].append(f"import {meaning.module}")
        return True

    def _keep_torch(self, bound: Import, imports: list[Import], kept: list[Use]) -> None:
        """Imports torch itself if only `import torch.distributed` did so, and the program uses more of torch."""
        ported = isinstance(bound.statement, ast.Import) and meaning_of(bound.alias.name).ours is not None
        if not ported or bound.local != "torch" or bound.alias.asname is not None:
            return
        everywhere = self._imported[bound.scope] | self._imported[imports[0].scope]
        if any(name.split(".")[0] == "torch" for name in everywhere):
            return
        if any(use.binding.local == "torch" and use.binding.means == "torch" for use in kept):
            self._imported[bound.scope].add("torch")
            self._added[bound.statement].append("import torch")

    def _look_at_string(self, node: ast.AST) -> None:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            return
        if not re.fullmatch(r"torch\.distributed(\.\w+)*", node.value):
            return
        ours = meaning_of(node.value).ours
        advice = "" if ours is None else f"; ours is {ours}"
        self._leave(node, f'"{node.value}"', f"is a string, and stays as it is{advice}")

    def _replace(self, node: ast.expr | ast.alias, start: int, end: int, expected: str, new: str) -> bool:
        # Inside f-strings, Python 3.11 reports positions that differ from those in the text.
        if self._text.source[start:end] != expected:
            self._leave(node, expected, f"write {new}")
            return False
        self._text.replace(start, end, new)
        self._changes += 1
        return True

    def _meaning(self, name: str, node: ast.alias | ast.stmt) -> Meaning:
        meaning = meaning_of(name)
        if meaning.advice is not None:
            self._leave(node, name, meaning.advice)
        return meaning

    def _leave(self, node: ast.expr | ast.stmt | ast.alias, name: str, advice: str) -> None:
        self._left.add(Left(node.lineno, name, advice))
