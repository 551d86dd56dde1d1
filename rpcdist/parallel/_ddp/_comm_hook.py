"""Communication hooks of the user, which replace the average of a bucket's gradients.

A hook is the user's code, so its result is checked, and errors name the hook.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from rpcdist.errors import ConfigError
from rpcdist.parallel._ddp._buckets import DenseBucket, view_like
from rpcdist.parallel._ddp._ddp_errors import list_names

KEEP_COMPLEX = ("allreduce_hook", "noop_hook", "post_localSGD_hook")
"""The hooks of this package and of torch that keep the imaginary part of gradients, by name."""
OURS_KEEP_COMPLEX = (
    "bf16_compress_hook", "bf16_compress_wrapper_hook", "fp16_compress_hook", "fp16_compress_wrapper_hook",
)  # fmt: skip
"""Further hooks, which keep it in this package but not in torch; for a wrapper, the wrapped hook counts as well."""


class GradBucket:
    """The bucket that a comm hook gets. Valid until the hook's future is done."""

    def __init__(self, bucket: DenseBucket, is_last: bool) -> None:
        self._bucket = bucket
        self._is_last = is_last
        self._buffer = bucket.buffer

    def __repr__(self) -> str:
        return f"<GradBucket {self._bucket!r}>"

    def index(self) -> int:
        """Returns the number of the bucket in the order of communication."""
        return self._bucket.number

    def buffer(self) -> torch.Tensor:
        """Returns the gradients of this rank as one flat tensor, which a hook may change in place."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Returns views of `buffer` in the shapes of the parameters; complex parts are the last dimension."""
        parameters = self.parameters()
        if self._has_parts(self._buffer):  # then all numbers are complex
            parameters = [torch.view_as_real(parameter.detach()) for parameter in parameters]
        parts = self._buffer.split([parameter.numel() for parameter in parameters])
        return [view_like(part, parameter) for part, parameter in zip(parts, parameters, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        """Returns the parameters, in the order of `gradients`."""
        return [member.tensor for member in self._bucket.members]

    def names(self) -> list[str]:
        """Returns the names of the parameters in the module."""
        return [member.name for member in self._bucket.members]

    def is_last(self) -> bool:
        """Returns whether this is the last bucket of the iteration."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the tensor that `buffer` returns by a flat one of the same size, which may have another dtype.

        Complex gradients may be replaced by twice as many real numbers: the parts of each, as in `torch.view_as_real`.

        Raises:
            ConfigError: the number of elements differs.
        """
        count = self._bucket.buffer.numel()
        if self._has_parts(buffer):
            if buffer.numel() == count:
                raise ConfigError(
                    f"the buffer of bucket {self.index()} is complex; {buffer.dtype} would drop imaginary parts. Use "
                    "torch.view_as_real(bucket.buffer()).view(-1)"
                )
            count *= 2
        if buffer.numel() != count:
            raise ConfigError(f"the buffer of bucket {self.index()} must have {count} elements, not {buffer.numel()}")
        self._buffer = buffer

    def _has_parts(self, buffer: torch.Tensor) -> bool:
        """Whether a buffer contains the real and imaginary parts of complex gradients."""
        return self._bucket.buffer.is_complex() and not buffer.is_complex()


CommHook = Callable[[Any, GradBucket], "torch.futures.Future[torch.Tensor]"]


def check_comm_hook(hook: object) -> None:
    """Raises TypeError or ConfigError if an object cannot be a comm hook."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    try:
        signature = inspect.signature(hook)
    except ValueError:  # it has no signature
        return
    try:
        signature.bind(None, None)
    except TypeError as exc:
        names = list(signature.parameters)
        raise ConfigError(
            f"a communication hook must take two arguments, state and bucket, but this one takes {names}"
        ) from exc
    for parameter in list(signature.parameters.values())[1:2]:
        if _means_another(parameter.annotation, "GradBucket"):
            raise ConfigError(
                f"Communication hook: bucket annotation should be dist.GradBucket, not {parameter.annotation!r}"
            )
    returns = signature.return_annotation
    if returns is None or _means_another(returns, "Future"):
        raise ConfigError(
            f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor], not {returns!r}"
        )


def _means_another(annotation: object, name: str) -> bool:
    """Whether an annotation is a class with another name; ignores texts and generic types."""
    anything = (inspect.Parameter.empty, object, Any)
    return isinstance(annotation, type) and annotation not in anything and annotation.__name__ != name


def name_of_hook(hook: object) -> str:
    """Returns the name of a hook for errors and logging data."""
    function = getattr(hook, "func", hook)  # of a functools.partial
    return str(getattr(function, "__name__", None) or type(function).__name__)


def module_of_hook(hook: object) -> str:
    """Returns the name of the module that defines a hook; empty if it has none."""
    return str(getattr(getattr(hook, "func", hook), "__module__", ""))


def refuse_complex(hook: object, dtypes: Iterable[torch.dtype]) -> None:
    """Raises ConfigError if a hook of this package or of torch would lose the imaginary part of gradients.

    A wrapper of this package that keeps the imaginary part counts as the hook that it wraps, its `__wrapped__`.
    """
    module, name = module_of_hook(hook), name_of_hook(hook)
    is_ours = module.startswith("rpcdist.parallel.")
    if not (is_ours or module.startswith("torch.distributed.")):
        return
    if name in KEEP_COMPLEX or (is_ours and name in OURS_KEEP_COMPLEX):
        refuse_complex(getattr(hook, "__wrapped__", None), dtypes)
        return
    if any(dtype.is_complex for dtype in dtypes):
        raise ConfigError(
            f"the communication hook {name} does not support complex parameters: it would drop the imaginary parts of "
            "their gradients. Use rpcdist.parallel.comm_hooks.bf16_compress_hook, or no hook"
        )


class RegisteredHook(NamedTuple):
    """A hook with its state; `leaves_equal_bits` if it is known to leave the same bits on all ranks."""

    hook: CommHook
    state: object
    leaves_equal_bits: bool
    name: str = ""

    def call(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Calls the hook.

        Raises:
            ConfigError: the hook did not return a future.
        """
        found: object = self.hook(self.state, bucket)
        if not isinstance(found, torch._C.Future):
            what = "None: its `return` is missing" if found is None else f"a {type(found).__name__}"
            raise self._error(bucket, f"must return a torch.futures.Future, not {what}")
        return found  # type: ignore[return-value]  # torch's own class, or the base of it that C++ makes

    def finish(self, bucket: GradBucket, future: torch.futures.Future[torch.Tensor], timeout_s: float) -> torch.Tensor:
        """Waits for the result of a future of `call`: the gradients, flat.

        Raises:
            ConfigError: the result is not a tensor like the bucket's buffer, or does not come in time.
        """
        done = threading.Event()
        torch._C.Future.add_done_callback(future, lambda _: done.set())
        if not done.wait(timeout_s):
            raise self._error(
                bucket, f"returned a future that was not done within {timeout_s:g} s, the timeout of the group"
            )
        result: Any = future.wait()
        if isinstance(result, list | tuple) and len(result) == 1:
            result = result[0]
        problem = _problem_of_result(result, bucket.buffer())
        if problem:
            wanted = _describe(bucket.buffer())
            raise self._error(bucket, f"must return a dense tensor like bucket.buffer(), {wanted}; {problem}")
        flat: torch.Tensor = result.detach().reshape(-1)
        return flat

    def _error(self, bucket: GradBucket, problem: str) -> ConfigError:
        return ConfigError(
            f"the communication hook {name_of_hook(self.hook)} {problem} (bucket {bucket.index()}, with the gradients "
            f"of {list_names(bucket.names())})"
        )


def _problem_of_result(result: object, buffer: torch.Tensor) -> str:
    """Returns the problem of the result of a hook's future; empty if it has none."""
    if isinstance(result, list | tuple):
        return f"its future has {len(result)} values"
    if not isinstance(result, torch.Tensor):
        return f"its future has a {type(result).__name__}"
    is_dense = result.layout is torch.strided and not result.is_nested and not result.is_quantized
    if is_dense and result.numel() == buffer.numel():
        if result.dtype is buffer.dtype and result.device == buffer.device:
            return ""
    return f"its future has {_describe(result)}"


def _describe(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "a nested tensor"
    layout = "" if tensor.layout is torch.strided else f" and layout {tensor.layout}"
    return f"{tensor.numel()} elements of {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}{layout}"
