"""`python -m rpcdist stacks [ADDRESS]`: what every call that takes long waits for, followed over all workers."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from rpcdist._launch.job_records import address_of
from rpcdist.errors import AuthenticationFailed, RpcdistError
from rpcdist.inspection import describe, explain, facts_to_json
from rpcdist.inspection.fact_texts import printable_lines
from rpcdist.time_limits import LONG_WAIT_S

if TYPE_CHECKING:
    from rpcdist.inspection.facts import JobFacts

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_stacks(commands: Commands) -> None:
    """Adds the command."""
    stacks = commands.add_parser("stacks", help="says what every call of a job that takes long waits for")
    stacks.set_defaults(run=_run)
    stacks.add_argument(
        "address",
        nargs="?",
        help="of a worker, MASTER_ADDR:MASTER_PORT, or the name of a job of `launch`; all jobs of this host by default",
    )
    stacks.add_argument(
        "--older-than", type=float, default=LONG_WAIT_S, metavar="SECONDS", help="of calls; 1 by default"
    )
    stacks.add_argument("--json", action="store_true", help="the facts of each worker instead, one line of JSON each")


def _run(arguments: argparse.Namespace) -> int:
    from rpcdist._inspect.asking import Asker  # loads gRPC

    try:
        with Asker() as asker:
            if arguments.address is None:
                jobs, errors = asker.jobs_here()
            else:
                jobs, errors = [asker.job_at(address_of(arguments.address))], {}
    except RpcdistError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    for address, refusal in errors.items():
        if jobs and isinstance(refusal, AuthenticationFailed):
            continue  # another job
        print(f"the process at {address} was not asked: {type(refusal).__name__}: {refusal}", file=sys.stderr)
    if not jobs:
        print("no worker that has this token runs on this host; name the address of one that runs elsewhere")
        return 1
    for job in jobs:
        if arguments.json:
            for facts in job.workers:
                print(facts_to_json(facts))
        else:
            print(text_of(job, arguments.older_than))
    return 0


def text_of(job: JobFacts, older_than_s: float) -> str:
    """The explanation of what the workers of a job wait for."""
    answered = ", ".join(facts.worker for facts in job.workers) or "none"
    silent = ", ".join(one.worker for one in job.silent)
    head = f"job {job.job}: {answered}" + (f"; without an answer: {silent}" if silent else "")
    return f"{printable_lines(head)}\n{describe(explain(job.workers, job.silent, older_than_s))}"
