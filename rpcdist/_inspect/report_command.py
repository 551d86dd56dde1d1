"""`python -m rpcdist report FOLDER`: the story of a failed job, from the flight files of its workers."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rpcdist._inspect.flight_report import MAX_TEXT, Incident, read_folder, story
from rpcdist.errors import ConfigError
from rpcdist.flight_files import flight_folder
from rpcdist.inspection import printable_lines

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_report(commands: Commands) -> None:
    """Adds the command."""
    report = commands.add_parser("report", help="tells the story of a failed job from what its workers have written")
    report.set_defaults(run=_run)
    report.add_argument(
        "folder", nargs="?", help="RPCDIST_FLIGHT_RECORDER_DIR of the job; by default that of this user"
    )


def _run(arguments: argparse.Namespace) -> int:
    try:
        print(report_text(Path(arguments.folder) if arguments.folder is not None else flight_folder()))
    except ConfigError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def report_text(folder: Path) -> str:
    """The story of the newest job in a folder. Raises `ConfigError`."""
    files, notes = read_folder(folder)
    groups = _failed_operations(folder, {file.pid: file.worker for file in files})
    return printable_lines(story(files, notes, groups))


def _failed_operations(folder: Path, workers: dict[int, str]) -> list[Incident]:
    """The failed operations in the files of the collectives' flight recorder, of the processes of these workers."""
    found = []
    for path in sorted(folder.glob("rank*.json")):
        try:
            dumped = json.loads(path.read_text(errors="replace"))
            worker = workers.get(dumped["pid"], "")
            for entry in dumped["entries"] if worker else ():
                if entry["state"] == "failed":
                    name = f"{entry['operation']} #{entry['sequence']} of group {entry['group']!r}"
                    text = f"{name} failed: {entry['error']}"[:MAX_TEXT]
                    found.append(Incident(int(entry["ended_ns"]), worker, "group", text))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # of another version, or cut off
    return found
