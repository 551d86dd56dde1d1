"""Marks of the tests that need a GPU; `pytestmark` of their modules."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

__all__ = ["WITH_A_GPU", "WITH_NCCL"]

WITH_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.multiproc,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
]
WITH_NCCL = [
    *WITH_A_GPU,
    pytest.mark.skipif(find_spec("cupy") is None, reason="needs CuPy with NCCL: pip install 'rpcdist[cuda]'"),
]
