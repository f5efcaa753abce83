"""`python -m tests.support.delay HOST:PORT TARGET:PORT MILLISECONDS`: a TCP proxy that makes a way longer, each way."""

from __future__ import annotations

import asyncio
import sys

from tests.support.link_proxy import LinkProxy


async def main(listen: str, target: str, delay_ms: float) -> None:
    """Pass bytes until ended."""
    host, port = listen.split(":")
    target_host, target_port = target.split(":")
    proxy = LinkProxy(int(target_port), target_host=target_host, host=host, port=int(port))
    proxy.delay_s = {"there": delay_ms / 1000, "back": delay_ms / 1000}
    async with proxy.run():
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
