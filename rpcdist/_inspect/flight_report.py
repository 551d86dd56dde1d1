"""The commands that explain a job: `report` for a failed job, and `stacks` for one that hangs.

`python -m rpcdist report FOLDER` reports a failed job from the files that its workers have written: what happened
first, on which worker, and what the other workers did then. It checks the files: one may be truncated, of another
version, or forged.

`python -m rpcdist stacks [ADDRESS]` shows what every long call waits for, across all workers.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rpcdist._launch.job_records import address_of
from rpcdist.errors import AuthenticationFailed, ConfigError, ProtocolViolation
from rpcdist.inspection import (
    MemberFacts,
    SilentWorker,
    WorkerFacts,
    describe,
    explain,
    facts_from_json,
    facts_to_json,
    printable_lines,
)
from rpcdist.inspection.facts import JobFacts
from rpcdist.private_files import flight_folder
from rpcdist.time_limits import LONG_WAIT_S

MAX_FILE_BYTES: Final = 16 << 20
MAX_FILES: Final = 2000
MAX_TEXT: Final = 2000
MAX_EVENTS_SHOWN: Final = 30
_RANKS: Final = {"failed": 0, "ended": 1, "group": 2, "broken": 3, "lost": 4, "heard": 5, "signal": 6, "call": 7}
"""Ranks events that happen at about the same time by how much they say about the cause."""

_TOGETHER_NS: Final = 20_000_000
_CONTEXT_NS: Final = 10_000_000_000  # calls that failed so long before the first failure of a job are left out


@dataclass(frozen=True, slots=True)
class Incident:
    """An event on one worker: `kind` as in the flight log, or "call" or "group" for a failed one."""

    time_ns: int
    worker: str
    kind: str
    text: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class FlightFile:
    """The file of one worker.

    Attributes:
        num_kills: processes that the host's kernel killed for lack of memory, from the worker's start to the file.
        num_calls: finished calls among those that the file has.
    """

    path: Path
    worker: str
    id: int
    job: str
    host: str
    pid: int
    time_ns: int
    num_kills: int
    events: tuple[Incident, ...]
    facts: WorkerFacts | None
    num_calls: int = 0
    last_calls: tuple[str, ...] = field(default=())


def read_folder(folder: Path) -> tuple[list[FlightFile], list[str]]:
    """The files of the newest job in a folder, and notes for the reader about other jobs and unusable files.

    Raises:
        ConfigError: the folder does not exist, or has no file of a worker.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    found: list[FlightFile] = []
    notes: list[str] = []
    for path in sorted(folder.glob("calls*.jsonl"))[:MAX_FILES]:
        try:
            found.append(_read(path))
        except (OSError, ValueError, ProtocolViolation, LookupError, TypeError, AttributeError, RecursionError) as exc:
            notes.append(f"{path.name} cannot be read: {exc!r}"[:MAX_TEXT])
    if not found:
        raise ConfigError(
            f"{folder} has no flight recorder file of a worker: {'; '.join(notes) or 'pass the folder of the job'}"
        )
    job = max(found, key=lambda file: file.time_ns).job
    others = sorted({file.job for file in found} - {job})
    if others:
        notes.append(f"{len(others)} other jobs have files in this folder: {', '.join(others[:5])}")
    newest: dict[int, FlightFile] = {}
    for file in found:
        if file.job == job and (file.id not in newest or file.time_ns > newest[file.id].time_ns):
            newest[file.id] = file
    return [newest[id] for id in sorted(newest)], notes


def _read(path: Path) -> FlightFile:
    lines = _content(path).splitlines()
    head = json.loads(lines[0])
    worker = _text(head["worker"])
    events: list[Incident] = []
    facts: WorkerFacts | None = None
    last_calls: list[str] = []
    num_calls = 0
    for line in lines[1:]:
        record = json.loads(line)
        if "event" in record:
            event = record["event"]
            kind, text = _text(event["kind"]), _text(event["text"])
            events.append(Incident(_number(event["time_ns"]), worker, kind, text, _text(event.get("traceback", ""))))
        elif "call" in record:
            num_calls += 1
            call = record["call"]
            text = _call_text(call)
            last_calls = [*last_calls[-4:], text]
            if call["outcome"] != "ok":
                events.append(Incident(_number(call["ended_ns"]), worker, "call", text))
        elif "facts" in record:
            facts = facts_from_json(json.dumps(record["facts"]))
    return FlightFile(
        path, worker, _number(head["id"]), _text(head["job"]), _text(head["host"]), _number(head["pid"]),
        _number(head["time_ns"]), _number(head["num_kills"]), tuple(events), facts, num_calls, tuple(last_calls),
    )  # fmt: skip


def _content(path: Path) -> str:
    """The text of a file; `ValueError` if the file is large, or a pipe, which might never end."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), errors="replace") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise ValueError(f"it is not a regular file, or is larger than {MAX_FILE_BYTES} bytes")
        return file.read(MAX_FILE_BYTES)


def _number(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"expected a number from 0 to 2**63 - 1, not {value!r:.100}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a string, not {value!r:.100}")
    return value[:MAX_TEXT]


def _call_text(call: dict[str, Any]) -> str:
    whose = f"for {_text(call['peer'])}" if call["is_served"] else f"at {_text(call['peer'])}"
    took_s = (_number(call["ended_ns"]) - _number(call["began_ns"])) / 1e9
    return f"{_text(call['function'])} {whose} ended after {took_s:.3f} s: {_text(call['outcome'])}"


# ---------------------------------------------------------------- the story


def story(files: Sequence[FlightFile], notes: Iterable[str] = (), groups: Iterable[Incident] = ()) -> str:
    members = {member.name: member for file in files if file.facts is not None for member in file.facts.members}
    present = {file.worker for file in files}
    absent = sorted(set(members) - present)
    lines = [f"job {files[0].job}: {len(members) or len(files)} workers; files from {', '.join(sorted(present))}"]
    if absent:
        lines.append(f"no file from {', '.join(absent)}")
    events = _timeline(files, groups)
    if events:
        cause = _cause(events, absent)
        lines += ["", *_first(cause, files, absent)]
        began = cause.time_ns
        lines += ["", "then:"]
        lines += [f"  {_at(event, began)}" for event in events[:MAX_EVENTS_SHOWN]]
        if len(events) > MAX_EVENTS_SHOWN:
            lines.append(f"  and {len(events) - MAX_EVENTS_SHOWN} more")
    else:
        lines += ["", "no worker recorded a failure"]
    lines += [
        "",
        "what each worker was doing when it wrote its file:",
        *_what_they_did(files, [members[name] for name in absent]),
    ]
    lines += [f"note: {note}" for note in notes]
    return "\n".join(lines)


def _timeline(files: Sequence[FlightFile], groups: Iterable[Incident]) -> list[Incident]:
    """The events of all workers in order, without failed calls from long before the first failure."""
    every = [event for file in files for event in file.events]
    begins = [event.time_ns for event in every if event.kind != "call"]
    first_ns = min(begins, default=0)
    kept = [event for event in every if event.kind != "call" or event.time_ns >= first_ns - _CONTEXT_NS]
    kept += [event for event in groups if event.time_ns >= first_ns - _CONTEXT_NS]
    return sorted(kept, key=lambda event: event.time_ns)


def _cause(events: Sequence[Incident], absent: Sequence[str]) -> Incident:
    """The most likely cause: the first event that is not a call, or a stronger event of the same moment, or the failure
    that the others only noticed. A program that fails because a worker without a file is lost is not the cause.
    """
    failures = [event for event in events if event.kind == "failed"]
    others = [event for event in events if event.kind not in ("call", "signal")] or list(events)
    first = others[0]
    close = [event for event in others if event.time_ns - first.time_ns <= _TOGETHER_NS]
    best = min(close, key=lambda event: _RANKS.get("lost" if _named(event, absent) else event.kind, 9))
    # A worker whose program has failed breaks its connections; others notice that before it writes its file.
    if best.kind in ("broken", "heard", "lost") and failures:
        named = [event for event in failures if f"{event.worker!r}" in best.text]
        return named[0] if named else best
    return best


def _named(event: Incident, absent: Sequence[str]) -> list[str]:
    """The workers without a file that the text of a failure names."""
    return [name for name in absent if event.kind in ("failed", "group") and f"{name!r}" in event.text]


def _first(cause: Incident, files: Sequence[FlightFile], absent: Sequence[str]) -> Iterator[str]:
    clock = time.strftime("%H:%M:%S", time.localtime(cause.time_ns // 1_000_000_000))
    yield f"first, at {clock}.{cause.time_ns // 1_000_000 % 1000:03d}: {_sentence(cause)}"
    if cause.traceback:
        yield from (f"    {line}" for line in cause.traceback.splitlines())
    gone = [name for name in absent if f"{name!r}" in cause.text]
    if cause.kind != "heard" and gone:
        yield (
            f"  {', '.join(gone)} wrote nothing: the process was killed (SIGKILL), crashed, or is stopped or cut off "
            "from the network"
        )
        num_kills = max(file.num_kills for file in files)
        if num_kills:
            yield (
                f"  the kernel of its host killed {num_kills} {'process' if num_kills == 1 else 'processes'} since "
                "the job began because memory had run out: probably this one. Give the job more memory, or run fewer "
                "workers on a host"
            )


def _sentence(event: Incident) -> str:
    match event.kind:
        case "failed":
            return f"the program of {event.worker} failed with {event.text}"
        case "ended":
            return f"{event.worker}: {event.text}"
        case "call":
            return f"{event.worker}: the call {event.text}"
    return f"{event.worker} noticed: {event.text}"


def _at(event: Incident, began_ns: int) -> str:
    return f"{(event.time_ns - began_ns) / 1e9:+9.3f} s  {_sentence(event)}"


def _what_they_did(files: Sequence[FlightFile], absent: Sequence[MemberFacts]) -> Iterator[str]:
    facts = [file.facts for file in files if file.facts is not None]
    silent = [SilentWorker(member.name, member.address, "ended", "it wrote no file") for member in absent]
    yield describe(explain(facts, silent, older_than_s=0.0))
    for file in files:
        yield ""
        yield f"{file.worker} (process {file.pid} on {file.host}) recorded {file.num_calls} calls; the last ones:"
        yield from (f"    {call}" for call in file.last_calls)
        main = next((one for one in (file.facts.threads if file.facts else ()) if one.name == "MainThread"), None)
        if main is not None:
            yield "  its main thread:"
            yield from (f'    File "{line.file}", line {line.line}, in {line.function}' for line in main.stack[-8:])


def add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser("report", help="explains why a job failed, from the files of its workers")
    report.set_defaults(run=_show_report)
    report.add_argument(
        "folder", nargs="?", help="RPCDIST_FLIGHT_RECORDER_DIR of the job; by default the folder of this user"
    )


def _show_report(arguments: argparse.Namespace) -> int:
    print(report_text(Path(arguments.folder) if arguments.folder is not None else flight_folder()))
    return 0


def report_text(folder: Path) -> str:
    """The story of the newest job in a folder. Raises `ConfigError`."""
    files, notes = read_folder(folder)
    groups = _failed_operations(folder, {file.pid: file.worker for file in files})
    return printable_lines(story(files, notes, groups))


def _failed_operations(folder: Path, workers: dict[int, str]) -> list[Incident]:
    """The failed operations in the files of the collectives' flight recorder, of the processes of these workers."""
    found = []
    for path in sorted(folder.glob("rank*.json"))[:MAX_FILES]:
        try:
            dumped = json.loads(_content(path))
            worker = workers.get(dumped["pid"], "")
            for entry in dumped["entries"] if worker else ():
                if entry["state"] == "failed":
                    name = f"{entry['operation']} #{entry['sequence']} of group {entry['group']!r}"
                    text = f"{name} failed: {entry['error']}"[:MAX_TEXT]
                    found.append(Incident(_number(entry["ended_ns"]), worker, "group", text))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # the file is truncated, or another version wrote it
    return found


def add_stacks(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    stacks = commands.add_parser("stacks", help="shows what the long-running calls of a job wait for")
    stacks.set_defaults(run=_show_stacks)
    stacks.add_argument(
        "address",
        nargs="?",
        help="of a worker (MASTER_ADDR:MASTER_PORT), or name of a job of `launch`; by default all jobs of this host",
    )
    stacks.add_argument(
        "--older-than", type=float, default=LONG_WAIT_S, metavar="SECONDS", help="only calls of this age; 1 by default"
    )
    stacks.add_argument("--json", action="store_true", help="prints the facts of each worker as a line of JSON")


def _show_stacks(arguments: argparse.Namespace) -> int:
    from rpcdist._inspect.asking import Asker  # loads gRPC

    with Asker() as asker:
        if arguments.address is None:
            jobs, errors = asker.jobs_here()
        else:
            jobs, errors = [asker.job_at(address_of(arguments.address))], {}
    for address, refusal in errors.items():
        if jobs and isinstance(refusal, AuthenticationFailed):
            continue  # another job
        print(f"the process at {address} did not answer: {type(refusal).__name__}: {refusal}", file=sys.stderr)
    if not jobs:
        print("no worker with this job token runs on this host; pass the address of a worker on another host")
        return 1
    for job in jobs:
        if arguments.json:
            for facts in job.workers:
                print(facts_to_json(facts))
        else:
            print(text_of(job, arguments.older_than))
    return 0


def text_of(job: JobFacts, older_than_s: float) -> str:
    """Explains what the workers of a job wait for."""
    answered = ", ".join(facts.worker for facts in job.workers) or "none"
    silent = ", ".join(one.worker for one in job.silent)
    head = f"job {job.job}: {answered}" + (f"; no answer from {silent}" if silent else "")
    return f"{printable_lines(head)}\n{describe(explain(job.workers, job.silent, older_than_s))}"
