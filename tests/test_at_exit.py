"""Parts that end with the process end after the program's own callbacks, also if they registered first."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rpcdist.at_exit import ending_error
from rpcdist.testing import Program
from rpcdist.testing.limits import LIMIT_S

PRINTS = """
    import atexit, multiprocessing, multiprocessing.util, os, sys
    from functools import partial

    def early():
        print("early callback")

    atexit.register(early)
    from rpcdist.at_exit import register_at_exit, unregister_at_exit

    def fails():
        print("fails")
        sys.exit(7)

    def use():
        withdrawn = partial(print, "withdrawn")
        for action in (partial(print, "last"), withdrawn, fails, partial(print, "first")):
            register_at_exit(action)
        unregister_at_exit(withdrawn)
        atexit.register(print, "late callback")
"""


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise KeyboardInterrupt"])
def test_actions_follow_all_callbacks_in_reverse_order(ending: str) -> None:
    with Program(f"{PRINTS}\n    use()\n    {ending}") as program:
        ended = program.end()
    if ending == "raise KeyboardInterrupt" and sys.version_info >= (3, 13) and ended == 1:
        ended = -signal.SIGINT  # Python 3.13 forgets the interrupt where code is compiled so late, as for a traceback
    assert ended == {"": 0, "sys.exit(3)": 3}.get(ending, -signal.SIGINT)
    expected = ["late callback", "early callback", "first", "fails", "last"]
    assert [line for line in program.output.splitlines() if line in expected] == expected, program.output


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        pytest.param("raise ValueError('no data')", "ValueError('no data')", id="the program ends with it"),
        pytest.param("raise KeyboardInterrupt", "KeyboardInterrupt()", id="Ctrl-C"),
        pytest.param("sys.exit('no data')", "None", id="the program says so itself"),
        pytest.param("sys.ps1 = '>>> '; raise ValueError", "None", id="an interactive interpreter goes on"),
        pytest.param(
            "exec('try: raise ValueError\\nexcept ValueError: pass')", "None", id="the program has handled it"
        ),
    ],
)
def test_an_action_learns_the_error_with_which_the_program_ends(ending: str, error: str) -> None:
    code = f"""
    import sys
    from rpcdist.at_exit import ending_error, register_at_exit

    register_at_exit(lambda: print("ends with", repr(ending_error())))
    {ending}
    """
    with Program(code) as program:
        program.end()
    assert f"ends with {error}\n" in program.output, program.output


def test_a_clean_up_learns_the_error_that_passes_it() -> None:
    error = ValueError("no data")
    seen = [ending_error()]
    with pytest.raises(ValueError, match="no data"):
        try:
            raise error
        finally:
            seen.append(ending_error())
    assert seen == [None, error] and ending_error() is None


def test_a_child_that_was_forked_leaves_the_actions_to_its_parent() -> None:
    code = """
    use()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print("the parent ends")
    """
    with Program(PRINTS + code) as program:
        assert program.end() == 0
    of_child, _, of_parent = program.output.partition("the parent ends")
    assert "callback" in of_child and "first" not in of_child
    assert of_parent.index("early callback") < of_parent.index("first") < of_parent.index("last")


CHILD = """
import atexit, multiprocessing, multiprocessing.util, sys
from functools import partial
from rpcdist.at_exit import register_at_exit

def child():
    multiprocessing.util.Finalize(None, print, ("finalizer",), exitpriority=-5)
    atexit.register(print, "callback")
    for name in ("last", "first"):
        register_at_exit(partial(print, name))

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
    process.start()
    process.join()
    print("ended with", process.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing(method: str, tmp_path: Path) -> None:
    """Their own finalizers and callbacks come first. Before Python 3.13 a forked child calls no callbacks."""
    program = tmp_path / "program.py"
    program.write_text(CHILD)
    ran = subprocess.run([sys.executable, "-u", program, method], capture_output=True, text=True, timeout=LIMIT_S)
    *before, first, last, end = ran.stdout.splitlines()
    assert (first, last, end, ran.stderr) == ("first", "last", "ended with 0", "")
    calls_back = method == "spawn" or sys.version_info >= (3, 13)
    assert sorted(before) == (["callback", "finalizer"] if calls_back else ["finalizer"])
