"""Programs that leave in callbacks of `atexit`, which they registered before RPC or a group was there."""

from __future__ import annotations

import textwrap

import pytest

from rpcdist.testing import Program, free_port

pytestmark = pytest.mark.multiproc

PAIR = """
import atexit, os, sys

def at_the_end():
    sys.stdout.write(f"{rank} {leave()}\\n")  # at once: the ranks share it

atexit.register(at_the_end)  # before what it uses is even imported
import torch
from rpcdist import collectives, rpc

rank = 0 if os.fork() else 1


def init_group(port):
    collectives.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

def init_rpc(port):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)

def total():
    tensor = torch.ones(2)
    collectives.all_reduce(tensor)
    return int(tensor[0])
"""

LEAVE_BOTH = """
def leave():
    peer = rpc.rpc_sync(f"w{1 - rank}", os.getpid)
    lost = rpc.shutdown()
    number = total()
    collectives.destroy_process_group()
    return peer != os.getpid(), lost, number

for init, port in zip((init_rpc, init_group), sys.argv[1:]):
    init(port)
"""


AS_IN_PYTHON_3_12 = """
from rpcdist import at_exit
at_exit.STARTS_NO_THREAD = True
"""

LEAVE_BOTH_WITHOUT_THREADS = """
import threading

def leave_both(leave=leave):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    threading.Thread.start = refuse
    return leave()

leave = leave_both
"""


def ends(code: str, *ports: int) -> list[str]:
    """The output of the callbacks of the two ranks; the program must end by itself."""
    with Program(code, *ports) as program:
        assert program.end() == 0, program.output
    return sorted(line for line in program.output.splitlines() if line.startswith(("0", "1")))


def test_a_callback_that_was_registered_first_leaves_gracefully() -> None:
    """RPC and the group, which have a store each; until then both are whole."""
    assert ends(PAIR + LEAVE_BOTH, free_port(), free_port()) == ["0 (True, {}, 2)", "1 (True, {}, 2)"]


def test_a_callback_leaves_where_no_thread_starts() -> None:
    """Callbacks of Python 3.12 start none; also the coroutine of the shutdown has a thread by then."""
    code = AS_IN_PYTHON_3_12 + PAIR + LEAVE_BOTH + LEAVE_BOTH_WITHOUT_THREADS
    assert ends(code, free_port(), free_port()) == ["0 (True, {}, 2)", "1 (True, {}, 2)"]


def test_a_finalizer_that_leaves_after_rpc_has_ended() -> None:
    """One line says so, without a traceback; `shutdown` returns, and a group has nothing to say."""
    code = """
    class Owner:
        def __del__(self, write=sys.stdout.write, leave=rpc.shutdown, end=collectives.destroy_process_group):
            write(f"{rank} {leave()}\\n")
            end()

    def leave():
        return "atexit"

    init_rpc(sys.argv[1])
    init_group(sys.argv[2])
    rpc.rpc_sync(f"w{1 - rank}", os.getpid)
    owner = Owner()
    collectives.barrier()
    """
    with Program(PAIR + textwrap.dedent(code), free_port(), free_port()) as program:
        assert program.end() == 0, program.output
    lines = program.output.splitlines()
    assert sorted(line for line in lines if line[:1] in "01") == ["0 atexit", "0 {}", "1 atexit", "1 {}"]
    assert sum("came too late: RPC had ended with the process by then" in line for line in lines) == 2
    assert len(lines) == 6, program.output


def test_a_callback_that_does_not_leave() -> None:
    """Its process ends all the same, and is a lost worker for the others."""
    code = """
    def leave():
        if rank:
            return "stays"
        return list(rpc.shutdown())

    init_rpc(sys.argv[1])
    """
    assert ends(PAIR + textwrap.dedent(code), free_port()) == ["0 ['w1']", "1 stays"]


def test_a_program_that_ends_while_calls_are_in_flight() -> None:
    """Nobody waits for these any more: the end of the connections is not an error of the package."""
    code = """
    import asyncio

    async def never():
        await asyncio.Event().wait()

    def leave():
        return list(rpc.shutdown()) if rank else "ends"

    init_rpc(sys.argv[1])
    if rank == 0:
        kept = [rpc.rpc_async("w1", never).then(print), rpc.rpc_async("w1", never), rpc.remote("w1", never, timeout=3)]
        rpc.rpc_sync("w1", os.getpid)
    """
    with Program(PAIR + textwrap.dedent(code), free_port()) as program:
        assert program.end() == 0, program.output
    assert {"0 ends", "1 ['w0']"} <= set(program.output.splitlines()), program.output
    assert "Traceback" not in program.output, program.output
