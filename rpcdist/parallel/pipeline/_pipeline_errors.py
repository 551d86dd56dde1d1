"""Errors of pipelines.

RpcdistError
└── PipelineError                           a step failed; names stage, micro-batch and worker
    ├── PipelineTimeout (DeadlineExceeded)  it did not end in time
    └── PipelineAborted                     it was ended here because it failed elsewhere
"""

from __future__ import annotations

from collections.abc import Sequence

from rpcdist.errors import DeadlineExceeded, RpcdistError


class PipelineError(RpcdistError):
    """A step of a pipeline failed. The gradients of its stages are None now; the next step may be tried.

    Attributes:
        worker: where it failed.
        stages: the stage, or all stages of the worker if none of them is to blame.
        microbatch: the micro-batch; None if none is to blame.
        what: the action, e.g. "forward of micro-batch 2".
        reason: the type and the text of the original exception, which is the `__cause__` where it happened.
    """

    def __init__(self, worker: str, stages: Sequence[int], microbatch: int | None, what: str, reason: str) -> None:
        super().__init__(worker, stages, microbatch, what, reason)
        self.args = (worker, tuple(stages), microbatch, what, reason)  # an OSError among the bases keeps two of them
        self.worker = worker
        self.stages = tuple(stages)
        self.microbatch = microbatch
        self.what = what
        self.reason = reason

    def __str__(self) -> str:
        stages = f"stage{'s' * (len(self.stages) != 1)} {', '.join(map(str, self.stages))}"
        return f"{self.what} in {stages} on worker {self.worker!r} failed: {self.reason}"


class PipelineTimeout(PipelineError, DeadlineExceeded):
    """A worker waited for its neighbour until the time given to the step was over."""


class PipelineAborted(PipelineError):
    """The step was ended here because it failed on another worker, or because its driver gave up."""
