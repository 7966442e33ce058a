"""The peer of the state benchmark: bytes through grpc.aio, with nothing else around them.

    python -m bench.raw --port 50999

serves two methods: `Down` streams as many messages of a size as its request asks for ("COUNT SIZE"), `Up` takes a
stream and answers with the number of its bytes.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc


async def down(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    count, size = map(int, request.split())
    data = bytes(size)
    for _ in range(count):
        await context.write(data)


async def up(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    total = 0
    async for data in requests:
        total += len(data)
    return str(total).encode()


async def serve(port: int) -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    handlers = {
        "Down": grpc.unary_stream_rpc_method_handler(down),
        "Up": grpc.stream_unary_rpc_method_handler(up),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Raw", handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
