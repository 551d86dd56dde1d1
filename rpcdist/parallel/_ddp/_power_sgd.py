"""The state of torch's PowerSGD hooks, for our groups."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hooks


class PowerSGDState(torch_hooks.PowerSGDState):
    """`torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState`, whose group may be ours, or None.

    It can be pickled for a checkpoint, without its group: that is the model's when the hook is registered again.

    Args:
        process_group: the ranks that reduce; the model's group by default.
        **options: torch's: `matrix_approximation_rank`, `start_powerSGD_iter`, `use_error_feedback` and so on.
    """

    def __init__(self, process_group: Any = None, *args: Any, **options: Any) -> None:
        super().__init__(process_group, *args, **options)

    def compression_stats(self) -> tuple[float, int, int]:
        """How many times fewer elements were sent, how many there were, and how many were sent."""
        rate, before, after = super().compression_stats()  # type: ignore[no-untyped-call]  # torch's method
        return rate, before, after

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = None
        for name, value in state.items():
            setattr(self, name, value)
