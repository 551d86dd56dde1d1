"""When the C library is asked to keep freed memory, and that it then does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rpcdist import freed_memory
from rpcdist.errors import ConfigError
from rpcdist.freed_memory import KEEP_FREED_MEMORY_VARIABLE, TORCH_VARIABLE, apply, is_wanted

ROUNDS, BLOCKS, BLOCK_BYTES = 4, 5, 8 << 20

STEPS = f"""
import resource
from rpcdist.freed_memory import keep_freed_memory

keep_freed_memory()

def step():
    for block in [bytearray({BLOCK_BYTES}) for _ in range({BLOCKS})]:
        block[::4096] = bytes({BLOCK_BYTES // 4096})

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

TENSORS = """
import threading
import torch
from rpcdist.freed_memory import keep_freed_memory, stock_small_blocks
from rpcdist.rpc._values.buffers import ReceiveBuffer

keep_freed_memory()
torch.set_num_threads(1)
source = torch.ones(2 << 20)
kept = []

def computed():
    stock_small_blocks()
    return source * 2

def received():
    buffer = ReceiveBuffer.allocate(source.nbytes)
    buffer.memory.fill_(1)
    return buffer

def steps(make):
    for step in range(60):
        first, second = make(), make()
        kept.append([torch.ones(size) for size in range(1, 9)])  # these outlive the step
        if step % 2:
            kept.pop(0)
        third = make()
        del first, second, third

def used():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) << 10

before = used()
for make in (computed, received):
    thread = threading.Thread(target=steps, args=(make,))
    thread.start()
    thread.join()
print(used() - before)
"""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, True),
        ({KEEP_FREED_MEMORY_VARIABLE: "auto"}, True),
        ({KEEP_FREED_MEMORY_VARIABLE: "off"}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "1000000"}, False),
        ({"MALLOC_MMAP_THRESHOLD_": "1000000"}, False),
        ({"MALLOC_ARENA_MAX": "2"}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=128"}, False),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, True),
    ],
)
def test_whose_choice_it_is(environment: dict[str, str], expected: bool) -> None:
    assert is_wanted(environment) is expected


def test_a_value_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="RPCDIST_KEEP_FREED_MEMORY is 'auto' or 'off', not 'yes'"):
        is_wanted({KEEP_FREED_MEMORY_VARIABLE: "yes"})


def test_what_is_set_and_what_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", freed_memory.__name__)
    taken: dict[int, int] = {}

    def mallopt(name: int, value: int) -> int:
        taken[name] = value
        return int(name != -2)

    apply(mallopt)
    assert taken == {-3: 32 << 20, -1: 256 << 20, -2: 16 << 20}
    assert "refused the settings (number, bytes) [(-2, 16777216)]" in caplog.text
    apply(None)  # another C library has none


def has_mallopt() -> bool:
    return freed_memory._find_mallopt() is not None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
def test_pages_do_not_come_again_in_each_step() -> None:
    """Of 40 MiB that each step allocates and frees; by glibc's own rule most of them do."""
    if not has_mallopt():
        pytest.skip("the C library is not glibc")
    num_pages = ROUNDS * BLOCKS * BLOCK_BYTES // 4096
    assert _num_faults("off") > num_pages // 2
    assert _num_faults("auto") < num_pages // 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
def test_a_thread_that_makes_or_receives_large_tensors_does_not_grow() -> None:
    """Its steps need 24 MiB. Without a stock, or blocks at pages, it takes 0.8 GiB with glibc 2.36."""
    if not has_mallopt() or not os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        pytest.skip("the C library is not glibc, or the kernel has no huge pages")
    assert _number_from(TENSORS, "auto") < 300 << 20


def test_torch_is_asked_unless_somebody_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "_find_mallopt", lambda: lambda name, value: 1)
    monkeypatch.setenv(TORCH_VARIABLE, "")  # so that what it is now comes back
    for before, huge_pages, expected in ((None, "/", "1"), ("0", "/", "0"), (None, "/there is none", None)):
        monkeypatch.delenv(TORCH_VARIABLE, raising=False)
        if before is not None:
            monkeypatch.setenv(TORCH_VARIABLE, before)
        monkeypatch.setattr(freed_memory, "_HUGE_PAGES", huge_pages)
        freed_memory._set_once.__wrapped__()
        assert os.environ.get(TORCH_VARIABLE) == expected


def _num_faults(choice: str) -> int:
    return _number_from(STEPS, choice)


def _number_from(program: str, choice: str) -> int:
    """The output of a program in a fresh process, where only `choice` sets its memory."""
    chosen = ("MALLOC_", "GLIBC_", TORCH_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(chosen)}
    environment[KEEP_FREED_MEMORY_VARIABLE] = choice
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return int(result.stdout)
