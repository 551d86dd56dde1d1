"""Runs a program against each client, once on torch and once on rpcdist, and compares what they say.

Then the tests run that come with the client, on torch, and of those that pass there, on rpcdist.

    python tests/clients/run_clients.py                  all, with a table at the end
    python tests/clients/run_clients.py Lightning Fabric  some of them
    python tests/clients/run_clients.py --write           writes their rows of the table in docs/clients.md

`make clients` installs the clients into an environment of their own and runs this there. The exit code is 0 if every
program says the same on both, and every test that passes on torch passes on rpcdist.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from client_results import GUIDE, RESULT
from own_tests import BEGUN

FOLDER = Path(__file__).parent
LIMIT_S = 1500.0
"""Of one program. The longest starts some 20 processes, each of which imports torch and TorchRL."""

KILL_LIMIT_S = 60.0
"""Until the output of a program ends that was killed, with its processes; a process that left its session may hold the
output.
"""

TEST_LIMIT_S = 120.0
"""Of one test of a client's own, and of the time before the first; the longest takes 30 s on torch."""

ATTEMPTS = 3
"""Of a test that fails: torchft's have limits of 1 s, and of 10 s for processes that import torch."""

SOURCES = Path("out/clients/sources").resolve()
"""Source packages, unpacked by `make clients`, of clients whose wheels have no tests."""

BEGIN, END = "<!-- clients: begin -->", "<!-- clients: end -->"
HEAD = ("| client | version | what runs | equal results | own tests |", "|---|---|---|---|---|")


@dataclass(frozen=True)
class OwnTests:
    """Tests that come with a client.

    Attributes:
        arguments: those of pytest; `{sources}` is the folder of the source package.
        ways: how they get rpcdist, `backend` or `compat`; they run in each way.
    """

    arguments: tuple[str, ...]
    ways: tuple[str, ...]

    def command(self, way: str, record: Path, sources: Path) -> list[str]:
        prefix = ("-m", "rpcdist", "run", "--compat") if way == "compat" else ()
        given = [argument.format(sources=sources) for argument in self.arguments]
        return [sys.executable, *prefix, str(FOLDER / "own_tests.py"), way, str(record), *given]


@dataclass(frozen=True)
class Client:
    """A library and the program that uses it.

    Attributes:
        distribution: what has its version.
        program: the stem of the file.
        how: how it gets rpcdist: `compat`, or the argument `rpcdist` for `backend`, also under `torchrun`.
        what: which of its parts the program uses.
        tests: of its own; None if pip brings none.
    """

    distribution: str
    program: str
    how: str
    what: str
    tests: OwnTests | None = None

    def command(self, is_ours: bool) -> list[str]:
        program = str(FOLDER / f"{self.program}.py")
        if self.how == "compat":
            return [*(("-m", "rpcdist", "run", "--compat") if is_ours else ()), program]
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        return [*(launcher if self.how == "torchrun" else ()), program, "rpcdist" if is_ours else "gloo"]


# Those that make groups; the others of torchft test its lighthouse, its transports and its futures.
TORCHFT_TESTS: Final = OwnTests(
    (
        "--override-ini=python_files=*_test.py",
        "--pyargs",
        *(
            f"torchft.{name}_test"
            for name in (
                "checkpointing.pg_transport",
                "process_group",
                "manager_integ",
                "local_sgd_integ",
                "diloco_regression",
                "collectives",
                "ddp",
                "fsdp",
                "parameter_server",
            )
        ),
    ),
    ("backend",),
)
# Those that start processes on CPUs; the others ask for GPUs, or for none.
ACCELERATE_TESTS: Final = OwnTests(
    tuple(f"{{sources}}/tests/test_{name}.py" for name in ("cpu", "grad_sync", "scheduler")),
    ("backend", "compat"),
)

CLIENTS: Final = {
    "PyTorch Geometric": Client(
        "torch_geometric", "client_pyg", "compat", "RPC, feature and graph stores, distributed neighbour samplers"
    ),
    "TorchRL": Client(
        "torchrl", "client_torchrl", "compat", "remote replay buffer, RPC and distributed collectors, learners' DDP"
    ),
    "fairscale": Client("fairscale", "client_fairscale", "compat", "DistributedPipeline, trained for some steps"),
    "torchft": Client(
        "torchft", "client_torchft", "backend", "two replicas, of which one dies and comes again", TORCHFT_TESTS
    ),
    "Lightning": Client("lightning", "client_lightning", "torchrun", "Trainer with DDP on 2 ranks"),
    "Fabric": Client("lightning", "client_fabric", "torchrun", "DDP on 2 ranks, clipping, gathering"),
    "Accelerate": Client(
        "accelerate", "client_accelerate", "torchrun", "DDP on 2 ranks, clipping, gathering", ACCELERATE_TESTS
    ),
    "Transformers": Client("transformers", "client_transformers", "torchrun", "Trainer with a small BERT on 2 ranks"),
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program: its results, or the reason why there are none."""

    results: dict[str, Any]
    problem: str
    seconds: float


def run(client: Client, is_ours: bool) -> Outcome:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, *client.command(is_ours)],
            cwd=folder,
            env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate(timeout=KILL_LIMIT_S)
    seconds = time.monotonic() - begun
    found = re.findall(rf"^{RESULT}(.*)$", output, re.MULTILINE)
    if process.returncode == 0 and len(found) == 1:
        return Outcome(json.loads(found[0]), "", seconds)
    print(output[-8000:], file=sys.stderr)
    ended = "took too long" if process.returncode == -signal.SIGKILL else f"exit code {process.returncode}"
    return Outcome({}, f"{ended}, {len(found)} results", seconds)


def run_tests(client: Client, way: str) -> dict[str, str]:
    """The outcome of each test of a client's own. One that fails runs again; one that hangs does not."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record")
        record.touch()
        for attempt in range(1, ATTEMPTS + 1):
            while (outcomes := run_tests_once(client, way, record)) and BEGUN in outcomes.values():
                running = next(test for test, outcome in outcomes.items() if outcome == BEGUN)
                print(f"{way}: {running} did not end", file=sys.stderr)
                with record.open("a") as file:
                    file.write(f"{running}\tdid not end\n")
            kept = {test: outcome for test, outcome in outcomes.items() if outcome != "failed"}
            if len(kept) == len(outcomes) or attempt == ATTEMPTS:
                return outcomes
            record.write_text("".join(f"{test}\t{outcome}\n" for test, outcome in kept.items()))
    raise AssertionError("not reached")


def run_tests_once(client: Client, way: str, record: Path) -> dict[str, str]:
    """Runs the tests that a record does not have, until one hangs or ends the process; returns all of the record."""
    assert client.tests is not None
    sources = SOURCES / f"{client.distribution}-{version(client.distribution)}"
    log = record.with_name("log")
    with log.open("w") as output:
        process = subprocess.Popen(
            client.tests.command(way, record, sources),
            cwd=record.parent,
            # Some tests have names that follow the order of a set.
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        follow(process, record)
    outcomes = dict(line.partition("\t")[::2] for line in record.read_text().splitlines())
    failed = [test for test, outcome in outcomes.items() if outcome == "failed"]
    if failed or not outcomes:
        text = f"failed: {', '.join(failed)}" if outcomes else "no test ran"
        print(f"{way}: {text}\n{log.read_text()[-8000:]}", file=sys.stderr)
    return outcomes


def follow(process: subprocess.Popen[bytes], record: Path) -> None:
    """Waits until a run of tests ends, or has written nothing for too long; ends all that it has started."""
    begun = time.time()
    while time.time() - max(begun, record.stat().st_mtime) < TEST_LIMIT_S:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
            break
    with contextlib.suppress(ProcessLookupError):  # it has ended, and left nothing
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(KILL_LIMIT_S)


def compare_tests(torch: dict[str, str], ours: dict[str, dict[str, str]]) -> tuple[str, bool]:
    """The last cell of a client's row, and whether ours passes all that torch does."""
    passed = [test for test, outcome in torch.items() if outcome == "passed"]
    parts, equal = [], bool(passed)
    for way, outcomes in ours.items():
        missed = [test for test in passed if outcomes.get(test) != "passed"]
        equal = equal and not missed
        parts.append(f"{way} {len(passed) - len(missed)} of {len(passed)}")
        for test in missed:
            print(f"{way}: {test} {outcomes.get(test, 'did not run')}, and passes on torch", file=sys.stderr)
    return ", ".join(parts), equal


def compare(name: str, theirs: Outcome, ours: Outcome) -> str:
    """The last cell of the client's row."""
    if theirs.problem or ours.problem:
        return f"torch: {theirs.problem or 'ended'}; rpcdist: {ours.problem or 'ended'}"
    names = theirs.results.keys() | ours.results.keys()
    different = sorted(each for each in names if theirs.results.get(each) != ours.results.get(each))
    for each in different:
        print(
            f"{name}, {each}:\n  torch   {theirs.results.get(each)}\n  rpcdist {ours.results.get(each)}",
            file=sys.stderr,
        )
    return f"{len(names) - len(different)} of {len(names)}" + (f", not {', '.join(different)}" if different else "")


def row(name: str, cell: str, own_tests: str = "-") -> str:
    client = CLIENTS[name]
    return f"| {name} | {version(client.distribution)} | {client.what} | {cell} | {own_tests} |"


def write(rows: dict[str, str]) -> None:
    """Puts rows in the place of those of the same clients in the table of the guide."""
    before, _, rest = GUIDE.read_text().partition(BEGIN)
    written, _, after = rest.partition(END)
    kept = {name: line for line, name in re.findall(r"^(\| ([^|]+?) \|.*)$", written, re.MULTILINE)}
    lines = [line for name in CLIENTS if (line := rows.get(name) or kept.get(name))]
    GUIDE.write_text("\n".join([f"{before}{BEGIN}", *HEAD, *lines, f"{END}{after}"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"one of {', '.join(CLIENTS)}; all by default")
    parser.add_argument("--write", action="store_true", help="write the rows of what ran into docs/clients.md")
    options = parser.parse_args()
    if unknown := set(options.clients) - CLIENTS.keys():
        parser.error(f"there is no client {', '.join(sorted(unknown))}")
    rows: dict[str, str] = {}
    equal = True
    for name in options.clients or CLIENTS:
        theirs, ours = (run(CLIENTS[name], is_ours) for is_ours in (False, True))
        cell = compare(name, theirs, ours)
        equal = equal and not theirs.problem and theirs.results == ours.results
        print(f"{name}: {cell} ({theirs.seconds:.0f} s on torch, {ours.seconds:.0f} s on rpcdist)", flush=True)
        own_tests = "-"
        if (tests := CLIENTS[name].tests) is not None:
            begun = time.monotonic()
            on_torch = run_tests(CLIENTS[name], "torch")
            own_tests, passes = compare_tests(on_torch, {way: run_tests(CLIENTS[name], way) for way in tests.ways})
            equal = equal and passes
            print(f"{name}, its own tests: {own_tests} ({time.monotonic() - begun:.0f} s)", flush=True)
        rows[name] = row(name, cell, own_tests)
        if options.write:
            write(rows)
    print("\n".join(["", *HEAD, *rows.values()]))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
