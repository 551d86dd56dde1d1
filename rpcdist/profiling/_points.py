"""The functions of the call path whose begin or end is a stage of a call, from top to bottom.

Writes to sockets and reads from them are marked apart from these. A point is worth having where one part hands the call
to the next; more points would slow down what they measure.
"""

from __future__ import annotations

from typing import Final

from rpcdist.profiling._marks import Point

POINTS: Final = (
    # The caller's thread.
    Point("rpcdist.rpc._calling.new_calls:NewCalls.of_function", "the worker is found, the call is made"),
    Point("rpcdist.rpc._peers.peer:Peer.send", "arguments are encoded, the message is routed"),
    Point("rpcdist.transport.session:Session.send", "the session takes the message"),
    # The callee.
    Point("rpcdist.transport.session:Session.receive", "the session takes a frame"),
    Point("rpcdist.rpc._serving.dispatcher:Dispatcher.on_call", "the dispatcher takes the call"),
    Point("rpcdist.rpc._executors.thread_pool:ThreadPool.submit_many", "the pool takes the call"),
    Point("rpcdist.rpc._serving.dispatcher:Dispatcher.run", "a worker takes the call"),
    Point("rpcdist.profiling._calls:noop", "the function begins", "the function has returned"),
    Point("rpcdist.profiling._calls:echo", "the function begins", "the function has returned"),
    Point("rpcdist.profiling._calls:Counter.increment", "the function begins", "the function has returned"),
    # The caller again.
    Point("rpcdist.rpc._calling.caller:Caller.on_reply", "the caller takes the reply"),
    Point("rpcdist.rpc._calling.reply_sinks:SyncReplySink.replied", "the result goes to the waiting thread"),
    Point("rpcdist.rpc._calling.reply_sinks:result_of", "the waiting thread has the result, and decodes it"),
)
