"""Marks of the tests that need a GPU; `pytestmark` of their modules."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

__all__ = ["WITH_A_GPU", "WITH_NCCL", "why_none"]


def why_none() -> str:
    """Why torch can use no GPU here."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hint = "" if visible is None else f", and CUDA_VISIBLE_DEVICES is {visible!r}"
    return f"torch {torch.__version__} finds none{hint}"


WITH_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.multiproc,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"needs a GPU that torch can use: {why_none()}"),
]
WITH_NCCL = [
    *WITH_A_GPU,
    pytest.mark.skipif(find_spec("cupy") is None, reason="needs CuPy with NCCL: pip install 'rpcdist[cuda]'"),
]
