"""The functions that the ranks of `rank_pool` run with iterations of data parallel training that the program ends."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import ddp_models
import torch
from ddp_ranks import difference, plain, scenario
from torch import nn

from rpcdist import collectives
from rpcdist.errors import CollectiveError
from rpcdist.parallel import DistributedDataParallel, comm_hooks
from rpcdist.parallel._ddp._ddp_errors import DataParallelError


@scenario
def end_by_hand(rank: int, size: int, options: dict[str, Any], hook: str) -> dict[str, Any]:
    """Iterations that the program ends, in turn after backward and in a hook, beside iterations that backward ends."""
    models = [DistributedDataParallel(plain().double(), **options) for _ in range(2)]
    by_hand, other = models
    by_hand.require_manual_backward_finalization = True
    by_hand = copy.deepcopy(by_hand)  # it stays so
    found: dict[str, Any] = {"worst": 0.0, "local until then": [], "late": []}
    if hook:
        for model in (by_hand, other):
            model.register_comm_hook(None, getattr(comm_hooks, hook))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (by_hand, other)]

    def end(_: object = None) -> None:
        by_hand.finalize_backward()
        optimizers[0].step()

    for step in range(6):
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
        alone = copy.deepcopy(by_hand.module)
        ddp_models.loss_of(alone(rows)).backward()
        given = rows.clone().requires_grad_() * 1  # its gradient comes after those of all parameters
        output = by_hand(given)
        found["late"].append(by_hand.should_finalize_after_backward)
        if in_hook := step % 2 == 1:
            given.register_hook(end)
        ddp_models.loss_of(output).backward()
        if not in_hook:
            mine, own = (ddp_models.gradients(each) for each in (by_hand.module, alone))
            found["local until then"].append(difference(mine, own) == 0.0)
            end()
        ddp_models.loss_of(other(rows)).backward()
        optimizers[1].step()
        difference_now = difference(dict(by_hand.module.named_parameters()), dict(other.module.named_parameters()))
        found["worst"] = max(found["worst"], difference_now)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step < 4)
    return found


@scenario
def end_by_hand_wrongly(rank: int, size: int) -> dict[str, str]:
    """The mistakes of a program that ends its iterations itself; returns the errors."""
    found = {}
    rows = torch.ones(4, 8, dtype=torch.float64) * (rank + 1)

    def attempt(name: str, *then: Callable[[Any], object], by_hand: bool = True) -> None:
        model = DistributedDataParallel(plain().double())
        model.require_manual_backward_finalization = by_hand
        try:
            ddp_models.loss_of(model(rows)).backward()
            for each in then:
                each(model)
        except DataParallelError as exc:
            found[name] = str(exc)
            collectives.barrier()  # no rank makes the next model while another waits for this one
            if name.startswith(("forward", "setting", "check", "comm")):
                model.finalize_backward()  # it is not too late
                assert all(each.grad is not None for each in model.parameters())

    def again(model: Any) -> None:
        ddp_models.loss_of(model(rows)).backward()

    def accumulate_more(model: Any) -> None:
        with model.no_sync():
            again(model)

    def end(model: Any) -> None:
        model.finalize_backward()

    def clip(model: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    def penalize(model: Any) -> None:
        given = rows.clone().requires_grad_()
        loss = ddp_models.loss_of(model(given))
        (slope,) = torch.autograd.grad(loss, given, create_graph=True)
        loss.backward(retain_graph=True)
        slope.square().sum().backward()

    def in_hook(model: Any) -> None:
        model.module[0].weight.register_post_accumulate_grad_hook(lambda _: model.finalize_backward())
        again(model)

    attempt("not asked for", end, by_hand=False)
    attempt("twice", end, end)
    attempt("under no_sync", end, accumulate_more, end)
    attempt("before the gradients", end, in_hook)
    attempt("forward", again)
    attempt("forward under no_sync", accumulate_more)
    attempt("backward", lambda model: ddp_models.loss_of(model.module(rows)).backward())
    attempt("penalty", end, penalize)
    attempt("comm hook", lambda model: model.register_comm_hook(None, comm_hooks.allreduce_hook))
    attempt("setting", lambda model: setattr(model, "require_manual_backward_finalization", False))
    attempt("check", lambda model: model._check_reducer_finalized())
    attempt("clipped", clip, end)
    attempt("cleared", lambda model: model.zero_grad(), end)
    attempt("stepped", lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(), end)
    return found


@scenario
def end_after_failures(rank: int, size: int, options: dict[str, Any]) -> list[str]:
    """The errors of ends of passes that the group did not outlive."""
    found = []
    for hooked in (0, -2):  # the weights of the first layer, and of the last
        group = collectives.new_group()
        model = DistributedDataParallel(plain().double(), process_group=group, **options)
        model.require_manual_backward_finalization = True
        for step in range(3):
            loss = ddp_models.loss_of(model(torch.ones(4, 8, dtype=torch.float64)))
            if step == 2:
                list(model.parameters())[hooked].register_hook(lambda _, group=group: group.abort())
                try:
                    loss.backward()
                except CollectiveError:
                    pass
            else:
                loss.backward()
            try:
                model.finalize_backward()
            except Exception as exc:
                found.append(f"{step} {type(exc).__name__}: {exc}")
    return found
