"""Facts about the workers of a job as plain data, and an explanation of which worker waits for which.

    facts = rpc.inspect_worker("worker1")          # of a worker of this job; without a name, of this one
    facts.calls_served[0].function, facts.pool.queued
    text = facts_to_json(facts)                    # and back: facts_from_json(text)
    print(describe(explain([facts, ...])))         # what `python -m rpcdist stacks` prints

`facts.py` defines all facts. docs/inspection.md shows how to find a hang with them.
"""

from __future__ import annotations

from rpcdist.inspection.fact_texts import (
    MAX_FACTS_BYTES,
    describe,
    facts_from_json,
    facts_to_json,
    fields_of,
    notes_from_json,
    printable_lines,
)
from rpcdist.inspection.facts import (
    ActorFacts,
    CallMade,
    CallServed,
    ChannelFacts,
    ContextFacts,
    CurveFacts,
    Frame,
    FunctionTimes,
    GatheringFacts,
    GroupFacts,
    Holder,
    LentMemory,
    Limit,
    LiveNotes,
    LogLine,
    MemberFacts,
    OperationFacts,
    PassFacts,
    PoolFacts,
    ReferenceFacts,
    SilentWorker,
    SpanFacts,
    Strangers,
    StreamFacts,
    ThreadState,
    WorkerFacts,
)
from rpcdist.inspection.waits import Chain, Explanation, WaitLink, explain

__all__ = [
    "MAX_FACTS_BYTES", "ActorFacts", "CallMade", "CallServed", "Chain", "ChannelFacts", "ContextFacts", "CurveFacts",
    "Explanation", "Frame", "FunctionTimes", "GatheringFacts", "GroupFacts", "Holder", "LentMemory", "Limit",
    "LiveNotes", "LogLine", "MemberFacts", "OperationFacts", "PassFacts", "PoolFacts", "ReferenceFacts", "SilentWorker",
    "SpanFacts", "Strangers", "StreamFacts", "ThreadState", "WaitLink", "WorkerFacts", "describe", "explain",
    "facts_from_json", "facts_to_json", "fields_of", "notes_from_json", "printable_lines",
]  # fmt: skip
