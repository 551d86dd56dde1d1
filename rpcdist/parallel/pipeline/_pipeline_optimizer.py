"""The driver's view of the optimizers of all stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rpcdist.parallel.pipeline._runners import Runners
from rpcdist.rpc._executors.async_forms import async_form, off_loop


class PipelineOptimizer:
    """The optimizers of all stages, used as one. Made by `Pipeline.make_optimizer`."""

    def __init__(self, runners: Runners, number: int) -> None:
        self._runners = runners
        self._number = number

    @off_loop("await optimizer.step_async(...)")
    def step(self) -> None:
        """One step of every stage's optimizer, all at the same time."""
        self._runners.ask("optimizer_step", self._number)

    step_async = async_form(step)

    @off_loop("await optimizer.zero_grad_async(...)")
    def zero_grad(self) -> None:
        """Sets the gradients of all parameters to None."""
        self._runners.ask("zero_grad")

    zero_grad_async = async_form(zero_grad)

    @off_loop("await optimizer.change_async(...)")
    def change(self, **options: Any) -> None:
        """Sets options of all parameter groups: `optimizer.change(lr=0.01)`."""
        self._runners.ask("optimizer_change", self._number, options)

    change_async = async_form(change)

    @off_loop("await optimizer.state_dict_async(...)")
    def state_dict(self) -> dict[int, dict[str, Any]]:
        """The state of each stage's optimizer, by stage."""
        found: dict[int, dict[str, Any]] = {}
        for of_worker in self._runners.ask("optimizer_state_dict", self._number):
            found.update(of_worker)
        return dict(sorted(found.items()))

    state_dict_async = async_form(state_dict)

    @off_loop("await optimizer.load_state_dict_async(...)")
    def load_state_dict(self, state: Mapping[int, dict[str, Any]]) -> None:
        """Loads a state that `state_dict` returned."""
        self._runners.ask("optimizer_load_state_dict", self._number, dict(state))

    load_state_dict_async = async_form(load_state_dict)
