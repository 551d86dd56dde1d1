"""The errors of data parallel training; they name ranks and parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from rpcdist.errors import CollectiveError, ConfigError, RpcdistError, listed
from rpcdist.parallel._ddp._iteration_state import DueRule, UnexpectedGradient

MAX_NAMES = 20


def list_names(names: Sequence[str]) -> str:
    """Lists names for an error, up to `MAX_NAMES`."""
    return listed(names, MAX_NAMES)


class DataParallelError(RpcdistError):
    """`DistributedDataParallel` cannot continue."""


class ModelsDiffer(DataParallelError, ConfigError):
    """The ranks wrapped different models, or passed different options; the text names what differs."""


class UnusedParameters(DataParallelError):
    """A backward pass ended without gradients for some parameters, so their buckets were not reduced.

    Attributes:
        iteration: number of the backward pass, from 1.
        rule: which parameters should get gradients.
        indices: the numbers of these parameters among those that are averaged.
    """

    def __init__(
        self, rank: int, parameters: Sequence[str], iteration: int, rule: DueRule, indices: Sequence[int]
    ) -> None:
        super().__init__(rank, tuple(parameters), iteration, rule, tuple(indices))
        self.rank = rank
        self.parameters = tuple(parameters)
        self.iteration = iteration
        self.rule = rule
        self.indices = tuple(indices)

    def __str__(self) -> str:
        changed = f" {_GRAPH_CHANGED}" if self.rule is DueRule.STATIC else ""
        return (
            "Expected to have finished reduction in the prior iteration before starting a new one."
            f"{changed}\nParameter indices which did not receive grad for rank {self.rank}: "
            f"{' '.join(map(str, self.indices[:MAX_NAMES]))}\n"
            f"In iteration {self.iteration}, on rank {self.rank}, these parameters received no gradient: "
            f"{list_names(self.parameters)}. {_UNUSED_ADVICE[self.rule]} Or the "
            "loss was not computed from the tensors that the module's forward returned, or that rank did not run a "
            "backward pass of its loss."
        )


# This sentence and those above it are torch's, as programs and readers search for them.
_GRAPH_CHANGED = (
    "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used in first "
    "iteration, but then got unused in the second iteration. this is not compatible with static_graph set to True."
)
_UNUSED_ADVICE = {
    DueRule.EVERY: "Either the module does not use them for the loss: pass find_unused_parameters=True to "
    "DistributedDataParallel, or freeze them with requires_grad_(False).",
    DueRule.FOUND: "Either the backward pass failed before it reached them.",
    DueRule.STATIC: "Either the module used them for the loss in the first iteration but not in this one, which "
    "static_graph=True does not allow: use the same parameters in every iteration.",
}


def unexpected_gradient(
    unexpected: UnexpectedGradient, name: str, iteration: int, rank: int, rule: DueRule
) -> DataParallelError:
    """Makes the error for a gradient that came once too often, or that a static graph does not have."""
    where = f"in iteration {iteration} on rank {rank}"
    if unexpected.allowed is not None:
        return DataParallelError(
            "Your training graph has changed in this iteration, which static_graph=True does not allow: parameter "
            f"{name!r} got {unexpected.count} gradients {where}, and {unexpected.allowed} in the first one"
        )
    if rule is DueRule.FOUND:
        return DataParallelError(
            f"Expected to mark a variable ready only once: parameter {name!r} got a gradient {where} that the graph "
            "of the outputs does not show, or a second one in one pass. Reentrant checkpointing does that: pass "
            "use_reentrant=False, or static_graph=True if every iteration is the same"
        )
    return DataParallelError(
        f"Expected to mark a variable ready only once: parameter {name!r} got a second gradient {where}. Either "
        "reentrant checkpointing uses it several times (pass use_reentrant=False, or static_graph=True if every "
        "iteration is the same), or a second backward pass ran before the first had brought all gradients (add the "
        "losses up before backward, or pass find_unused_parameters=True)"
    )


def not_finalized(iteration: int, rank: int) -> DataParallelError:
    """Makes the error for a pass or a setting that came too early."""
    return DataParallelError(
        "Expected to have finalized the prior backward pass before starting a new one: finalize_backward() was not "
        f"called for iteration {iteration} on rank {rank}. With require_manual_backward_finalization = True call it "
        "once after each backward pass outside of no_sync, before the next pass"
    )


def nothing_to_finalize(by_hand: bool, missing: Sequence[str], iteration: int, rank: int) -> DataParallelError:
    """Makes the error for a `finalize_backward` that came too early or was not required."""
    if not by_hand:
        return DataParallelError(
            "finalize_backward() called but manual backward finalization is not required: set "
            "require_manual_backward_finalization = True before the forward pass, or leave the call out"
        )
    if missing:
        return DataParallelError(
            f"finalize_backward() was called on rank {rank} before all gradients of iteration {iteration} were ready; "
            f"those of {list_names(missing)} are missing. Call it after backward, or in a hook that runs later"
        )
    return DataParallelError(
        f"finalize_backward() called but no gradient reduction requires finalization on rank {rank}: call it once "
        "after each backward pass outside of no_sync. If should_finalize_after_backward is True, a hook comes too early"
    )


def changed_gradients(names: Sequence[str], iteration: int, rank: int) -> DataParallelError:
    """Makes the error for gradients that the program has changed, as their averages would replace them."""
    return DataParallelError(
        f"gradients were changed between backward and finalize_backward() of iteration {iteration} on rank {rank}: "
        f"{list_names(names)}. Their averages would replace them: clip, clear or step after finalize_backward()"
    )


class NonFiniteGradients(UserWarning):
    """A rank contributed gradients with NaN or infinity, which therefore all ranks have now."""


def explained(error: CollectiveError, detail: str) -> CollectiveError:
    """Returns a copy of an error with a detail added to its reason."""
    better = copy.copy(error)
    better.reason = f"{error.reason}; {detail}"
    better.args = (error.operation, better.reason, *error.args[2:])
    return better
