"""The errors of data parallel training; they name ranks and parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from rpcdist.errors import CollectiveError, ConfigError, RpcdistError

__all__ = ["DataParallelError", "ModelsDiffer", "NonFiniteGradients", "UnusedParameters", "explained", "list_names"]

MAX_NAMES = 20


def list_names(names: Sequence[str]) -> str:
    """Names for the text of an error; the first `MAX_NAMES` of them."""
    shown = ", ".join(names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"


class DataParallelError(RpcdistError):
    """`DistributedDataParallel` cannot go on."""


class ModelsDiffer(DataParallelError, ConfigError):
    """The ranks wrapped different models, or passed different options; the text names what differs."""


class UnusedParameters(DataParallelError):
    """A backward pass ended without gradients for some parameters, so their buckets were not reduced.

    Attributes:
        rank: rank in the world on which the gradients are missing.
        parameters: names of the parameters without gradients.
        iteration: number of the backward pass, from 1.
    """

    def __init__(self, rank: int, parameters: Sequence[str], iteration: int) -> None:
        super().__init__(rank, tuple(parameters), iteration)
        self.rank = rank
        self.parameters = tuple(parameters)
        self.iteration = iteration

    def __str__(self) -> str:
        return (
            "Expected to have finished reduction in the prior iteration before starting a new one. In iteration "
            f"{self.iteration}, on rank {self.rank}, these parameters received no gradient: "
            f"{list_names(self.parameters)}. Either the module does not use them for the loss: pass "
            "find_unused_parameters=True to DistributedDataParallel, or freeze them with requires_grad_(False). Or the "
            "loss was computed from other tensors than those that the module's forward returned, or there was no "
            "backward pass at all of that rank's loss."
        )


class NonFiniteGradients(UserWarning):
    """Some rank contributed gradients with NaN or infinity, and so all ranks have them now."""


def explained(error: CollectiveError, detail: str) -> CollectiveError:
    """A copy of an error with a detail added to its reason."""
    better = copy.copy(error)
    better.reason = f"{error.reason}; {detail}"
    better.args = (error.operation, better.reason, *error.args[2:])
    return better
