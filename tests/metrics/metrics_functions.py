"""The functions that worker processes run in the tests of metrics."""

from __future__ import annotations

import sys
import urllib.request
from typing import Any

import torch
from inside_agents import current_agent

import rpcdist.collectives as dist
from rpcdist import rpc
from rpcdist.parallel import DistributedDataParallel
from rpcdist.parallel.pipeline import Pipeline

__all__ = [
    "call",
    "collect_with_opentelemetry",
    "fail",
    "nothing",
    "reduce_alone",
    "run_pipeline",
    "scraped",
    "serve_at",
    "train_alone",
    "what_is_counted",
]


def nothing() -> None:
    pass


def fail() -> None:
    raise KeyError("on purpose")


def call(to: str, times: int) -> None:
    for _ in range(times):
        rpc.rpc_sync(to, nothing)
    try:
        rpc.rpc_sync(to, fail)
    except KeyError:
        pass
    assert rpc.rpc_sync(to, torch.zeros, (1 << 20,)).numel() == 1 << 20


def serve_at(address: str) -> str:
    from rpcdist import metrics

    return metrics.serve(address)


def scraped(address: str) -> dict[str, float]:
    """The samples that Prometheus would read, by name and labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def what_is_counted() -> tuple[bool, bool]:
    """Whether calls of this worker are counted, and whether the module of metrics is there."""
    return current_agent().counts is not None, "rpcdist.metrics" in sys.modules


def reduce_alone(times: int) -> None:
    dist.init_process_group("tcp", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(times):
        dist.all_reduce(torch.zeros(1024))
    dist.destroy_process_group()


def train_alone(times: int) -> None:
    """Some iterations of `DistributedDataParallel` in a group of one, with several buckets."""
    dist.init_process_group("tcp", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(times):
        model(torch.ones(1, 4)).sum().backward()
    dist.destroy_process_group()


def run_pipeline(workers: list[str]) -> float:
    """A step; the bubble that the pipeline itself has measured."""
    stages = [torch.nn.Linear(2, 2) for _ in workers]
    pipeline = Pipeline(stages, workers, num_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    pipeline.step(torch.ones(8, 2), torch.zeros(8, 2))
    assert pipeline.timeline is not None
    return pipeline.timeline.bubble


def collect_with_opentelemetry(to: str, times: int) -> dict[str, Any]:
    """The data points of each metric after some calls."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from rpcdist import metrics

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    metrics.export_to_opentelemetry(provider)
    metrics.export_to_opentelemetry(provider)
    call(to, times)
    train_alone(1)
    run_pipeline([current_agent().worker_name, to])
    metrics.families()  # adds up what has ended
    data = reader.get_metrics_data()
    assert data is not None
    metrics_of_scopes = [scope.metrics for resource in data.resource_metrics for scope in resource.scope_metrics]
    found = {
        metric.name: [_point(point) for point in metric.data.data_points]
        for metrics_of_scope in metrics_of_scopes
        for metric in metrics_of_scope
    }
    provider.shutdown()
    return found


def _point(point: Any) -> tuple[dict[str, Any], int | None, float | None]:
    """Labels, the count of a histogram, the value of anything else."""
    return dict(point.attributes or {}), getattr(point, "count", None), getattr(point, "value", None)
