"""Two replicas train under torchft, one dies and comes again: `client_torchft.py BACKEND`.

Ours is the group of the example in docs/clients.md. Which replica takes part in which step depends on times, so the
results are what does not: how the processes ended, that the replica which came again took the other's state, and that
both have the same parameters after the same last step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
from client_results import RESULT, batches, example, make_model, numbers_of, report
from torch.nn.functional import mse_loss
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

LAST_STEP, FATAL_STEP, EXIT_CODE = 12, 4, 9
"""The first step that may be the last, and after how many of its own and with which code a replica dies."""

LIMIT = timedelta(seconds=30)
LIMIT_S = 400.0


def replica(backend: str, number: int, is_fatal: bool) -> None:
    """Trains until both replicas take part in a step after the death of one, or to its end in the middle.

    The one that starts first makes hundreds of steps alone, and the other takes its state. So the dying one counts its
    own steps, and no replica ends before a line on its standard input has told it of the death.
    """
    is_told = threading.Event()

    def listen() -> None:
        sys.stdin.readline()
        is_told.set()

    threading.Thread(target=listen, daemon=True).start()
    names: dict[str, Any] = {}
    exec(example("torchft", backend), names)
    group = names["ProcessGroupRpcdist"](LIMIT) if backend == "rpcdist" else ProcessGroupGloo(LIMIT)
    model = make_model()
    inner = torch.optim.Adam(model.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"replica{number}",
        hostname="127.0.0.1",
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        connect_timeout=LIMIT,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    inputs, num_steps, is_last = list(batches()), 0, False
    while not is_last:
        if is_fatal and num_steps == FATAL_STEP:
            os._exit(EXIT_CODE)
        may_end = is_told.is_set()  # asked before the step, in which the dead one has no part then
        optimizer.zero_grad()
        batch, targets = inputs[manager.current_step() % len(inputs)]
        mse_loss(wrapped(batch), targets).backward()
        optimizer.step()
        num_steps += 1
        is_last = may_end and manager.current_step() >= LAST_STEP and manager.num_participants() == 2
    print(RESULT + json.dumps([manager.current_step(), num_steps, numbers_of(model)]), flush=True)
    sys.stdin.read()  # the other replica may still be in the last step, with the store of this one
    manager.shutdown(wait=False)


def result_of(process: subprocess.Popen[str]) -> tuple[int, int, Any]:
    """The last step of a replica, how many it made, and its parameters."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(RESULT):
            last, num_steps, parameters = json.loads(line.removeprefix(RESULT))
            return last, num_steps, parameters
    raise SystemExit("a replica ended without a result")


def main(backend: str) -> None:
    # It tells replicas of a new quorum when all that beat have asked for one.
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=2000)
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    with ExitStack() as stack:

        def start(number: int, is_fatal: bool) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, __file__, backend, str(number), str(int(is_fatal))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "TORCHFT_LIGHTHOUSE": address, "RANK": str(number)},
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        survivor, dying = start(0, False), start(1, True)
        exit_code = dying.wait(LIMIT_S)
        come_again = start(1, False)
        for process in (survivor, come_again):
            assert process.stdin is not None
            print(file=process.stdin, flush=True)
        ends = [result_of(process) for process in (survivor, come_again)]
        for process in (survivor, come_again):
            process.communicate(timeout=LIMIT_S)
        codes = [exit_code, survivor.returncode, come_again.returncode]
    lighthouse.shutdown()
    (last, _, parameters), (other_last, num_steps, other_parameters) = ends
    report(
        {
            "exit codes": codes,
            "same last step": last == other_last >= LAST_STEP,
            "took the other's state": num_steps < other_last,
            "same parameters": parameters == other_parameters,
        }
    )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        replica(sys.argv[1], int(sys.argv[2]), bool(int(sys.argv[3])))
