"""Figures in the pages are those of the code, and the identifiers in the pages and in the comments exist."""

from __future__ import annotations

import ast
import importlib
import io
import keyword
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import house_size
import pytest
from docs_programs import PAGES, ROOT, page
from prose import texts_of_source

FRAMES = "rpcdist.transport._framing.frames"
INCOMING = "rpcdist.transport._framing.incoming"
STRIPING = "rpcdist.transport.striping"
LIMITS = "rpcdist.time_limits"
POLLING = "rpcdist.transport._channels.polling_and_signals"

FIGURES: list[tuple[str, str, str, str]] = [  # page, text before the figure, constant, text after it
    ("architecture", "Each begins with a header of ", f"{FRAMES}:_HEAD_BYTES", " bytes"),
    ("architecture", "into one envelope of about ", f"{FRAMES}:MAX_ENVELOPE_BYTES", " at most"),
    ("architecture", "the size of a buffer of more than ", "rpcdist.rpc._values.buffers:INLINE_LIMIT", ""),
    ("architecture", "The bytes follow in chunks of ", f"{FRAMES}:CHUNK_BYTES", ", each alone"),
    ("architecture", "the receiver grants credit for ", f"{FRAMES}:CHUNK_WINDOW_BYTES", " of chunks"),
    ("architecture", "a quarter of `peer_timeout` (", f"{LIMITS}:PEER_TIMEOUT_S", ")"),
    ("architecture", "A store's request or reply of more than ", "rpcdist.transport.keys:LARGEST_UNCUT_BYTES", ""),
    ("architecture", "2 by default, or the number 0 to ", f"{INCOMING}:MAX_CONNECTIONS", " in"),
    ("architecture", "takes ", "rpcdist.transport._channels.stream_sockets:FAR_ROUND_TRIP", " or more, there are"),
    ("architecture", "or more, there are ", f"{INCOMING}:MAX_CONNECTIONS", ", and messages"),
    ("architecture", "and messages of ", f"{STRIPING}:_MIN_FAR_BYTES", " count as large"),
    ("architecture", "at the second message of ", f"{STRIPING}:MIN_STRIPED_BYTES", " or more"),
    ("architecture", "each payload connection (at most ", f"{INCOMING}:_FEW_CONNECTIONS", " if they are"),
    ("architecture", "and sent in pieces of ", f"{STRIPING}:PIECE_BYTES", ""),
    ("architecture", "| a buffer of ", "rpcdist.transport.lending:LEND_FROM_BYTES", " or more |"),
    ("architecture", "if nothing was written for ", f"{LIMITS}:BURST_GAP_S", ""),
    ("architecture", "when it queues the ", "rpcdist.transport.session_writer:FLUSH_FRAMES", "nd message of a burst"),
    ("architecture", "or after ", f"{LIMITS}:BATCH_DELAY_S", " (4 ms if all earlier ones"),
    ("architecture", "socket buffers up to ", "rpcdist.transport._channels.socket_channel:_SOCKET_BYTES", " if the"),
    ("architecture", "a TCP socket ", "rpcdist.transport._channels.socket_channel:_UNSENT_BYTES", " of unsent bytes"),
    ("architecture", "then it waits for at most ", f"{LIMITS}:POOL_READ_S", ", which counts as blocked"),
    ("architecture", "A message of ", "rpcdist.rpc._values.buffers:TAKES_LONG_FROM_BYTES", " or more is copied first"),
    ("architecture", "when ", "rpcdist.rpc._executors.deferred_replies:MAX_HELD", " answers wait"),
    ("architecture", "answers wait, or after ", f"{LIMITS}:ANSWER_HOLD_S", ""),
    ("architecture", "`polling_and_signals.py`): for at most ", f"{POLLING}:LIMIT_NS", ", and it yields"),
    ("architecture", "Payloads up to ", "rpcdist.rpc._values.buffers:INLINE_LIMIT", " travel inside their message"),
    ("glossary", "the part that is alone in its envelope | up to ", f"{FRAMES}:CHUNK_BYTES", " |"),
    ("glossary", "beside the frame | more than ", "rpcdist.rpc._values.buffers:INLINE_LIMIT", " |"),
    ("glossary", "in one lent segment | up to ", "rpcdist.transport.lending:PACK_BYTES", " |"),
    ("glossary", "all queued frames, or one chunk | up to ", f"{FRAMES}:MAX_ENVELOPE_BYTES", " |"),
    ("glossary", "the bytes of one write | ", f"{STRIPING}:PIECE_BYTES", " |"),
    ("rpc", "A value of more than ", "rpcdist.rpc._values.buffers:INLINE_LIMIT", " travels in chunks"),
    ("rpc", "travels in chunks of ", f"{FRAMES}:CHUNK_BYTES", ""),
    ("rpc", "from ", "rpcdist.transport.lending:LEND_FROM_BYTES", " on, through"),
    ("performance", "shared memory for tensors of ", "rpcdist.transport.lending:LEND_FROM_BYTES", " or more"),
    ("performance", "16; by default 2, and ", f"{INCOMING}:MAX_CONNECTIONS", " if a round trip"),
    (
        "performance",
        "if a round trip takes ",
        "rpcdist.transport._channels.stream_sockets:FAR_ROUND_TRIP",
        " or more",
    ),
    ("performance", "that waits for a reply polls for up to ", f"{POLLING}:LIMIT_NS", " before it sleeps"),
    ("performance", "to keep ", "rpcdist.freed_memory:TRIM_FROM_BYTES", " of freed memory"),
    ("performance", "to align tensors of ", "rpcdist.freed_memory:LARGE_BYTES", " and more"),
    ("concurrency", "when the oldest job has waited for ", f"{LIMITS}:POLL_S", ""),
    ("concurrency", "whenever no job has ended for ", f"{LIMITS}:POOL_STALL_S", ""),
    ("concurrency", "if no job ends for ", f"{LIMITS}:POOL_EXHAUSTED_LIMIT_S", ", the pool logs"),
    ("concurrency", "reads from the same connection for up to ", f"{LIMITS}:POOL_READ_S", ""),
    ("values", "A buffer of up to ", "rpcdist.rpc._values.buffers:INLINE_LIMIT", " travels inside the message"),
    ("values", "a buffer of ", "rpcdist.transport.lending:LEND_FROM_BYTES", " or more is not sent"),
    ("values", "make the copy together from ", "rpcdist.transport.memory_copies:TWO_THREADS_FROM_BYTES", " on"),
    ("values", "Buffers beyond ", "rpcdist.transport.lending:MAX_LENT_BYTES", " per direction"),
    ("values", "puts those below ", "rpcdist.transport.lending:PACK_BELOW_BYTES", " one after the other"),
    ("values", "into segments of up to ", "rpcdist.transport.lending:PACK_BYTES", ""),
    ("values", "From ", "rpcdist.rpc._values.tensor_runs:RUNS_FROM", " tensors in one value on"),
    ("collectives", "the sockets, at most ", "rpcdist.collectives._transports.p2p.peer_sockets:MOST_BYTES", " of each"),
    ("collectives", "It spins for up to ", f"{LIMITS}:SPIN_LIMIT_S", " before it sleeps"),
    ("collectives", "a slice has ", "rpcdist.collectives._transports.shm.routes:BUFFER_BYTES", ""),
    ("gpus", "Each chunk of ", "rpcdist.rpc._values.buffers:STAGED_BYTES", " arrives in a part of the ring"),
    ("gpus", "the tensor has less than ", "rpcdist.rpc._devices.pinned_arrivals:STAGED_FROM_BYTES", ";"),
    ("gpus", "has a ring of pinned memory, ", "rpcdist.rpc._devices.pinned_arrivals:RING_BYTES", " for each process"),
    ("security", "A turn ends after ", f"{LIMITS}:READ_TURN_S", ", between two envelopes"),
    ("security", "an envelope has at most ", f"{FRAMES}:MAX_FRAMES", " messages"),
]


def in_words(name: str, value: float) -> str:
    """A constant as pages write it; the end of its name is its unit."""
    if name.endswith("_NS"):
        name, value = "_S", value / 1e9
    if name.endswith(("_S", "_TRIP")):
        for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
            if value >= size:
                return f"{value / size:g} {unit}"
    if name.endswith(("_BYTES", "INLINE_LIMIT")) and value >= 1024:
        return f"{value / (1 << 20):g} MiB" if value % (1 << 20) == 0 else f"{value / (1 << 10):g} KiB"
    return f"{value:,}"


@pytest.mark.parametrize(("name", "before", "constant", "after"), FIGURES)
def test_a_figure_is_that_of_the_code(name: str, before: str, constant: str, after: str) -> None:
    module, _, attribute = constant.partition(":")
    figure = in_words(attribute, getattr(importlib.import_module(module), attribute))
    text = " ".join(page(f"docs/{name}.md").split())
    assert f"{before}{figure}{after}" in text, f"docs/{name}.md must say {before}{figure}{after}: {constant}"


IDENTIFIER = re.compile(r"`(?P<path>[A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`")
IMPORTED = {*sys.stdlib_module_names, "torch", "nn"}
"""Roots of names that are looked up in the modules themselves."""

FOREIGN = set(
    """
    ActorUnavailableError FailureConfig ObjectRef concurrency_groups max_concurrency was_current_actor_reconstructed
    DDPStrategy NetworkPolicy httpGet
    ReceiveMessageOperation SendMessageOperation grpc_slice_from_copied_buffer
    CAP_SYS_ADMIN F_SEAL_FUTURE_WRITE PR_SET_PDEATHSIG SO_REUSEPORT nohup net.core.wmem_max net.ipv4.tcp_wmem numactl
    tcp_info tcp_rmem sock_accept sock_recv
    CUDA_DEVICE_MAX_CONNECTIONS cuStreamWaitValue32 cuStreamWriteValue32 cudaMallocAsync expandable_segments
    ncclCommSplit
    _end_coalescing _register_on_completion_hook _start_coalescing _wait_for_pending_works boolean_dispatch
    share_memory_ start_localSGD_iter test_profiler_rpc_key_names trigger_sync_in_backward use_error_feedback
    """.split()
)
"""Names of Ray, Lightning, Kubernetes, gRPC, Linux, CUDA and torch that no line of code here has."""

PLACEHOLDERS = set(
    "CA Class.method NAME.ATTEMPT.log Next _s af bf df n01 nn.BatchNorm optimizer.state.0.exp_avg unless_gone".split()
)
"""Examples and parts of names."""


@pytest.fixture(scope="module")
def known() -> set[str]:
    """The words of all code without docstrings and comments, of messages and of settings, and the names of files."""
    found = {*keyword.kwlist, *FOREIGN, *PLACEHOLDERS, *(path.name for path in ROOT.glob("*.md"))}
    for folder in ("rpcdist", "autograd", "collectives", "tests", "tools", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= {*path.relative_to(ROOT).parts, path.stem, *words_of(path)}
    for path in (ROOT / "proto").glob("*.proto"):
        found.update(re.findall(r"\w+", path.read_text()))
    for name in ("Makefile", "pyproject.toml", "rpcdist/_dashboard/page/page.js"):
        found.update(re.findall(r"\w+", page(name)))
    metrics = {
        name.replace(".", "_") for name in re.findall(r'"((?:rpc|rpcdist)\.[\w.]+)"', page("rpcdist/metrics.py"))
    }
    return found | {f"{name}{unit}" for name in metrics for unit in ("", "_seconds", "_total")}


def words_of(path: Path) -> Iterator[str]:
    source = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.string
    tree = ast.parse(source)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield from re.findall(r"\w+", node.value)


def exists(path: str) -> bool:
    module, *attributes = path.split(".")
    try:
        found = importlib.import_module({"nn": "torch.nn"}.get(module, module))
        for name in attributes:
            if not hasattr(found, name):
                importlib.import_module(f"{found.__name__}.{name}")
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return False
    return True


def test_identifiers_in_prose_exist(known: set[str]) -> None:
    pages = [path for path in PAGES if path.name != "CHANGELOG.md"]  # which has names that are gone
    texts: dict[str, Iterator[str]] = {path.name: iter([path.read_text()]) for path in pages}
    texts |= {str(path.relative_to(ROOT)): texts_of_source(path) for path in house_size.sources()}
    unknown = defaultdict(set)
    for name, found in texts.items():
        for match in IDENTIFIER.finditer("\n".join(found)):
            path = match["path"]
            if path not in known and not known.issuperset(path.split(".")):
                if not (path.split(".")[0] in IMPORTED and exists(path)):
                    unknown[path].add(name)
    assert not unknown, f"no code has these names: {dict(unknown)}"


def test_an_identifier_that_is_gone_is_found(known: set[str]) -> None:
    assert "CONTEXT_DROP_DELAY_S" in known and "DROP_" + "DELAY_S" not in known
    assert not exists("torch.distributed.no_such_name")


LABORATORY = re.compile(r"\b\d+(?:\.\d+)?x\b|\b[Mm]edians? of\b|\bat a load\b|\d busy cores\b")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_guide_has_no_figures_of_a_laboratory(path: Path) -> None:
    """`benchmarks/NOTES.md` has them; the page on performance has the expected costs, with the machine."""
    if path.name not in {"CHANGELOG.md", "CONTRIBUTING.md", "performance.md"}:
        assert not LABORATORY.findall(path.read_text())


@pytest.mark.parametrize("text", ["takes 0.6x of the time", "the median of 9 rounds", "0.45 s at a load of 6"])
def test_a_figure_of_a_laboratory_is_found(text: str) -> None:
    assert LABORATORY.search(text)
