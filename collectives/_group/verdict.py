"""The verdict on an operation that timed out: rank 0 asks all ranks where they are, and decides who is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rpcdist.collectives._group.group_failure import FailureKind, GroupFailure, list_ranks


def timeout_verdict(
    title: str, sequence: int, answers: Mapping[int, tuple[int, str]], world_ranks: tuple[int, ...]
) -> GroupFailure:
    """Names the ranks that did not come to an operation. Pure.

    Args:
        title: the operation that timed out.
        sequence: its number.
        answers: rank to its newest operation and what it does, for the ranks that answered.
        world_ranks: ranks of the members in the world, by rank in the group.
    """
    silent = [rank for rank in range(len(world_ranks)) if rank not in answers]
    late = [rank for rank, (reached, _) in sorted(answers.items()) if reached < sequence]
    details = [f"rank {world_ranks[rank]} {answers[rank][1]}" for rank in late]
    details += [f"rank {world_ranks[rank]} does not answer" for rank in silent]
    missing = tuple(sorted(late + silent))
    if not missing:
        details = [f"rank {world_ranks[rank]} {text}" for rank, (_, text) in sorted(answers.items())]
        reason = f"Timed out waiting in {title}, though all ranks have come to it: {'; '.join(details)}"
        return GroupFailure(FailureKind.TIMEOUT, reason)
    names = list_ranks([world_ranks[rank] for rank in missing])
    reason = f"Timed out waiting in {title}; {names} did not arrive: {'; '.join(details)}"
    return GroupFailure(FailureKind.TIMEOUT, reason, missing)


def monitored_text(rank: int, missing: Sequence[int], limit_s: float, wait_all_ranks: bool) -> str:
    """The text of torch about a monitored barrier that failed, on one rank."""
    limit_ms = round(limit_s * 1000)
    if rank != 0:
        return (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            "rank 0. Please check rank 0 logs for faulty rank."
        )
    late = [str(other) for other in sorted(missing) if other != 0]
    if not late:
        return f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {limit_ms} ms."
    who = f"Ranks {', '.join(late)}" if wait_all_ranks else f"Rank {late[0]}"
    return f"[Rank 0]: {who} failed to pass monitoredBarrier in {limit_ms} ms."
