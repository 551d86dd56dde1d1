"""Random programs give the gradients of one process with the joined batch, or an error on every rank, nothing else."""

from __future__ import annotations

from collections import Counter

import gradient_program_ranks
import gradient_programs
import pytest
from full_sets import FULL, num_examples

from rpcdist.testing import RankPool

NUM_CHUNKS = 4


def verdict(problem: str | None) -> str:
    if not problem:
        return "right" if problem == "" else "not tried"
    return "refused" if problem.startswith("refused in step ") else "wrong"


@pytest.mark.multiproc
@pytest.mark.timeout(960 if FULL else 120)
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_gradients_are_those_of_one_process(rank_pool: RankPool, chunk: int) -> None:
    """Also, what torch's class gets right is right here, with None where it has None, and no error.

    A program that ends its iterations itself, as it should, is right where one that does not is right.
    """
    count, with_torch = num_examples(100, 2000) // NUM_CHUNKS, num_examples(6, 100)
    size = 3 if chunk == NUM_CHUNKS - 1 else 2
    seeds = range(chunk * count, (chunk + 1) * count)
    by_rank = rank_pool.run(
        size,
        gradient_program_ranks.try_programs,
        rank_pool.new_file(),
        seeds,
        with_torch,
        limit_s=900 if FULL else 100,
    )
    seen: Counter[str] = Counter()
    for results in zip(*by_rank, strict=True):
        (seed,) = {seed for seed, _, _ in results}
        ours, theirs = ({verdict(result[which]) for result in results} for which in (1, 2))
        shown = gradient_programs.draw(seed, size), [problem for _, problem, _ in results]
        assert ours in ({"right"}, {"refused"}), shown
        assert ours == {"right"} or theirs != {"right"}, shown
        seen[ours.pop()] += 1
    assert seen["right"] > count / 2


def test_programs_are_drawn_alike_on_all_ranks() -> None:
    programs = [gradient_programs.draw(seed, 2) for seed in range(200)]
    assert programs == [gradient_programs.draw(seed, 2) for seed in range(200)]
    drawn = {batch.recipe for program in programs for step in program.steps for batch in step}
    assert drawn == set(gradient_programs.RECIPES)
    assert {program.ends for program in programs} == set(gradient_programs.ENDS)
