"""The program in docs/collectives.md does what the page says; its two ranks are threads."""

from __future__ import annotations

from collectives_ranks import run_ranks
from docs_programs import page, program_of

PAGE = "docs/collectives.md"


def test_the_guide_to_collectives_runs() -> None:
    definitions, statements = program_of(page(PAGE))
    assert statements.count("check(") >= 12

    def on_rank(rank: int) -> None:
        def check(value: object, expected: str, line: int) -> None:
            assert repr(value) == expected, f"{PAGE}:{line} says {expected}, but it is {value!r}"

        names: dict[str, object] = {"check": check}
        exec(compile(definitions, PAGE, "exec"), names)
        exec(compile(statements, PAGE, "exec"), names)

    run_ranks(2, on_rank, backend="tcp")
