"""$ python benchmarks/scale.py
Starts many workers on one machine, and lets all of them call all others; shows times, connections and memory. With
`--agents 1000` many workers in one process join and meet, with `--live-view 100` somebody watches their page, and with
`--group 32` ranks make the default group, in turns with torch's Gloo.

The processes are forked from one that has imported torch, so the start is that of the world and not torch's.
"""

from __future__ import annotations

import argparse
import os
import sys
from statistics import median

from _group_setup import OURS, TORCH, measure_groups, typical
from _live_view import measure_live_view
from _report import RESULTS, Line, about_machine, layout, show, write_results
from _scale import Scale, measure_agents, measure_scale

from rpcdist.testing import WorkerPool

HEAD: Line = ("what", "unit", "measured", "budget", "ok")
START_LIMIT_S = 20.0


def lines_of(scale: Scale) -> list[Line]:
    """The table."""
    num_workers = len(scale.joined)

    def line(what: str, unit: str, value: float, limit: float | None = None) -> Line:
        verdict = "" if limit is None else "yes" if value <= limit else "NO"
        return what, unit, show(value), "" if limit is None else f"at most {limit:g} {unit}".rstrip(), verdict

    def typical(states: str, attribute: str, scale_by: float = 1) -> float:
        return float(median(getattr(state, attribute) for state in getattr(scale, states))) * scale_by

    return [
        line(f"start of {num_workers} workers", "s", scale.start_s, START_LIMIT_S),
        line("connections that a worker has opened when all have joined, most", "", max(
            state.num_opened for state in scale.joined[1:]), 1),
        line("the same, the coordinator, which watches the others", "", scale.joined[0].num_opened, num_workers - 1),
        line("first call of all to all", "s", scale.first_s),
        line("connections that a worker has opened then, most", "", max(
            state.num_opened for state in scale.called), num_workers - 1),
        line("second call of all to all", "s", scale.second_s),
        line("shutdown", "s", scale.shutdown_s),
        *(
            row
            for when, states in (("when all have joined", "joined"), ("after the calls", "called"))
            for row in (
                line(f"threads of a worker {when}", "", typical(states, "num_threads")),
                line(f"descriptors of a worker {when}", "", typical(states, "num_descriptors")),
                line(f"private memory of a worker {when}", "MiB", typical(states, "private_bytes", 2**-20)),
            )
        ),
    ]  # fmt: skip


def lines_of_agents(num_agents: int, elastic: bool) -> list[Line]:
    """Processor time of agents in this process; the budgets are those of 1,000. A barrier of all would take 10 times as
    much as one of a tenth if each agent took the same."""
    times = measure_agents(num_agents, elastic)
    kind = f"{num_agents} agents, {'elastic' if elastic else 'static'}"
    ratio = times.barrier_s / max(times.barrier_of_a_tenth_s, 1e-9)
    rows = [
        ("join, one after the other" if elastic else "join", "s", times.join_s, 15.0 if elastic else 6.0),
        ("barrier of all, against one of a tenth", "x", ratio, 12.0),
        ("shutdown", "s", times.shutdown_s, 6.0),
    ]
    return [
        (f"{kind}: {what}", unit, show(value), f"at most {limit:g} {unit}", "yes" if value <= limit else "NO")
        for what, unit, value, limit in rows
    ]


def lines_of_live_view(num_agents: int) -> list[Line]:
    """The costs of the page of a job for agents in this process, while somebody looks; the budgets are those of 100."""
    found = measure_live_view(num_agents)
    rows: list[tuple[str, str, float, float | None]] = [
        ("a change of a worker is on the page after, 9 of 10", "s", found.late_s, 1.0),
        ("the same, the longest", "s", found.latest_s, None),
        ("answers of the coordinator, of a core", "%", found.coordinator * 100, 5.0),
        ("answers of all workers, of a core", "%", found.all_workers * 100, None),
        ("the page itself, and idle workers, of a core", "%", found.page * 100, None),
    ]
    lines: list[Line] = []
    for what, unit, value, limit in rows:
        budget = ("", "") if limit is None else (f"at most {limit:g} {unit}", "yes" if value <= limit else "NO")
        lines.append((f"{num_agents} agents, live view: {what}", unit, show(value), *budget))
    return lines


def lines_of_group(num_ranks: int, rounds: int) -> list[Line]:
    """The cost of the default group, as a multiple of Gloo's; ratios are medians of those of single rounds."""
    found = measure_groups(num_ranks, rounds)
    ours, gloo = typical(found[OURS]), typical(found[TORCH])
    rows: list[tuple[str, str, float | None]] = [
        ("processor time of its set-up", "setup_cpu_s", 1.5),
        ("the same, elapsed", "setup_s", None),
        ("processor time of set-up, first all_reduce and barrier", "used_cpu_s", 1.5),
        ("the same, elapsed", "used_s", None),
    ]
    lines: list[Line] = []
    for what, field, limit in rows:
        pairs = zip(found[OURS], found[TORCH], strict=True)
        ratio = median(getattr(one, field) / getattr(other, field) for one, other in pairs)
        mine, others = (f"{show(getattr(each, field) * 1e3)} ms" for each in (ours, gloo))
        budget = ("", "") if limit is None else (f"at most {limit:g} x", "yes" if ratio <= limit else "NO")
        lines.append((f"group of {num_ranks} ranks: {what}, {mine}; Gloo {others}", "x", show(ratio), *budget))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("--workers", type=int, default=32, help="how many (default: %(default)s)")
    parser.add_argument("--agents", type=int, metavar="N", help="instead: so many agents in this process, in memory")
    parser.add_argument("--live-view", type=int, metavar="N", help="instead: the page of a job of so many such agents")
    parser.add_argument("--group", type=int, metavar="N", help="instead: the set-up of a group of so many ranks")
    parser.add_argument("--rounds", type=int, default=9, help="for --group: rounds of both (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"put the table into {RESULTS.name}")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a budget is not kept")
    arguments = parser.parse_args()
    if arguments.agents is not None and arguments.agents < 20:
        parser.error(f"--agents {arguments.agents}: at least 20, so that a tenth are two")
    if arguments.workers < 2:
        parser.error(f"--workers {arguments.workers}: at least 2")
    os.environ.setdefault("RPCDIST_TEST_SCALE", "3")  # the kit's limits suit a few workers
    about = about_machine("rpcdist", "torch", "grpcio", "uvloop")
    print("\n".join(about), flush=True)
    if arguments.live_view is not None:
        lines = lines_of_live_view(arguments.live_view)
    elif arguments.group is not None:
        lines = lines_of_group(arguments.group, arguments.rounds)
    elif arguments.agents is not None:
        lines = [line for elastic in (False, True) for line in lines_of_agents(arguments.agents, elastic)]
    else:
        with WorkerPool() as pool:
            lines = lines_of(measure_scale(pool, arguments.workers))
    table = layout(HEAD, lines)
    print("\n".join(["", *table]))
    if arguments.write:
        which = "" if arguments.live_view is None else f" --live-view {arguments.live_view}"
        which = which if arguments.group is None else f" --group {arguments.group}"
        write_results(f"scale.py{which}", [*about, "", *table])
    return int(arguments.check and any(line[-1] == "NO" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
