"""Mixed precision of `DistributedDataParallel`: forward, backward and reductions in dtypes of fewer bytes.

The module keeps its parameters in full precision. Each forward pass runs with copies in `param_dtype`, which autograd
knows to come from them: so gradients arrive in full precision, with values that `param_dtype` can hold, and optimizers
and checkpoints see nothing but full precision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from rpcdist.errors import ConfigError
from rpcdist.parallel._ddp._tensor_tree import map_tensors

_FIELDS = ("param_dtype", "reduce_dtype", "buffer_dtype")


@dataclass(frozen=True)
class MixedPrecision:
    """The argument `mixed_precision` of `DistributedDataParallel`; only tensors of floating-point numbers are cast.

    Attributes:
        param_dtype: of parameters and inputs in the forward pass; None leaves them as they are.
        reduce_dtype: in which gradients travel and are added up; `param_dtype` by default.
        buffer_dtype: of buffers, which are cast once; None leaves them as they are.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, given: object | None) -> MixedPrecision:
        """From what the user passed: one of these, torch's `_MixedPrecision`, or None.

        Raises:
            ConfigError: it is something else, or a dtype is not one of floating-point numbers.
        """
        if given is None:
            return cls()
        dtypes: list[Any] = [getattr(given, field, given) for field in _FIELDS]
        for dtype in dtypes:
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ConfigError(
                    f"mixed_precision is a rpcdist.parallel.MixedPrecision of floating-point dtypes, not {given!r}"
                )
        return cls(*dtypes)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """In which gradients are reduced; None for their own."""
        return self.reduce_dtype or self.param_dtype

    def cast_buffers(self, module: nn.Module, ignored: Collection[str]) -> None:
        """Casts the buffers that are not ignored, in place."""
        for name, buffer in module.named_buffers():
            if self.buffer_dtype is not None and name not in ignored and buffer.is_floating_point():
                buffer.data = buffer.to(self.buffer_dtype)

    def run(
        self, module: nn.Module, ignored: Collection[str], inputs: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Any:
        """The module's forward pass with copies of its parameters, those that are not ignored, and with cast inputs."""
        dtype = self.param_dtype
        if dtype is None:
            return module(*inputs, **keywords)
        copies = {
            name: parameter.to(dtype)
            for name, parameter in module.named_parameters()
            if name not in ignored and parameter.is_floating_point()
        }
        cast = [map_tensors(value, self._cast) for value in (tuple(inputs), dict(keywords))]
        return functional_call(module, copies, *cast)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.param_dtype) if tensor.is_floating_point() else tensor
