"""Random small models and steps, which give the same gradients in one process and under data parallel training.

A program is drawn from a seed: a module with branches, shared, frozen and unused parameters, several outputs and
checkpoints, and steps of micro-batches, each with one of the ways in which losses are differentiated. The reference
runs each rank's part on a module of its own, without any wrapper, and averages: the gradients of the joined batch.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 3
ROUNDING = 1e-9
Gradients = list[torch.Tensor | None]


@dataclass
class Answer:
    """One of the containers in which a module returns its outputs."""

    first: torch.Tensor
    others: dict[str, list[torch.Tensor]]


@dataclass(frozen=True)
class Use:
    """The parts that one forward pass uses.

    Attributes:
        path: numbers of the blocks, in the order in which they are applied.
        outputs: (number of the head, or -1 for none; how many blocks are before it).
        keep: whether the module keeps an output that it does not return, which the loss uses.
    """

    path: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]
    keep: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass, or several, of the same kind.

    Attributes:
        syncs: whether it is outside of `no_sync`.
        uses: by rank.
        recipe: how the loss is differentiated.
        chosen: outputs that the loss uses, as indices modulo their number.
    """

    syncs: bool
    uses: tuple[Use, ...]
    recipe: str
    chosen: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A module, the options of its wrapper, and its steps.

    Attributes:
        zero: how gradients are cleared before a step.
        ends: the part that ends the iterations: "backward", or the program, by `finalize_backward` after backward, in a
        hook of the rows where there is one pass; or wrongly: never, twice, or after a change.
    """

    seed: int
    num_blocks: int
    num_heads: int
    shares: bool
    frozen: tuple[int, ...]
    checkpoints: tuple[str, ...]
    container: str
    options: dict[str, Any]
    steps: tuple[tuple[MicroBatch, ...], ...]
    zero: str
    ends: str


class Net(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.program = program
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(program.num_blocks))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(program.num_heads))
        self.scale = nn.Parameter(torch.ones(2))
        if program.shares:
            self.heads[-1].weight = self.heads[0].weight
        self.double()
        for index, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(index not in program.frozen)
        self.kept: torch.Tensor | None = None

    def forward(self, rows: torch.Tensor, use: Use) -> Any:
        hidden, stages = rows, [rows]
        for number in use.path:
            hidden = self._block(number, hidden)
            stages.append(hidden)
        outputs = []
        for head, stage in use.outputs:
            here = stages[stage]
            outputs.append(here if head < 0 else self.heads[head % len(self.heads)](here) * self.scale)
        self.kept = hidden.square().mean() if use.keep else None
        return _wrap(outputs, self.program.container)

    def _block(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        block, mode = self.blocks[number], self.program.checkpoints[number]
        if mode == "none":
            return torch.tanh(block(hidden))
        found: torch.Tensor = checkpoint(
            lambda rows: torch.tanh(block(rows)), hidden, use_reentrant=mode == "reentrant"
        )
        return found


def _wrap(outputs: list[torch.Tensor], container: str) -> Any:
    if container == "tensor" and len(outputs) == 1:
        return outputs[0]
    if container == "dict":
        return {str(number): [output] for number, output in enumerate(outputs)}
    if container == "dataclass":
        return Answer(outputs[0], {"others": outputs[1:]})
    return tuple(outputs)


def _unwrap(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [output for (output,) in value.values()]
    if isinstance(value, Answer):
        return [value.first, *value.others["others"]]
    return list(value)


# ---------------------------------------------------------------- how losses are differentiated

RECIPES = (
    *["sum"] * 6,
    "each",
    "each forward",
    "two forwards",
    "again",
    "grad of rows",
    "grad of a parameter",
    "force",
    "force alone",
    "force apart",
    "inputs",
    "norm",
    "norm apart",
    "norm before",
    "retained",
    "create_graph",
    "without gradient",
    "looked at",
)

IN_ONE_PASS = tuple(recipe for recipe in RECIPES if recipe not in ("each", "force alone", "inputs", "norm before"))
"""Those that are no error for a model whose parameters all have to be used; "norm before" gives one of them two."""


ENDS = ("backward", "after", "hook", "never", "twice", "changed", "stepped")


class Ends:
    """The end of each iteration, as a program says; nothing for a model without wrapper."""

    def __init__(self, model: Any, net: Net, batch: MicroBatch) -> None:
        self._way = net.program.ends if model is not net and batch.syncs else "backward"
        self._model, self._net = model, net
        self._called = False
        if self._way == "hook" and (batch.recipe != "sum" or model.should_finalize_after_backward):
            self._way = "after"

    def watch(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows as the module gets them, behind whose gradients all of the module's have come."""
        if self._way == "hook":
            rows = rows * 1
            rows.register_hook(self._in_hook)
        return rows

    def _in_hook(self, _: torch.Tensor) -> None:
        self._called = True
        self._model.finalize_backward()

    def __call__(self) -> None:
        """A backward pass through the outputs has ended."""
        way = self._way
        if way in ("backward", "never") or self._called:
            return
        parameter = next(each for each in self._net.parameters() if each.requires_grad)
        if way == "changed":
            for each in self._net.parameters():
                if each.grad is not None:
                    each.grad.mul_(2)
        elif way == "stepped":
            with torch.no_grad():
                parameter.sub_(1)
        self._model.finalize_backward()
        if way == "twice":
            self._model.finalize_backward()


def differentiate(model: Any, net: Net, batch: MicroBatch, use: Use, rows: torch.Tensor) -> None:
    """Runs a micro-batch; `model` is `net`, or a wrapper of it."""
    end = Ends(model, net, batch)
    rows = end.watch(rows)
    outputs = _unwrap(model(rows, use))
    losses = [outputs[index % len(outputs)].square().mean() for index in dict.fromkeys(batch.chosen)]
    if net.kept is not None:
        if batch.recipe == "each":
            losses[-1] = losses[-1] + net.kept  # by itself it would stay on its rank, as docs/ddp.md says
        else:
            losses.append(net.kept)
    loss = torch.stack(losses).sum()
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    recipe = batch.recipe
    if recipe == "each":
        for each in losses:
            each.backward(retain_graph=True)
            end()
    elif recipe in ("each forward", "two forwards"):
        other = _unwrap(model(rows * 2, use))[0].sum()
        if recipe == "each forward":
            loss.backward()
            end()
            other.backward()
            end()
        else:
            (loss + other).backward()
            end()
    elif recipe == "again":
        loss.backward(retain_graph=True)
        end()
        loss.backward()
        end()
    elif recipe == "grad of rows":
        torch.autograd.grad(loss, rows, retain_graph=True, allow_unused=True)
        loss.backward()
        end()
    elif recipe == "grad of a parameter":
        torch.autograd.grad(loss, trained[batch.chosen[0] % len(trained)], retain_graph=True, allow_unused=True)
        loss.backward()
        end()
    elif recipe.startswith("force"):
        (force,) = torch.autograd.grad(losses[0], rows, create_graph=True)
        penalty = force.square().sum()
        if recipe == "force apart":
            loss.backward(retain_graph=True)
            end()
            penalty.backward()
            end()
        else:
            (penalty if recipe == "force alone" else loss + penalty).backward()
            end()
    elif recipe == "inputs":
        gradients = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
        reached = [parameter for parameter, found in zip(trained, gradients, strict=True) if found is not None]
        loss.backward(inputs=reached[batch.chosen[0] % len(reached) :] if reached else None)
        end()
    elif recipe == "norm":
        (loss + net.scale.norm()).backward()
        end()
    elif recipe == "norm apart":
        loss.backward()
        end()
        net.scale.norm().backward()
    elif recipe == "norm before":
        net.scale.norm().backward()
        if net.program.options["find_unused_parameters"]:
            end()  # this pass is the first one
        loss.backward()
        end()
    elif recipe == "retained":
        loss.backward(retain_graph=True)
        end()
    elif recipe == "create_graph":
        loss.backward(create_graph=True)
        end()
    elif recipe == "without gradient":
        with torch.no_grad():
            model(rows, use)
        loss.backward()
        end()
    elif recipe == "looked at":
        model(rows, use)
        loss.backward()
        end()
    else:
        loss.backward()
        end()


# ---------------------------------------------------------------- drawing


def draw(seed: int, size: int) -> Program:
    """A program for that many ranks."""
    random_ = random.Random(seed)
    mode = random_.choice(["plain", "found", "found", "static"])
    num_blocks, num_heads = random_.randint(1, 4), random_.randint(1, 3)
    num_parameters = 2 * (num_blocks + num_heads) + 1
    complete = mode == "plain" and random_.random() < 0.9  # uses everything, so that it is no error
    by_rank = mode != "plain" and random_.random() < 0.5

    def output(depth: int) -> tuple[int, int]:
        if depth and random_.random() < 0.3:
            return -1, random_.randint(1, depth)
        return random_.randrange(num_heads), random_.randint(0, depth) if random_.random() < 0.3 else depth

    def use() -> Use:
        path = (
            tuple(range(num_blocks)) if complete else tuple(random_.choices(range(num_blocks), k=random_.randint(0, 4)))
        )
        if complete:
            outputs = tuple((head, num_blocks) for head in range(num_heads))
        else:
            outputs = tuple(output(len(path)) for _ in range(random_.randint(1, 3)))
        return Use(path, outputs, keep=random_.random() < 0.1)

    def uses() -> tuple[Use, ...]:
        return tuple(use() for _ in range(size)) if by_rank else (use(),) * size

    def recipe_of() -> str:
        if mode == "found":  # the ranks have to run equally many backward passes
            return random_.choice([recipe for recipe in RECIPES if not (by_rank and recipe == "each")])
        return random_.choice(RECIPES if random_.random() < 0.1 else IN_ONE_PASS)

    fixed = uses()
    simple = random_.random() < 0.3
    fixed_recipe, fixed_chosen = recipe_of(), tuple(random_.choices(range(3), k=random_.randint(1, 3)))

    def micro_batch(syncs: bool) -> MicroBatch:
        changes = mode == "found" or random_.random() < 0.05
        recipe = "sum" if simple else recipe_of() if mode != "static" else fixed_recipe
        chosen = tuple(range(3)) if complete else tuple(random_.choices(range(3), k=random_.randint(1, 3)))
        return MicroBatch(syncs, uses() if changes else fixed, recipe, chosen if mode != "static" else fixed_chosen)

    steps = tuple(
        (*(micro_batch(False) for _ in range(random_.choice([0, 0, 1, 2]))), micro_batch(True))
        for _ in range(random_.randint(1, 3))
    )
    return Program(
        seed,
        num_blocks,
        num_heads,
        shares=random_.random() < 0.3,
        frozen=tuple(random_.sample(range(num_parameters), random_.choice([0, 0, 1]))),
        # Where ranks differ, a reentrant one is an error on some of them, and the others wait for the timeout.
        checkpoints=tuple(
            random_.choice(["none"] * 6 + ["other"] * 2 + ["reentrant"] * (not by_rank)) for _ in range(num_blocks)
        ),
        container=random_.choice(["tensor", "tuple", "dict", "dataclass"]),
        options={
            "find_unused_parameters": mode == "found",
            "static_graph": mode == "static",
            "gradient_as_bucket_view": random_.random() < 0.3,
            "bucket_cap_mb": random_.choice([None, 0.00005]),
        },
        steps=steps,
        zero=random_.choice(["none", "none", "zeros", "keep"]),
        ends=random_.choice(["backward"] * 8 + ["after"] * 4 + ["hook"] * 2 + [random_.choice(ENDS[3:])]),
    )


# ---------------------------------------------------------------- running


def rows_of(program: Program, step: int, number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * program.seed + 100 * step + 10 * number + rank)
    return torch.randn(2, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()


def run_step(model: Any, net: Net, program: Program, step: int, rank: int) -> None:
    for number, batch in enumerate(program.steps[step]):
        syncs = contextlib.nullcontext() if batch.syncs or model is net else model.no_sync()
        with syncs:
            differentiate(model, net, batch, batch.uses[rank], rows_of(program, step, number, rank))


def gradients_of(net: nn.Module) -> Gradients:
    return [None if each.grad is None else each.grad.detach().clone() for each in net.parameters()]


def clear(net: nn.Module, zero: str) -> None:
    if zero != "keep":
        net.zero_grad(set_to_none=zero == "none")


def descend(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)


def reference(program: Program, size: int) -> list[Gradients]:
    """The gradients after each step: the averages of what the ranks' parts of the batch give."""
    net, found = Net(program), []
    for step in range(len(program.steps)):
        clear(net, program.zero)
        parts = []
        for rank in range(size):
            part = copy.deepcopy(net)
            part.zero_grad()
            run_step(part, part, program, step, rank)
            parts.append(gradients_of(part))
        for index, parameter in enumerate(net.parameters()):
            present = [part[index] for part in parts if part[index] is not None]
            if present:
                total = torch.stack(present).sum(0) / size  # type: ignore[arg-type]
                parameter.grad = total if parameter.grad is None else parameter.grad + total
        found.append(gradients_of(net))
        descend(net)
    return found


def problem(program: Program, size: int, rank: int, wrap: Callable[..., Any], wanted: Sequence[Gradients]) -> str:
    """Runs a program; returns the errors in the gradients, or "refused: " and the error, or nothing."""
    net = Net(program)
    model = wrap(net, **program.options)
    if program.ends != "backward":
        model.require_manual_backward_finalization = True
    for step, right in enumerate(wanted):
        clear(net, program.zero)
        try:
            run_step(model, net, program, step, rank)
            found = gradients_of(net)
            model._check_reducer_finalized()
        except RuntimeError as exc:
            return f"refused in step {step}: {type(exc).__name__}: {exc}"
        for (name, _), mine, theirs in zip(net.named_parameters(), found, right, strict=True):
            if (mine is None) != (theirs is None):
                return f"step {step}: {name}.grad is {mine} instead of {theirs}"
            if mine is not None and theirs is not None and (mine - theirs).abs().max() > ROUNDING:
                return f"step {step}: {name}.grad is {mine.tolist()} instead of {theirs.tolist()}"
        descend(net)
    return ""
