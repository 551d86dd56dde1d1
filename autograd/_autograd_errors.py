"""The errors of distributed autograd."""

from __future__ import annotations

from rpcdist.errors import RpcdistError


class AutogradError(RpcdistError):
    """A context, or the graph of a backward pass, cannot be used in this way."""


class ContextNotFound(AutogradError):
    """No autograd context of that id is alive on this worker."""

    def __init__(self, context_id: int) -> None:
        super().__init__(context_id)
        self.context_id = context_id

    def __str__(self) -> str:
        return (
            f"Could not find autograd context with id: {self.context_id}. Contexts end with their `with` block; use "
            "them inside it, on workers that were called from it"
        )


class BackwardError(AutogradError):
    """A backward pass failed on some worker, and was ended on all of them. Its gradients are incomplete.

    Attributes:
        node: id of the worker on which the pass failed.
        worker: name of that worker.
        type_name: type of the exception there.
        text: text of the exception.
        traceback: traceback of the exception, if it was raised on another worker.
    """

    def __init__(self, node: int, worker: str, type_name: str, text: str, traceback: str = "") -> None:
        super().__init__(node, worker, type_name, text, traceback)
        self.node = node
        self.worker = worker
        self.type_name = type_name
        self.text = text
        self.traceback = traceback

    def __str__(self) -> str:
        return f"Error on Node {self.node}: {self.text} ({self.type_name} on worker {self.worker!r})"
