"""What the benchmarks of data parallelism train, how they time its steps, and the lines of their tables."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from _report import Line, show

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["HEAD", "Training", "compared", "make_mlp", "make_transformer", "slower"]

HEAD: Line = ("model", "what", "unit", "ours", "torch", "ours/torch", "in single rounds", "budget", "ok")


def make_mlp() -> nn.Module:
    """10.5 million parameters in four layers."""
    from torch import nn

    sizes = (512, 2048, 2048, 2048, 512)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_transformer() -> nn.Module:
    """3.2 million parameters in four layers."""
    from torch import nn

    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


class Training:
    """A model that is trained by SGD on one batch.

    Args:
        make: the model.
        wrap: makes it parallel.
        shape: of this rank's batch.
        seed: of the batch.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        wrap: Callable[[nn.Module], nn.Module],
        shape: tuple[int, ...],
        seed: int,
    ) -> None:
        import torch

        torch.manual_seed(0)
        self.model = wrap(make())
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        torch.manual_seed(seed)
        self.inputs = torch.randn(shape)
        for _ in range(4):  # buckets are rebuilt after the first step
            self.step()

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(self.inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def time_steps(self, count: int, context: AbstractContextManager[Any] | None = None) -> tuple[float, float]:
        """The median seconds of some steps, and of processor time in them."""
        self.step()
        times, busy = [], []
        with context or nullcontext():
            for _ in range(count):
                begin, busy_begin = time.perf_counter(), time.process_time()
                self.step()
                times.append(time.perf_counter() - begin)
                busy.append(time.process_time() - busy_begin)
        return statistics.median(times), statistics.median(busy)


def slower(answers: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of both ranks, the longer time and the longer processor time."""
    times, busy = zip(*answers, strict=True)
    return max(times), max(busy)


def compared(name: str, what: str, unit: str, rounds: list[list[float]], scale: float, budget: float | None) -> Line:
    """The table's line for what was measured as [ours, torch] in each round."""
    ours, torch = (statistics.median(values) * scale for values in zip(*rounds, strict=True))
    ratios = sorted(mine / peers for mine, peers in rounds)
    ratio = statistics.median(ratios)
    return (
        name,
        what,
        unit,
        show(ours),
        show(torch),
        f"{ratio:.2f}x",
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
        "" if budget is None else f"at most {budget:g}x",
        "" if budget is None else "yes" if ratio <= budget else "NO",
    )
