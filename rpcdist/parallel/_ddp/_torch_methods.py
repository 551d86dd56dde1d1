"""Methods of torch's DistributedDataParallel that scripts call, and that the training itself does not need."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from rpcdist.errors import ConfigError
from rpcdist.parallel._ddp._logging_data import SampledIteration
from rpcdist.parallel._ddp._parameters import trainable
from rpcdist.parallel._ddp._reducer import Reducer
from rpcdist.parallel._ddp._tensor_tree import move_to


class TorchMethods(nn.Module):
    """See `DistributedDataParallel`, whose part this is."""

    dim: int
    device_type: str
    module: nn.Module
    parameters_to_ignore: Collection[str]
    mixed_precision: object | None
    reducer: Reducer
    _delayed: object | None
    _logged: SampledIteration

    broadcast_bucket_size = 250 << 20  # bytes; for functions of torch that ask for it

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether the program ends each backward pass that averages by `finalize_backward`; False at first.

        Until then the reductions go on beside what the program does, and `.grad` has this rank's own gradients. Set it
        before a forward pass, the same on all ranks.
        """
        return self.reducer.by_hand

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self.reducer.end_by_hand(required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward` must wait for the end of the backward pass; ask after the forward pass.

        Otherwise a hook may call it as well, once all gradients are there.
        """
        late = self.mixed_precision is not None or self._delayed is not None or self.reducer.ends_after_pass()
        return self.reducer.by_hand and late

    def finalize_backward(self) -> None:
        """Waits until the gradients of a backward pass are averaged, and puts the averages into `.grad`.

        Call it once for each backward pass outside of `no_sync`, before the next pass, and before anything else changes
        gradients or parameters: after `backward`, or in a hook of the pass.

        Raises:
            DataParallelError: `require_manual_backward_finalization` is False, gradients are missing, or there are none
                to average; gradients or parameters were changed since they were ready.
        """
        self.reducer.finalize()

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads a state of this class, or one of the bare module, whose names lack the prefix `module.`."""
        if not any(name.startswith("module.") for name in state_dict):
            state_dict = {f"module.{name}": value for name, value in state_dict.items()}
        return super().load_state_dict(state_dict, *args, **kwargs)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Leaves parameters and buffers, by their names in the module, to each rank. Call it before wrapping."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """The parameters that are averaged now, in their order, and whether the gradient of each is sparse."""
        found = trainable(self.module, self.parameters_to_ignore)
        return [named.tensor for named in found], [named.sparse for named in found]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
        """The names of parameters by their places in a list.

        Raises:
            ConfigError: the list is not that of `_build_params_for_reducer`.
        """
        places = {parameter: place for place, parameter in enumerate(parameters)}
        names: dict[int, str] = {}
        for named in trainable(self.module, self.parameters_to_ignore):
            if named.tensor not in places:
                raise ConfigError(f"Param with name {named.name} found in module parameters, but not in this list")
            names[places[named.tensor]] = named.name
        if len(names) != len(places):
            raise ConfigError(
                f"Expected param to name mapping to cover all parameters: {len(places)} are in this list, and "
                f"{len(names)} of them are those of the module that require gradients"
            )
        return names

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Has the logging data tell the times of one iteration in so many after the first ten; the default is 100."""
        if sample_rate < 1:
            raise ConfigError("DDP runtime logging sample rate should be equal or greater than 1")
        self._logged.sample_rate = sample_rate

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Kept for scripts: outputs are never copied."""

    def _register_fused_optim(self, optim: object, *args: object, **kwargs: object) -> NoReturn:
        raise ConfigError(
            "_register_fused_optim is not supported; step the optimizer after backward, or give the parameters "
            "optimizers with torch.distributed.optim._apply_optimizer_in_backward"
        )

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[int | torch.device]) -> Any:
        """Cuts positional and keyword arguments along `dim`, one part for each device."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        """Joins the outputs of several devices along `dim`."""
        return gather(outputs, output_device, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> tuple[tuple[Any], tuple[Any]]:
        """Positional and keyword arguments on a device, each as a tuple of one: for that device."""
        device = torch.device(self.device_type, device_id)
        return (move_to(inputs, device),), (move_to(kwargs, device),)
