"""The pure parts of roles: the rank, name, environment, device and restarts of each process."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rpcdist import Role
from rpcdist._launch.job_plan import plan_job, this_machine
from rpcdist._launch.progress import Failed, Progress
from rpcdist._launch.reports import Event, Exited, ProcessEnded, Raised, Ready, Returned
from rpcdist.errors import ConfigError

MACHINE = (8, ("0", "1", "5"))
DONE = Returned(b"done")
LOST = Raised("RankLost", "traceback", True, 1.0)
KILLED = ProcessEnded(-9, 0.0)


def variables(role: Role, *more: Role, environment: dict[str, str] | None = None) -> list[dict[str, str]]:
    plans, _ = plan_job([role, *more], {"COMMON": "1"}, environment or {}, MACHINE)
    return [one.variables for one in plans]


def test_ranks_go_in_the_order_of_roles() -> None:
    roles = [Role("server", print, 1), Role("trainer", print, 2, env={"A": "a"})]
    plans, notice = plan_job(roles, {"B": "b"}, {}, MACHINE)
    assert [one.name for one in plans] == ["server0", "trainer0", "trainer1"]
    assert plans[2].variables == {
        "RANK": "2",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "3",
        "RPCDIST_ROLE": "trainer:1",
        "OMP_NUM_THREADS": "2",
        "A": "a",
        "B": "b",
    }
    assert notice == "3 processes on 8 cores: OMP_NUM_THREADS=2 in each"


def test_threads_are_those_that_somebody_chose() -> None:
    [one] = variables(Role("r", print, 1, resources={"CPU": 3}))
    assert one["OMP_NUM_THREADS"] == "3"
    assert {env["OMP_NUM_THREADS"] for env in variables(Role("r", print, 100))} == {"1"}
    assert "OMP_NUM_THREADS" not in variables(Role("r", print, 1), environment={"OMP_NUM_THREADS": "7"})[0]
    assert variables(Role("r", print, 1, env={"OMP_NUM_THREADS": "5"}))[0]["OMP_NUM_THREADS"] == "5"


def test_each_rank_has_variables_of_its_own() -> None:
    seeds = variables(Role("r", print, 2, env=[{"SEED": "1"}, {"SEED": "2", "COMMON": "2"}]))
    assert [(env["SEED"], env["COMMON"]) for env in seeds] == [("1", "1"), ("2", "2")]


def test_gpus_are_dealt_out_such_that_local_rank_is_the_number_of_the_own_one() -> None:
    server, trainers = Role("server", print, 1), Role("trainer", print, 3, resources={"GPU": 1})
    seen = [(env["LOCAL_RANK"], env.get("CUDA_VISIBLE_DEVICES")) for env in variables(server, trainers)]
    assert seen == [("0", None), ("0", "0,1,5"), ("1", "0,1,5"), ("2", "0,1,5")]
    one, two = Role("a", print, 1, resources={"GPU": 1}), Role("b", print, 1, resources={"GPU": 2})
    assert [env["CUDA_VISIBLE_DEVICES"] for env in variables(one, two)] == ["0", "1,5"]


def test_what_a_machine_has() -> None:
    assert this_machine({"CUDA_VISIBLE_DEVICES": "2, GPU-ab"})[1] == ("2", "GPU-ab")
    assert this_machine({"CUDA_VISIBLE_DEVICES": ""})[1] == ()
    assert this_machine({"CUDA_VISIBLE_DEVICES": "-1"})[1] == ()
    assert this_machine({})[0] >= 1


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ([], "roles is empty"),
        ([Role("a", print, 1), Role("a", print, 1)], "two roles have the name 'a'"),
        ([Role("t", print, 11), Role("t1", print, 1)], "roles 't' and 't1' would both have a worker 't10'"),
        ([Role("a b", print, 1)], "Worker name"),
        ([Role("a", print, 0)], "role 'a': the count of its ranks must be at least 1, not 0"),
        ([Role("a", print, True)], "at least 1, not True"),
        ([Role("a", print, 1, max_restarts=-1)], "role 'a': max_restarts must not be negative, but is -1"),
        ([Role("a", "print", 1)], "role 'a': 'print' is not a function"),  # type: ignore[arg-type]
        ([Role("a", print, 2, env=[{}])], "role 'a': env has variables for 1 ranks, but the role has 2"),
        ([Role("a", print, 1, env={"RANK": "0"})], "env must not have RANK"),
        ([Role("a", print, 1, daemon=True)], r"all roles \(a\) are daemons"),
        ([Role("a", print, 1, resources={"TPU": 1})], "role 'a' requests 'TPU': one machine has only CPU and GPU"),
        (
            [Role("a", print, 1, resources={"GPU": 0.5})],
            "role 'a' requests 0.5 GPU: on one machine it must be a whole number",
        ),
        (
            [Role("a", print, 2, resources={"GPU": 2}), Role("b", print, 1)],
            r"the roles request 4 GPUs \(a: 2 x 2\), but this machine has 3 \(0, 1, 5\)",
        ),
    ],
)
def test_what_cannot_work_is_named(roles: list[Role], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_job(roles, {}, {}, MACHINE)


# ---------------------------------------------------------------- restarts


def progress(**options: Any) -> Progress:
    made = Progress(range(2), math.inf, 1.0, 60.0, pause_s=lambda number: 10.0 * number, **options)
    assert made.to_start(0.0) == [(0, 0), (1, 0)]
    return made


def take(job: Progress, *events: tuple[float, int, Event]) -> None:
    for now, rank, event in events:
        job.take(rank, event, now)


def test_a_lost_process_is_started_again_after_a_pause_that_grows() -> None:
    job = progress(max_restarts={1: 2})
    take(job, (1.0, 1, Ready()), (1.0, 1, KILLED))
    assert (job.outcome(1.0), job.next_deadline(), job.to_start(10.9)) == (None, 11.0, [])
    assert job.state(1) == (
        "was killed by SIGKILL before its function returned, and starts again (restarted 1 of 2 times)"
    )
    assert job.next_start() == 11.0
    assert job.to_start(11.0) == [(1, 1)]
    assert job.next_start() == math.inf
    assert job.state(1) == "starts (restarted 1 of 2 times)"
    take(job, (12.0, 1, KILLED))
    assert job.to_start(31.9) == [] and job.to_start(32.0) == [(1, 2)]
    take(job, (33.0, 1, DONE), (33.0, 0, DONE), (33.0, 1, ProcessEnded(0, 33.0)), (33.0, 0, ProcessEnded(0, 33.0)))
    assert job.outcome(33.0) == (b"done", b"done")
    assert job.losses() == {1: "was killed by SIGKILL before its function returned, and was restarted 2 of 2 times"}


def test_the_last_restart_is_the_last() -> None:
    job = progress(max_restarts={1: 1})
    take(job, (1.0, 1, KILLED))
    assert job.to_start(11.0) == [(1, 1)]
    take(job, (12.0, 1, KILLED))
    assert job.outcome(12.0) == Failed(1, ProcessEnded(-9, 0.0))


def test_what_the_engine_lost_before_it_ran_counts_as_no_restart() -> None:
    job = progress()
    take(job, (1.0, 0, ProcessEnded(None, 1.0, "the node died", has_run=False)))
    assert job.to_start(11.0) == [(0, 1)] and job.state(0) == "starts"
    take(job, (12.0, 0, ProcessEnded(None, 12.0, "the node died")))
    assert job.outcome(12.0) == Failed(0, ProcessEnded(None, 12.0, "the node died"))
    assert job.state(0) == "was lost: the node died"


@pytest.mark.parametrize("report", [Raised("ValueError", "", False, 1.0), Exited(3, 1.0)])
def test_an_exception_is_no_loss(report: Raised | Exited) -> None:
    job = progress(max_restarts={1: 5})
    take(job, (1.0, 1, report), (1.0, 1, ProcessEnded(1, 1.0)))
    assert job.outcome(1.0) == Failed(1, report)
    assert job.state(1) == ("raised ValueError" if isinstance(report, Raised) else "exited with 3")


def test_a_rank_that_fails_because_another_one_is_restarted_is_the_one_that_failed() -> None:
    job = progress(max_restarts={1: 1})
    take(job, (1.0, 0, LOST), (1.0, 1, KILLED))
    assert job.outcome(1.5) is None
    assert job.outcome(2.0) == Failed(0, LOST)
    assert job.losses() == {1: "was killed by SIGKILL before its function returned, and was restarted 1 of 1 times"}


def test_a_job_does_not_wait_for_daemons() -> None:
    job = progress(daemons={1})
    take(job, (1.0, 1, Ready()), (1.0, 0, DONE))
    assert job.outcome(1.0) is None
    take(job, (2.0, 0, ProcessEnded(0, 2.0)))
    assert job.outcome(2.0) == (b"done", None)
    assert (job.is_over(0), job.is_over(1), job.state(1)) == (True, False, "runs")


def test_a_daemon_that_fails_ends_the_job() -> None:
    job = progress(daemons={1})
    take(job, (1.0, 1, KILLED))
    assert job.outcome(1.0) == Failed(1, ProcessEnded(-9, 0.0))
