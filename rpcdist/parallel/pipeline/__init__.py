"""Pipeline parallelism: a sequential model split into stages on several workers, which process micro-batches in turn.

`Pipeline` executes schedules that are data: GPipe, 1F1B, interleaved 1F1B, or one that you write. `docs/pipeline.md` is
the guide.
"""

from __future__ import annotations

from rpcdist.parallel.pipeline._pipeline import Pipeline, PipelineOptimizer, StepResult
from rpcdist.parallel.pipeline._schedules import SCHEDULES, Action, parse_action, schedule
from rpcdist.parallel.pipeline._simulation import (
    Slot,
    Timeline,
    bubble,
    format_grid,
    max_live_microbatches,
    simulate,
    validate,
)
from rpcdist.parallel.pipeline._stage_runner import RemoteStages
from rpcdist.parallel.pipeline._step_messages import PipelineAborted, PipelineError, PipelineTimeout

__all__ = [
    "SCHEDULES", "Action", "Pipeline", "PipelineAborted", "PipelineError", "PipelineOptimizer", "PipelineTimeout",
    "RemoteStages", "Slot", "StepResult", "Timeline", "bubble", "format_grid", "max_live_microbatches", "parse_action",
    "schedule", "simulate", "validate",
]  # fmt: skip
