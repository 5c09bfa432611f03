"""Following commands with the SDK, asynchronous and synchronous."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from orchard.env import errors
from orchard.env.client import OutputGap
from tests.conformance.runtimes import Images
from tests.support.sdk import Sdk, collected, open_sdk
from tests.support.service import Service


@pytest.fixture
async def sandbox(sdk: Sdk, images: Images) -> Any:
    made = await sdk.create(images.full)
    yield made
    await made.delete()


def unthreaded(happening: Any) -> Any:
    return getattr(happening, "_target", happening)


async def followed(handle: Any, *args: int) -> list[Any]:
    return [unthreaded(happening) for happening in await collected(handle.stream(*args))]


def joined(happenings: list[Any], stream: str) -> bytes:
    return b"".join(h.data for h in happenings if not isinstance(h, OutputGap) and h.stream == stream)


async def test_a_command_is_followed_to_its_result(sandbox: Any) -> None:
    handle = await sandbox.commands.start("echo out; echo err >&2; exit 3", background=False)
    found = await followed(handle)
    assert (joined(found, "stdout"), joined(found, "stderr")) == (b"out\n", b"err\n")
    assert (handle.job.exit_code, handle.job.stdout) == (3, "out\n")


async def test_following_begins_at_the_offsets_given(sandbox: Any) -> None:
    handle = await sandbox.commands.start("printf 0123456789; printf abc >&2")
    found = await followed(handle, 6, 3)
    assert [(h.stream, h.offset, h.data) for h in found] == [("stdout", 6, b"6789")]


async def test_what_is_gone_is_a_gap(sandbox: Any) -> None:
    handle = await sandbox.commands.start(
        "head -c 2000000 /dev/zero", max_spool_bytes=1 << 20, max_output_bytes=0
    )
    await handle.wait()
    gaps = [h for h in await followed(handle) if isinstance(h, OutputGap)]
    assert [(gap.stream, gap.start, gap.end) for gap in gaps] == [("stdout", 0, 2_000_000 - (1 << 20))]


async def test_large_output_arrives_whole(sandbox: Any) -> None:
    command = "i=0; while [ $i -lt 400 ]; do head -c 100000 /dev/zero | tr '\\0' x; i=$((i+1)); done"
    handle = await sandbox.commands.start(command, max_spool_bytes=64 << 20)
    found = await followed(handle)
    assert joined(found, "stdout") == b"x" * 40_000_000


async def test_leaving_early_leaves_the_command_alone(sdk: Sdk, sandbox: Any) -> None:
    handle = await sandbox.commands.start("echo first; sleep 0.5; echo second")
    stream = handle.stream()
    if hasattr(stream, "__aiter__"):
        assert (await anext(stream)).data == b"first\n"
        await stream.aclose()
    else:
        stream = await stream
        assert (await asyncio.to_thread(next, stream)).data == b"first\n"
        await asyncio.to_thread(stream.close)
    assert (await handle.wait()).stdout == "first\nsecond\n"


async def test_an_unknown_command_raises(sandbox: Any) -> None:
    handle = await sandbox.commands.start("true")
    await handle.wait()
    unthreaded(handle)._job_id = "no-such-job"
    inner = getattr(unthreaded(handle), "_async", None)
    if inner is not None:
        inner._job_id = "no-such-job"
    with pytest.raises(errors.JobNotFound):
        await followed(handle)


@pytest.mark.parametrize("flavour", ["async", "sync"])
async def test_following_goes_on_while_the_service_is_killed_and_comes_back(
    own_service: Callable[..., Service], flavour: str
) -> None:
    service = own_service()
    async with open_sdk(flavour, service.base_url, service.api_key) as client:
        sandbox = await client.create("host")
        handle = await sandbox.commands.start("for i in $(seq 60); do echo $i; sleep 0.1; done")
        following = asyncio.ensure_future(followed(handle))
        await asyncio.sleep(1)
        await asyncio.to_thread(service.kill)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(service.start)
        found = await following
        assert joined(found, "stdout") == b"".join(b"%d\n" % i for i in range(1, 61))
        offsets = [h.offset for h in found]
        assert offsets == sorted(set(offsets))
        await sandbox.delete()
