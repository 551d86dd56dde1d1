"""`ZeroRedundancyOptimizer`: each rank keeps the optimizer's state of a part of the parameters (ZeRO, stage 1).

    model = DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)

Every rank steps its own part and sends it to the others, so the state takes 1/world_size of the memory on each, and the
results are those of the inner optimizer. Rajbhandari and others, 2019: https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup
from rpcdist.errors import ConfigError
from rpcdist.parallel._ddp._ddp_arguments import member_group
from rpcdist.parallel._ddp._parameters import broadcast_tensors
from rpcdist.parallel.algorithms import CallingJoinHook, Join, Joinable, JoinHook
from rpcdist.torch_optimizers import take_step

__all__ = ["ZeroRedundancyOptimizer"]

PARAMS: Final = "params"

Group = dict[str, Any]
"""A group of parameters with its options, as in `Optimizer.param_groups`."""


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Shards any optimizer of `torch.optim` over the ranks of a group.

    All ranks pass the same parameters in the same order, and call `step` equally often; with uneven inputs, under
    `Join([model, optimizer])`. `param_groups` holds all parameters, so schedulers and `zero_grad` work as usual;
    `optim` is the optimizer of this rank's part.

    Args:
        params: parameters, or groups of them; dense.
        optimizer_class: makes the optimizer of this rank's part.
        process_group: the ranks; all by default.
        parameters_as_bucket_view: kept for scripts; large parameters are never copied before they are sent.
        overlap_with_ddp: not supported; docs/ddp.md says why.
        **defaults: options of `optimizer_class`.

    Raises:
        ConfigError: no group exists, or an argument is wrong.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[Group],
        optimizer_class: type[Optimizer],
        process_group: ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        if overlap_with_ddp:
            raise ConfigError(
                "overlap_with_ddp and its hooks (hook_with_zero_step, hook_with_zero_step_interleaved) are not "
                "supported: leave them out, and call step() after backward()"
            )
        Joinable.__init__(self)
        self.process_group = member_group(process_group)
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._bytes_of_ranks = [0] * self.world_size
        self._owners: dict[torch.Tensor, int] = {}
        self._consolidated: list[dict[int, Any]] | None = None  # the states of the ranks' parts
        self._is_made = False
        Optimizer.__init__(self, params, defaults)
        self.optim = optimizer_class([self._part_of(group) for group in self.param_groups], **defaults)
        _copy_options(self.optim.param_groups, self.param_groups)  # options that the class adds, for schedulers
        self._is_made = True

    def __repr__(self) -> str:
        num_owned = sum(owner == self.rank for owner in self._owners.values())
        part = f"{num_owned} of {len(self._owners)} parameters"
        return f"<ZeroRedundancyOptimizer rank {self.rank} of {self.world_size}, {part}: {type(self.optim).__name__}>"

    # ------------------------------------------------------------ who owns what

    def add_param_group(self, param_group: Group) -> None:
        """Adds parameters, e.g. when layers are thawed; on all ranks."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        # The largest first, each to the rank with the smallest part: parts differ by less than the largest parameter.
        for parameter in sorted(group[PARAMS], key=lambda each: -each.nbytes):
            if parameter.layout is not torch.strided:
                raise ConfigError("ZeroRedundancyOptimizer takes only dense parameters")
            owner = self._bytes_of_ranks.index(min(self._bytes_of_ranks))
            self._bytes_of_ranks[owner] += parameter.nbytes
            self._owners[parameter] = owner
        if self._is_made:
            self.optim.add_param_group(self._part_of(group))
            _copy_options(self.optim.param_groups, self.param_groups)

    def _part_of(self, group: Group) -> Group:
        """Returns the group with only this rank's parameters, which may be none."""
        return {**group, PARAMS: [each for each in group[PARAMS] if self._owners[each] == self.rank]}

    # ------------------------------------------------------------ stepping

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Steps this rank's part, then gives all ranks all parameters.

        Args:
            closure: evaluates the model again, and returns the loss; only for optimizers that call it equally often on
                all ranks.
            **kwargs: arguments of the inner optimizer's `step`.

        Returns:
            The loss, with a closure.
        """
        Join.notify_join_context(self)
        _copy_options(self.param_groups, self.optim.param_groups)  # a scheduler may have changed them
        if closure is not None:
            kwargs["closure"] = closure
        loss: float | None = take_step(self.optim, **kwargs)
        _copy_options(self.optim.param_groups, self.param_groups)
        for rank in range(self.world_size):
            owned = [parameter for parameter, owner in self._owners.items() if owner == rank]
            broadcast_tensors(owned, self.process_group, rank)
        return loss

    # ------------------------------------------------------------ state

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Sends the state of all parts to one rank, whose `state_dict` is then complete; all ranks call it.

        Args:
            to: rank in the group.
        """
        _copy_options(self.param_groups, self.optim.param_groups)
        own = tree_map_only(  # on the CPU, as other ranks have other devices; a copy, as steps go on
            torch.Tensor, lambda each: each.detach().to("cpu", copy=True), self.optim.state_dict()["state"]
        )
        states: list[Any] | None = [None] * self.world_size if self.rank == to else None
        collectives.gather_object(own, states, group=self.process_group, group_dst=to)
        self._consolidated = states

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the last `consolidate_state_dict`, in the form of the inner optimizer.

        So it can be loaded with another number of ranks, or into such an optimizer alone.

        Raises:
            RuntimeError: the state has not been sent to this rank.
        """
        if self._consolidated is None:
            raise RuntimeError(
                f"Optimizer state has not been consolidated on this rank. Please call `consolidate_state_dict(to="
                f"{self.rank})` on all ranks beforehand if you meant to save the global state."
            )
        state = {}
        for rank, part in enumerate(self._consolidated):
            numbers = self._numbers_of(rank)
            state.update({numbers[local]: value for local, value in part.items()})
        return {"state": dict(sorted(state.items())), "param_groups": self._numbered_groups()}

    def _all_parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group[PARAMS]]

    def _numbers_of(self, rank: int) -> list[int]:
        """Returns the numbers of a rank's parameters, in the order of its optimizer."""
        return [number for number, each in enumerate(self._all_parameters()) if self._owners[each] == rank]

    def _numbered_groups(self) -> list[Group]:
        numbered, start = [], 0
        for group in self.param_groups:
            numbered.append({**group, PARAMS: list(range(start, start + len(group[PARAMS])))})
            start += len(group[PARAMS])
        return numbered

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a complete state, of this class or of the inner optimizer; all ranks call it.

        Raises:
            ValueError: the state belongs to other parameters.
        """
        groups = state_dict["param_groups"]
        if [len(group[PARAMS]) for group in groups] != [len(group[PARAMS]) for group in self.param_groups]:
            raise ValueError("the loaded state dict has other groups of parameters than this optimizer")
        ours = self._numbers_of(self.rank)
        parts, first = [], 0
        for group, part in zip(groups, self.optim.param_groups, strict=True):
            parts.append({**group, PARAMS: list(range(first, first + len(part[PARAMS])))})
            first += len(part[PARAMS])
        saved = [number for group in groups for number in group[PARAMS]]
        state = {local: state_dict["state"][saved[number]] for local, number in enumerate(ours)
                 if saved[number] in state_dict["state"]}  # fmt: skip
        self.optim.load_state_dict({"state": state, "param_groups": parts})
        _copy_options(self.optim.param_groups, self.param_groups)
        self._consolidated = None

    # ------------------------------------------------------------ uneven inputs

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Returns a hook that steps with the others; put the model before it, as in `Join([model, optimizer])`.

        It uses the gradients that the model's hook has left: the averages over the ranks that still train.
        """
        return CallingJoinHook(self.step)

    @property
    def join_device(self) -> torch.device:
        return self._all_parameters()[0].device

    @property
    def join_process_group(self) -> ProcessGroup:
        return self.process_group


def _copy_options(sources: list[Group], targets: list[Group]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.update({name: value for name, value in source.items() if name != PARAMS})
