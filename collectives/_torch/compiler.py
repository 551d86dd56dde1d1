"""Functions that `torch.compile` runs as they are, in the middle of what it compiles."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch


def hide_from_compiler(*classes: type) -> None:
    """Hides the methods of the classes, and what these call.

    torch's compiler would trace them, and from there the engine of a group. `torch.compiler.disable` does the same, but
    imports the compiler.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for attribute in (attribute for cls in classes for attribute in vars(cls).values()):
        function = attribute.fget if isinstance(attribute, property) else getattr(attribute, "__func__", attribute)
        if isinstance(function, FunctionType):
            frames.set_code_exec_strategy(function.__code__, skip)


def hide_frame_from_compiler(function: Any) -> None:
    """Hides a function; what it calls is compiled."""
    frames = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
