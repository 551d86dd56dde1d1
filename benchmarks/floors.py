"""$ python benchmarks/floors.py
What an echo of a large payload costs without RPC: over TCP with blocking calls, on one connection and in halves on two
that have a thread each, and over one bare stream of gRPC, all over loopback between two processes. No channel of that
kind can be faster.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
import uvloop
from _cases import MIB, time_calls
from _pairs import free_port
from _report import RESULTS, Line, about_machine, layout, show, write_results

HEAD: Line = ("what", "size", "unit", "median", "least")
SIZES = ((1, 100), (16, 10), (64, 4))  # in MiB, and how many echoes are measured
CHUNK_BYTES = 1 << 19  # as in our channels
START_LIMIT_S = 30.0
METHOD = "/floor.Floor/Echo"


# ---- TCP


def echo_over_tcp(connections: list[socket.socket], size_bytes: int) -> None:
    """Sends back what comes, a thread for each connection, until their other ends are closed."""

    def serve(connection: socket.socket) -> None:
        memory = memoryview(bytearray(size_bytes))
        with connection:
            while receive(connection, memory):
                connection.sendall(memory)

    with ThreadPoolExecutor(len(connections)) as pool:
        list(pool.map(serve, connections))


def receive(connection: socket.socket, memory: memoryview) -> bool:
    """Fills the memory; False if the other end is closed."""
    at = 0
    while at < len(memory):
        num_bytes = connection.recv_into(memory[at:])
        if not num_bytes:
            return False
        at += num_bytes
    return True


def connect(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a new connection."""
    ends = socket.create_connection(listener.getsockname()), listener.accept()[0]
    for end in ends:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ends


def measure_tcp(size_bytes: int, num_calls: int, num_connections: int = 1) -> list[float]:
    part_bytes = size_bytes // num_connections
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(START_LIMIT_S)
        ends = [connect(listener) for _ in range(num_connections)]
    theirs = [end for _, end in ends]
    process = multiprocessing.get_context("spawn").Process(target=echo_over_tcp, args=(theirs, part_bytes), daemon=True)
    process.start()
    for end in theirs:
        end.close()
    sent = bytes(part_bytes)
    received = [memoryview(bytearray(part_bytes)) for _ in ends]

    def echo(number: int) -> None:
        ours = ends[number][0]
        ours.sendall(sent)
        if not receive(ours, received[number]):
            raise ConnectionError("the other process has ended")

    with ThreadPoolExecutor(num_connections) as pool, ExitStack() as opened:
        for ours, _ in ends:
            opened.enter_context(ours)
        if num_connections == 1:
            times_s = time_calls(partial(echo, 0), num_calls, num_warm_up=2)
        else:
            times_s = time_calls(lambda: list(pool.map(echo, range(num_connections))), num_calls, num_warm_up=2)
    process.join(START_LIMIT_S)
    return times_s


# ---- gRPC


def as_it_is(data: bytes) -> bytes:
    return data


def chunks_of(memory: memoryview) -> list[bytes]:
    return [bytes(memory[at : at + CHUNK_BYTES]) for at in range(0, len(memory), CHUNK_BYTES)]


async def serve(port: int, size_bytes: int) -> None:
    async def echo(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        memory, at = memoryview(bytearray(size_bytes)), 0
        async for message in messages:
            memory[at : at + len(message)] = message
            at += len(message)
            if at == size_bytes:
                at = 0
                for chunk in chunks_of(memory):
                    yield chunk

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(echo, as_it_is, as_it_is)
    service, _, method = METHOD[1:].partition("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def run_server(port: int, size_bytes: int) -> None:
    uvloop.run(serve(port, size_bytes))


async def call_grpc(port: int, size_bytes: int, num_calls: int) -> list[float]:
    memory = memoryview(bytearray(size_bytes))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), START_LIMIT_S)
        stream = channel.stream_stream(METHOD, as_it_is, as_it_is)()

        async def send() -> None:
            for chunk in chunks_of(memory):
                await stream.write(chunk)

        loop, times_s = asyncio.get_running_loop(), []
        for _ in range(num_calls):
            began = loop.time()
            sending, at = asyncio.create_task(send()), 0
            while at < size_bytes:
                message: Any = await stream.read()
                memory[at : at + len(message)] = message
                at += len(message)
            await sending
            times_s.append(loop.time() - began)
        stream.cancel()
    return times_s


def measure_grpc(size_bytes: int, num_calls: int) -> list[float]:
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=run_server, args=(port, size_bytes), daemon=True)
    process.start()
    try:
        return uvloop.run(call_grpc(port, size_bytes, num_calls))
    finally:
        process.kill()
        process.join(START_LIMIT_S)


# ---- the command

FLOORS: tuple[tuple[str, Callable[[int, int], list[float]]], ...] = (
    ("echo over a plain TCP connection", measure_tcp),
    ("echo over two plain TCP connections, in halves", partial(measure_tcp, num_connections=2)),
    ("echo over a bare stream of gRPC", measure_grpc),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("--write", action="store_true", help=f"put the table into {RESULTS.name}")
    arguments = parser.parse_args()
    about = [*about_machine("grpcio", "uvloop"), "- two processes, over loopback, nothing pinned"]
    print("\n".join(about), flush=True)
    lines: list[Line] = []
    for what, measure in FLOORS:
        for size_mib, num_calls in SIZES:
            times_ms = [1e3 * time_s for time_s in measure(size_mib * MIB, num_calls)]
            lines.append((what, f"{size_mib} MiB", "ms", show(statistics.median(times_ms)), show(min(times_ms))))
    table = layout(HEAD, lines)
    print("\n".join(["", *table]))
    if arguments.write:
        write_results("floors.py", [*about, "", *table])
    return 0


if __name__ == "__main__":
    sys.exit(main())
