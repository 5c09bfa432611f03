"""Many sandboxes at once with the asynchronous client, and what is known of each afterwards."""

import asyncio

from orchard import AsyncSandboxClient


async def count_to(client: AsyncSandboxClient, number: int) -> str:
    """Counts in a sandbox of its own, which is deleted at the end of the block, whatever happens in it."""
    async with await client.create("host", memory="128Mi", pids=64, labels={"example": "many"}) as sandbox:
        job = await sandbox.exec(f"seq {number} | tail -n 1", timeout_s=30, check=True)
        stats = await sandbox.stats()
        return f"{job.stdout.strip()} in {job.duration_seconds:.3f} s, {stats.pids} process alive"


async def main() -> None:
    async with AsyncSandboxClient() as client:
        for line in await asyncio.gather(*(count_to(client, number) for number in range(1, 21))):
            print(line)


if __name__ == "__main__":
    asyncio.run(main())
