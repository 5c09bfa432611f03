"""Files of any size and trees through the SDK, in both flavours."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchard.env import errors
from orchard.env.client import AsyncSandboxClient
from tests.conformance.conftest import NewBox
from tests.support.faults import Fault, faulty_proxy
from tests.support.rest import Box
from tests.support.sdk import Sdk, collected
from tests.support.service import Service
from tests.support.waiting import eventually


@pytest.fixture
async def sandbox(sdk: Sdk) -> AsyncIterator[Any]:
    made = await sdk.create("host")
    yield made
    await made.delete()


def shape(root: Path) -> dict[str, object]:
    """Path → mode, time and content of everything below, or a link's target."""
    found: dict[str, object] = {}
    for path in root.rglob("*"):
        info = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = (
            str(path.readlink())
            if path.is_symlink()
            else (stat.filemode(info.st_mode), info.st_mtime_ns, content)
        )
    return found


async def test_a_stream_goes_in_and_comes_out(sandbox: Any) -> None:
    pieces = [os.urandom(700_000) for _ in range(5)]
    written = await sandbox.files.write_stream("/tmp/d/f", iter(pieces), mode=0o751)
    assert written.size == 3_500_000
    assert (await sandbox.files.stat("/tmp/d/f")).mode == 0o751
    back = await collected(sandbox.files.stream("/tmp/d/f"))
    assert len(back) > 1
    assert b"".join(back) == b"".join(pieces)


async def test_an_error_of_the_source_is_raised_and_nothing_is_written(
    sandbox: Any, service: Service
) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x" * 3_000_000
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        await sandbox.files.write_stream("/tmp/f", pieces())
    # The service may learn of it a moment later.
    box = Box(service.rest, sandbox.sandbox_id)
    await asyncio.to_thread(eventually, lambda: box.ls("/tmp") == {}, "nothing is left of it")


async def test_what_cannot_be_streamed_is_a_typed_error(sandbox: Any) -> None:
    with pytest.raises(errors.FileMissing):
        await collected(sandbox.files.stream("/tmp/nope"))
    with pytest.raises(errors.PathInvalid):
        await collected(sandbox.files.stream("/tmp"))
    with pytest.raises(errors.PathInvalid):
        await sandbox.files.write_stream("/tmp", [b"x"])


async def test_an_endless_upload_to_a_full_disk_ends(sdk: Sdk) -> None:
    sandbox = await sdk.create("host", disk="64Mi")

    def endless() -> Iterator[bytes]:
        while True:
            yield bytes(1 << 20)

    with pytest.raises(errors.DiskFull):
        await sandbox.files.write_stream("/tmp/f", endless())
    assert await sandbox.files.list("/tmp") == []
    await sandbox.delete()


async def test_entries_are_made_moved_and_removed(sandbox: Any) -> None:
    files = sandbox.files
    await files.mkdir("/tmp/a/b", parents=True, mode=0o700)
    with pytest.raises(errors.Conflict):
        await files.mkdir("/tmp/a")
    await files.move("/tmp/a/b", "/tmp/c")
    assert (await files.stat("/tmp/c")).type == "directory"
    await files.write("/tmp/c/f", b"x")
    with pytest.raises(errors.Conflict):
        await files.remove("/tmp/c")
    await files.remove("/tmp/c", recursive=True)
    with pytest.raises(FileNotFoundError):
        await files.stat("/tmp/c")


async def test_a_tree_keeps_modes_times_links_and_names(sandbox: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "empty").mkdir(parents=True)
    (source / "d" / "ünï ☃").mkdir(parents=True)
    (source / "d/big").write_bytes(os.urandom(5_000_000))
    (source / "d/script").write_text("#!/bin/sh\n")
    (source / "d/script").chmod(0o755)
    (source / "d.x").write_text("sorts between d and d/big")
    (source / os.fsdecode(b"\xff\xfe")).write_text("no text")
    (source / "d/up").symlink_to("../empty")
    os.utime(source / "d/script", ns=(10**18, 10**18 + 7))
    (source / "d").chmod(0o555)
    os.utime(source / "d", ns=(10**18, 10**18 + 9))
    await sandbox.files.upload(source, "/tmp/tree")
    await sandbox.files.download("/tmp/tree", tmp_path / "back")
    assert shape(tmp_path / "back") == shape(source)


async def test_a_file_larger_than_json_takes_is_copied(sandbox: Any, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(300 << 20)
    await sandbox.files.upload(tmp_path / "large", "/tmp/large")
    await sandbox.files.download("/tmp/large", tmp_path / "back")
    assert (tmp_path / "back").stat().st_size == 300 << 20


async def test_a_download_that_breaks_off_leaves_no_file(sdk: Sdk, tmp_path: Path) -> None:
    sandbox = await sdk.create("host")
    await sandbox.exec(["truncate", "-s", "2G", "/tmp/f"])
    fetching = asyncio.ensure_future(sandbox.files.download("/tmp/f", tmp_path / "d/f"))
    await asyncio.to_thread(
        eventually, lambda: any((tmp_path / "d").glob(".f*")), "the download is under way"
    )
    assert not fetching.done()
    await sandbox.delete()
    with pytest.raises(errors.SandboxDeleted):
        await fetching
    assert list((tmp_path / "d").iterdir()) == []


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.CUT, Fault.OVERLOADED])
async def test_trees_and_files_survive_faults(
    service: Service, new_box: NewBox, tmp_path: Path, fault: Fault
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/f").write_bytes(os.urandom(2_000_000))
    box = new_box()
    async with faulty_proxy(service.base_url) as proxy:
        proxy.decide = lambda method, path, n: fault if n == 0 and "sandboxes/" in path else Fault.NONE
        async with AsyncSandboxClient(base_url=proxy.base_url, api_key=service.api_key) as client:
            files = (await client.get(box.id)).files
            await files.upload(tmp_path / "in", "/tmp/t")
            await files.upload(tmp_path / "in/f", "/tmp/f")
            await files.download("/tmp/t", tmp_path / "tree")
            await files.download("/tmp/f", tmp_path / "file")
    assert shape(tmp_path / "tree") == shape(tmp_path / "in")
    assert (tmp_path / "file").read_bytes() == (tmp_path / "in/f").read_bytes()


async def test_an_iterator_is_not_sent_twice(service: Service, new_box: NewBox) -> None:
    box = new_box()
    async with faulty_proxy(service.base_url) as proxy:
        proxy.decide = lambda method, _path, n: Fault.LOST_ANSWER if (method, n) == ("PUT", 0) else Fault.NONE
        async with AsyncSandboxClient(base_url=proxy.base_url, api_key=service.api_key) as client:
            files = (await client.get(box.id)).files
            with pytest.raises(errors.ConnectionFailed):
                await files.write_stream("/tmp/once", iter([b"x"]))
            proxy.seen.clear()
            await files.write_stream("/tmp/again", [b"a", b"b"])
    assert box.read("/tmp/again") == b"ab"
