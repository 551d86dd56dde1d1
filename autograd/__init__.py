"""Distributed autograd: backward passes through remote procedure calls. It is installed as `rpcdist.autograd`.

The names are those of `torch.distributed.autograd`; `backward_async`, `queue_callback`, `draw`, `profile` and the
errors are ours.
"""

if __name__ != "rpcdist.autograd":
    raise ImportError(
        "this folder is installed as rpcdist.autograd; write `import rpcdist.autograd`, and take the repository's root "
        "off sys.path (run your script from another folder, or install the project with `pip install -e .`)"
    )

from rpcdist.autograd._autograd_worker import AutogradWorker as AutogradWorker
from rpcdist.autograd._context import Span
from rpcdist.autograd._draw import draw, profile
from rpcdist.autograd._interface import (  # noqa: F401  # torch has the private ones here, and programs use them
    Mode,
    _current_context,
    _get_debug_info,
    _get_max_id,
    _init,
    _is_valid_context,
    _new_context,
    _release_context,
    _retrieve_context,
    backward,
    backward_async,
    context,
    get_gradients,
    is_available,
)
from rpcdist.autograd._message_nodes import Captured, is_in_backward, queue_callback
from rpcdist.errors import AutogradError, BackwardError, ContextNotFound

__all__ = [
    "AutogradError", "BackwardError", "Captured", "ContextNotFound", "Mode", "Span", "backward", "backward_async",
    "context", "draw", "get_gradients", "is_available", "is_in_backward", "profile", "queue_callback",
]  # fmt: skip
