"""Three proxies on one PostgreSQL behind one port, each with a `var/` and a directory of the CLI of its own, as three
hosts have: every connection goes to the next of them.

    python three_hosts.py PORT FOLDER CONFIG CLAUDE STORE
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys

from turnfault.ports import free_port

HOSTS = 3
# Seconds between two tries to reach a proxy that starts, and for all of them to be there.
POLL, START = 0.05, 60.0


async def main(port: int, folder: str, config: str, claude: str, store: str) -> None:
    ports = [free_port() for _ in range(HOSTS)]
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cli_session_proxy", "serve", "--port", str(one), "--store", store,
            "--var", f"{folder}/host-{number}/var", "--claude-config-dir", f"{config}/host-{number}",
            "--claude-bin", claude,
        )
        for number, one in enumerate(ports)
    ]  # fmt: skip
    async with asyncio.timeout(START):
        for one in ports:
            while not await reachable(one):
                await asyncio.sleep(POLL)
    order = itertools.cycle(ports)

    async def forward(client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", next(order))
        await asyncio.gather(copied(client, writer), copied(reader, answer), return_exceptions=True)

    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    async with await asyncio.start_server(forward, "127.0.0.1", port):
        await ending.wait()
    for process in processes:
        process.terminate()
    await asyncio.gather(*(process.wait() for process in processes))


async def reachable(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), *sys.argv[2:]))
