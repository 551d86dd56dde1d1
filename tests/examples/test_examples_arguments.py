"""The examples explain which arguments they refuse, and how many processes they need."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from example_runs import explanation_of as explanation_of


@pytest.mark.parametrize(
    ("example", "arguments", "message"),
    [
        ("reinforcement_learning", ("--observers", "0"), "--observers: '0' is not a positive whole number"),
        ("recurrent_net", ("--picture", "a.txt"), "the name must end in .png, .pdf or .svg"),
        ("recurrent_net", ("--lr", "inf"), "--lr: 'inf' is not a positive number"),
        ("asyncio_service", ("--waiters", "many"), "--waiters: 'many' is not a positive whole number"),
        ("ddp_rpc", ("--servers", "0"), "--servers: '0' is not a positive whole number"),
        ("ddp", ("--ranks", "0"), "--ranks: '0' is not a positive whole number"),
        ("ddp", ("--ranks", "50"), "--ranks 50: 1437 images are fewer than a batch of 32 for each"),
        ("ddp", ("--resume", "--checkpoint", "none"), "--resume: there is no checkpoint none; train without"),
        ("collectives", ("--ranks", "1"), "--ranks: at least 2"),
        ("elastic_ddp", ("--kills", "-1"), "--kills -1 is negative"),
        ("elastic_parameter_server", ("--kills", "0"), "--kills: '0' is not a positive whole number"),
        ("pipeline_parallel", ("--workers", "0"), "--workers: '0' is not a positive whole number"),
        (
            "pipeline_parallel",
            ("--schedule", "interleaved", "--microbatches", "5"),
            "must be a multiple of --workers",
        ),
        ("pipeline_parallel", ("--picture", "a.txt"), "the name must end in .png, .pdf or .svg"),
    ],
)
def test_bad_arguments_are_explained(
    example: str, arguments: tuple[str, ...], message: str, explanation_of: Callable[..., str]
) -> None:
    assert message in explanation_of(example, *arguments)


@pytest.mark.parametrize(
    ("example", "world_size", "message"),
    [
        ("reinforcement_learning", 1, "torchrun must start at least 2 processes, the agent and the observers"),
        ("recurrent_net", 3, "torchrun must start 2 processes, the trainer and the server"),
        ("asyncio_service", 1, "torchrun must start 2 processes, the client and the service"),
        ("ddp_rpc", 2, "torchrun must start at least 3 processes, the master, the servers and the trainers: --nproc"),
    ],
)
def test_too_few_processes_are_explained(
    example: str, world_size: int, message: str, explanation_of: Callable[..., str]
) -> None:
    assert message in explanation_of(example, RANK="0", WORLD_SIZE=str(world_size))
