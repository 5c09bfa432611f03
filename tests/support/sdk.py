"""Both flavours of the SDK under one asynchronous face, so that one test states a behaviour for both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from typing import Any

from orchard.env.client import AsyncSandboxClient, SandboxClient

Sdk = Any


class Threaded:
    """Calls of a synchronous object, each awaited in a thread. Attributes that are no methods pass through."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return wrapped(value)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return wrapped(await asyncio.to_thread(value, *args, **kwargs))

        return call


def wrapped(value: Any) -> Any:
    """`value`, threaded if it is a synchronous part of the SDK that has methods to call."""
    if isinstance(value, list):
        return [wrapped(item) for item in value]
    module = type(value).__module__
    return (
        Threaded(value) if module.startswith("orchard.env.client") and not inspect.isclass(value) else value
    )


@asynccontextmanager
async def open_sdk(flavour: str, base_url: str, api_key: str | None, **options: Any) -> AsyncIterator[Sdk]:
    """The `async` or `sync` client for this service."""
    if flavour == "async":
        async with AsyncSandboxClient(base_url=base_url, api_key=api_key, **options) as client:
            yield client
        return
    with SandboxClient(base_url=base_url, api_key=api_key, **options) as sync_client:
        yield Threaded(sync_client)


async def collected(iterable: Any) -> list[Any]:
    """The items of what `sdk.list` gave, in either flavour."""
    if inspect.isawaitable(iterable):
        iterable = await iterable
    if hasattr(iterable, "__aiter__"):
        return [item async for item in iterable]
    return [wrapped(item) for item in await asyncio.to_thread(list, iterable)]


async def each(iterable: Any) -> AsyncGenerator[Any, None]:
    """The items one by one, in either flavour."""
    if inspect.isawaitable(iterable):
        iterable = await iterable
    if hasattr(iterable, "__aiter__"):
        async with aclosing(iterable):
            async for item in iterable:
                yield item
        return
    with closing(iterable):
        while (item := await asyncio.to_thread(next, iterable, None)) is not None:
            yield wrapped(item)
