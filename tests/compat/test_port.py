"""`python -m rpcdist port` changes what has to be changed, leaves all else as it is, and names what is left."""

from __future__ import annotations

import os
import re
from errno import ENOSPC
from pathlib import Path

import pytest
from docs_programs import page

from rpcdist.__main__ import main
from rpcdist.compat._porting import port


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("import torch.distributed", "import rpcdist.collectives"),
        ("import torch.distributed as dist", "import rpcdist.collectives as dist"),
        ("import os, torch.distributed as dist  # two", "import os, rpcdist.collectives as dist  # two"),
        ("from torch import distributed as dist", "from rpcdist import collectives as dist"),
        ("from torch import distributed", "from rpcdist import collectives as distributed"),
        ("from torch.distributed import all_reduce", "from rpcdist.collectives import all_reduce"),
        ("from torch.distributed import rpc", "from rpcdist import rpc"),
        ("import torch.distributed.rpc as rpc", "import rpcdist.rpc as rpc"),
        ("from torch.distributed.rpc.functions import (async_execution,  # this\n)",
         "from rpcdist.rpc.functions import (async_execution,  # this\n)"),
        ("from torch.distributed.nn.api.remote_module import RemoteModule",
         "from rpcdist.nn.api.remote_module import RemoteModule"),
        ("from torch.distributed.nn import all_reduce", "from rpcdist.nn import all_reduce"),
        ("from torch.distributed.optim import DistributedOptimizer, ZeroRedundancyOptimizer",
         "from rpcdist.optim import DistributedOptimizer, ZeroRedundancyOptimizer"),
        ("from torch.distributed.device_mesh import DeviceMesh",
         "from rpcdist.collectives.device_mesh import DeviceMesh"),
        ("from torch.distributed.algorithms.join import Join", "from rpcdist.parallel.algorithms import Join"),
        ("from torch.distributed.algorithms import Join, JoinHook",
         "from rpcdist.parallel.algorithms import Join, JoinHook"),
        ("from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook",
         "from rpcdist.parallel.comm_hooks import noop_hook"),
        ("from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks",
         "from rpcdist.parallel import comm_hooks as hooks"),
        ("from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook",
         "from rpcdist.parallel.comm_hooks import bf16_compress_hook"),
        ("from torch.nn.parallel import DistributedDataParallel as DDP",
         "from rpcdist.parallel import DistributedDataParallel as DDP"),
        ("from torch.utils.data.distributed import DistributedSampler",
         "from rpcdist.data import DistributedSampler"),
    ],
)  # fmt: skip
def test_an_import_is_changed_to_one_that_works(line: str, changed: str) -> None:
    assert port(f"{line}\n").text == f"{changed}\n"
    exec(changed, {})


@pytest.mark.parametrize(
    "line",
    [
        "from torch.distributed.elastic.multiprocessing.errors import record",
        "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper",
        "from torch.distributed import _remote_device",
        "from torch.distributed.optim import _apply_optimizer_in_backward, _NamedOptimizer",
        "from torch.nn.parallel import DataParallel",
        "from torch.utils.data import DataLoader",
        "from .torch.distributed import rpc",
        "import torch.multiprocessing as mp",
    ],
)
def test_what_stays_as_it_is(line: str) -> None:
    result = port(line)
    assert (result.text, result.left, result.changes) == (line, [], 0)


SPLIT = '''\
"""A program."""
from torch.distributed import rpc as r, all_reduce, autograd  # three
from torch.utils.data import (
    DataLoader,
    DistributedSampler,  # shards
    TensorDataset,
)
from torch.utils.data import Dataset, DistributedSampler as DS; x = 1
'''
SPLIT_PORTED = '''\
"""A program."""
from rpcdist import rpc as r, autograd  # three
from rpcdist.collectives import all_reduce
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)
from rpcdist.data import DistributedSampler  # shards
from torch.utils.data import Dataset; from rpcdist.data import DistributedSampler as DS; x = 1
'''
WRITTEN_OUT = """\
import torch.distributed  # for all_reduce
from torch import nn

def work(model, x):
    import torch.distributed as dist
    torch.distributed.all_reduce(x, op=torch.distributed.ReduceOp.SUM)  # the sum
    dist.rpc.rpc_sync("worker1", torch.add, (x, 1))
    return nn.parallel.DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))

def other(dist, torch=None):
    return dist.rpc, torch.distributed.rpc
"""
WRITTEN_OUT_PORTED = """\
import rpcdist.collectives  # for all_reduce
import torch
from torch import nn
import rpcdist.parallel

def work(model, x):
    import rpcdist.collectives as dist
    import rpcdist.rpc
    rpcdist.collectives.all_reduce(x, op=rpcdist.collectives.ReduceOp.SUM)  # the sum
    rpcdist.rpc.rpc_sync("worker1", torch.add, (x, 1))
    return rpcdist.parallel.DistributedDataParallel(rpcdist.parallel.SyncBatchNorm.convert_sync_batchnorm(model))

def other(dist, torch=None):
    return dist.rpc, torch.distributed.rpc
"""


@pytest.mark.parametrize(
    ("text", "ported"),
    [(SPLIT, SPLIT_PORTED), (WRITTEN_OUT, WRITTEN_OUT_PORTED)],
    ids=["from several places", "written out"],
)
def test_a_program_keeps_its_comments_and_its_form(text: str, ported: str) -> None:
    result = port(text)
    assert result.text == ported
    assert result.left == []
    assert port(ported).text == ported, "a second time changes nothing"
    assert port(text.replace("\n", "\r\n")).text == ported.replace("\n", "\r\n")


def test_what_cannot_be_ported_is_named_by_its_line() -> None:
    text = """\
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.checkpoint import save
from torch.distributed import *
dist.Logger
dist.elastic.multiprocessing
patch("torch.distributed.rpc.rpc_sync")
from torch . distributed import rpc
"""
    said = {left.line: f"{left.name}: {left.advice}" for left in port(text).left}
    for line, part in {
        2: "torch.distributed.fsdp.FullyShardedDataParallel: stays torch's, and works on process groups of torch. Give",
        3: "rpcdist.parallel.Pipeline",
        4: "treats each rank as a single process",
        5: "now imports the public names of rpcdist.collectives",
        6: "dist.Logger: rpcdist has nothing of this name",
        7: "write torch.distributed.elastic.multiprocessing, and import it",
        8: '"torch.distributed.rpc.rpc_sync": is a string, and stays as it is; ours is rpcdist.rpc.rpc_sync',
        9: "with spaces in it",
    }.items():
        assert part in said.pop(line)
    assert not said


def test_the_command_shows_a_diff_or_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "job.py"
    before = "# coding: latin-1\n# Zürich\nimport torch.distributed.rpc as rpc\n".encode("latin-1")
    script.write_bytes(before)
    assert main(["port", str(tmp_path)]) == 0
    assert "-import torch.distributed.rpc as rpc\n+import rpcdist.rpc as rpc\n" in capsys.readouterr().out
    assert script.read_bytes() == before
    assert main(["port", "--write", str(script)]) == 0
    assert capsys.readouterr().out == f"{script}: 1 changed\n"
    assert script.read_bytes() == before.replace(b"torch.distributed.rpc", b"rpcdist.rpc")
    script.write_text("import torch.distributed.fsdp\n")
    assert main(["port", str(script)]) == 1
    assert f"{script}:1: torch.distributed.fsdp: stays torch's" in capsys.readouterr().err
    script.write_text("print 1\n")
    assert main(["port", str(script)]) == 2
    assert f"{script}: is not Python that this version reads: Missing parentheses" in (said := capsys.readouterr().err)
    assert said.endswith("in line 1\n")
    assert main(["port", "/nowhere/train.py"]) == 2
    assert "there is no file /nowhere/train.py" in capsys.readouterr().err


def test_folders_are_searched_but_for_environments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import torch.distributed.rpc as rpc\n"
    for place in ("venv", ".venv", "project/.hidden", "project/lib"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "job.py").write_text(text)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    assert main(["port", "--write", str(tmp_path)]) == 0
    changed = {path for path in tmp_path.rglob("*.py") if path.read_text() != text}
    assert changed == {tmp_path / "project/lib/job.py"}
    (tmp_path / "empty").mkdir()
    assert main(["port", str(tmp_path / "empty")]) == 2
    assert f"there are no files *.py in {tmp_path / 'empty'}" in capsys.readouterr().err


def test_the_table_says_what_the_command_does() -> None:
    table = page("docs/coming_from_torch.md").partition("## Import lines")[2].partition("One command")[0]
    rows = re.findall(r"^\| `(torch[\w.]*)`(?:, for `(\w+)`)? \| `(rpcdist[\w.]*)` \|$", table, re.MULTILINE)
    assert len(rows) == 10
    for theirs, name, ours in rows:
        name = name or ("DistributedSampler" if theirs.startswith("torch.utils") else "")
        text, ported = (f"from {theirs} import {name}", f"from {ours} import {name}") if name else (
            f"import {theirs} as it", f"import {ours} as it")  # fmt: skip
        assert port(text).text == ported


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, write = tmp_path / "train.py", Path.write_bytes
    script.write_text("import torch.distributed as dist\n")

    def fill_disk(path: Path, content: bytes) -> int:
        write(path, content[:5])
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill_disk)
    assert main(["port", "--write", str(script)]) == 1
    assert script.read_text() == "import torch.distributed as dist\n"
    monkeypatch.undo()
    script.chmod(0o750)
    assert main(["port", "--write", str(script)]) == 0
    assert script.read_text() == "import rpcdist.collectives as dist\n" and script.stat().st_mode & 0o777 == 0o750
    assert os.listdir(tmp_path) == ["train.py"]
