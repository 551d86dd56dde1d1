"""Runs a program against each client, once on torch and once on rpcdist, and compares what they say.

    python tests/clients/run_clients.py                  all, with a table at the end
    python tests/clients/run_clients.py Lightning Fabric  some of them
    python tests/clients/run_clients.py --write           writes their rows of the table in docs/clients.md

`make clients` installs the clients into an environment of their own and runs this there. The exit code is 0 if every
program says the same on both.
"""

from __future__ import annotations

import argparse
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

FOLDER = Path(__file__).parent
LIMIT_S = 1500.0
"""Of one program. The longest starts some 20 processes, each of which imports torch and TorchRL."""

KILL_LIMIT_S = 60.0
"""Until the output ends of a program that was killed, with its processes; what left its session may hold the output."""

BEGIN, END = "<!-- clients: begin -->", "<!-- clients: end -->"
HEAD = ("| client | version | what runs | equal results |", "|---|---|---|---|")


@dataclass(frozen=True)
class Client:
    """A library and the program that uses it.

    Attributes:
        distribution: what has its version.
        program: the stem of the file.
        how: how it gets rpcdist: `compat`, or the argument `rpcdist` for `backend`, also under `torchrun`.
        what: which of its parts the program uses.
    """

    distribution: str
    program: str
    how: str
    what: str

    def command(self, is_ours: bool) -> list[str]:
        program = str(FOLDER / f"{self.program}.py")
        if self.how == "compat":
            return [*(("-m", "rpcdist", "run", "--compat") if is_ours else ()), program]
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        return [*(launcher if self.how == "torchrun" else ()), program, "rpcdist" if is_ours else "gloo"]


CLIENTS: Final = {
    "PyTorch Geometric": Client(
        "torch_geometric", "client_pyg", "compat", "RPC, feature and graph stores, distributed neighbour samplers"
    ),
    "TorchRL": Client(
        "torchrl", "client_torchrl", "compat", "remote replay buffer, RPC and distributed collectors, learners' DDP"
    ),
    "fairscale": Client("fairscale", "client_fairscale", "compat", "DistributedPipeline, trained for some steps"),
    "torchft": Client("torchft", "client_torchft", "backend", "two replicas, of which one dies and comes again"),
    "Lightning": Client("lightning", "client_lightning", "torchrun", "Trainer with DDP on 2 ranks"),
    "Fabric": Client("lightning", "client_fabric", "torchrun", "DDP on 2 ranks, clipping, gathering"),
    "Accelerate": Client("accelerate", "client_accelerate", "torchrun", "DDP on 2 ranks, clipping, gathering"),
    "Transformers": Client("transformers", "client_transformers", "torchrun", "Trainer with a small BERT on 2 ranks"),
}


@dataclass(frozen=True)
class Outcome:
    """What a program said: its results, or why there are none."""

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


def row(name: str, cell: str) -> str:
    client = CLIENTS[name]
    return f"| {name} | {version(client.distribution)} | {client.what} | {cell} |"


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
        rows[name] = row(name, cell)
        equal = equal and not theirs.problem and theirs.results == ours.results
        print(f"{name}: {cell} ({theirs.seconds:.0f} s on torch, {ours.seconds:.0f} s on rpcdist)", flush=True)
        if options.write:
            write(rows)
    print("\n".join(["", *HEAD, *rows.values()]))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
