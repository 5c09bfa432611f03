"""The SDK, asynchronous and synchronous, against the real service: the same names, the same meanings."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from orchard.env import errors
from tests.conformance.conftest import NewBox
from tests.conformance.runtimes import Images
from tests.support.rest import Rest, new_id
from tests.support.sdk import Sdk, collected, open_sdk
from tests.support.service import Service


@pytest.fixture
async def sandbox(sdk: Sdk, images: Images) -> Any:
    made = await sdk.create(images.full)
    yield made
    await made.delete()


async def test_a_command_runs_and_tells_its_result(sandbox: Any) -> None:
    job = await sandbox.exec("echo out; echo err >&2; exit 3")
    assert (job.stdout, job.stderr, job.exit_code, job.status, job.timed_out) == (
        "out\n",
        "err\n",
        3,
        "failed",
        False,
    )


async def test_a_list_is_exact_argv(sandbox: Any) -> None:
    job = await sandbox.exec(["printf", "%s|", "a b", "", "'\"$x", "☃\n"])
    assert job.stdout == "a b||'\"$x|☃\n|"


async def test_every_option_of_exec_arrives(sandbox: Any) -> None:
    job = await sandbox.exec(
        'pwd; echo "$A"; cat; id -u', cwd="/tmp", env={"A": "b"}, stdin="given\n", user="nobody", job_id=new_id(),
        timeout_s=30, grace_s=0.5, login_shell=False, on_disconnect="keep", max_output_bytes=1000, concurrent=True,
    )  # fmt: skip
    assert job.stdout.splitlines()[:3] == ["/tmp", "b", "given"]
    assert job.stdout.splitlines()[3] != "0"


async def test_a_timeout_is_a_result(sandbox: Any) -> None:
    job = await sandbox.exec("echo before; sleep 60", timeout_s=0.5)
    assert (job.timed_out, job.exit_code, job.stdout) == (True, 124, "before\n")


async def test_check_raises_for_a_failure(sandbox: Any) -> None:
    with pytest.raises(errors.CommandFailed) as caught:
        await sandbox.exec("echo why >&2; exit 3", check=True)
    assert caught.value.job.exit_code == 3
    assert "why" in str(caught.value)


async def test_check_raises_for_a_timeout(sandbox: Any) -> None:
    with pytest.raises(errors.CommandTimeout) as caught:
        await sandbox.exec("sleep 60", timeout_s=0.3, check=True)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.job.timed_out


async def test_a_missing_directory_is_a_typed_error(sandbox: Any) -> None:
    with pytest.raises(errors.CwdNotFound, match="/nope"):
        await sandbox.exec("true", cwd="/nope")


async def test_files_go_in_and_come_out(sandbox: Any) -> None:
    content = os.urandom(300_000)
    await sandbox.files.write("/tmp/d/f", content, mode=0o755)
    assert await sandbox.files.read("/tmp/d/f") == content
    (entry,) = await sandbox.files.list("/tmp/d")
    assert (entry.name, entry.type, entry.size, entry.mode & 0o777) == ("f", "file", 300_000, 0o755)
    with pytest.raises(errors.FileMissing):
        await sandbox.files.read("/tmp/nope")
    with pytest.raises(FileNotFoundError):
        await sandbox.files.list("/tmp/nope")


async def test_a_tree_goes_in_and_comes_out(sandbox: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "empty").mkdir(parents=True)
    (source / "sub").mkdir()
    (source / "sub/script").write_text("#!/bin/sh\necho ran\n")
    (source / "sub/script").chmod(0o755)
    (source / "ünï ☃").write_bytes(b"\xff\x00")
    (source / "link").symlink_to("sub/script")
    await sandbox.files.upload(source, "/tmp/tree")
    assert (await sandbox.exec(["/tmp/tree/link"])).stdout == "ran\n"
    await sandbox.files.download("/tmp/tree", tmp_path / "back")

    def shape(root: Path) -> dict[str, object]:
        return {
            str(p.relative_to(root)): (
                str(p.readlink())
                if p.is_symlink()
                else "dir"
                if p.is_dir()
                else (p.read_bytes(), p.stat().st_mode & 0o777)
            )
            for p in root.rglob("*")
        }

    assert shape(tmp_path / "back") == shape(source)


async def test_a_download_plants_nothing_outside_its_target(sandbox: Any, tmp_path: Path) -> None:
    await sandbox.exec(
        "mkdir -p /tmp/evil; cd /tmp/evil; ln -s /etc/passwd x; ln -s ../../../../../tmp up; echo y > y"
    )
    target = tmp_path / "a/b/target"
    try:
        await sandbox.files.download("/tmp/evil", target)
    except errors.PathInvalid:
        pass
    stray = await asyncio.to_thread(_leads_out_of, target)
    assert stray == []
    names = {p.name for p in await asyncio.to_thread(lambda: list(tmp_path.rglob("*")))}
    assert names <= {"a", "b", "target", "x", "up", "y"}


def _leads_out_of(target: Path) -> list[Path]:
    """Links below `target` to a place outside of it, and files that hold what such a link would have shown."""
    inside = target.resolve()
    return [
        path
        for path in (target.rglob("*") if target.exists() else ())
        if (path.is_symlink() and not path.resolve().is_relative_to(inside))
        or (path.is_file() and not path.is_symlink() and b"root:" in path.read_bytes())
    ]


async def test_a_large_file_arrives_whole(sandbox: Any, tmp_path: Path) -> None:
    block = os.urandom(1 << 20)
    (tmp_path / "large").write_bytes(block * 40)
    await sandbox.files.upload(tmp_path / "large", "/tmp/large")
    inside = (await sandbox.exec(["sha256sum", "/tmp/large"])).stdout.split()[0]
    assert inside == hashlib.sha256(block * 40).hexdigest()


async def test_a_patch_is_applied(sandbox: Any) -> None:
    await sandbox.files.write("/tmp/p/f", b"a\r\n")
    result = await sandbox.apply_patch("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\r\n+b\r\n", cwd="/tmp/p")
    assert (result.success, result.exit_code) == (True, 0)
    assert await sandbox.files.read("/tmp/p/f") == b"b\r\n"


async def test_a_command_may_be_started_found_again_and_waited_for(sandbox: Any) -> None:
    handle = await sandbox.commands.start("cat; echo end", stdin_open=True)
    await handle.send_stdin("one\n")
    again = await sandbox.commands.attach(handle.job_id)
    await again.send_stdin(b"two\n", eof=True)
    job = await handle.wait(30)
    assert (job.stdout, job.exit_code) == ("one\ntwo\nend\n", 0)
    assert handle.job_id in [job.job_id for job in await sandbox.commands.list()]


async def test_a_wait_may_end_first(sandbox: Any) -> None:
    handle = await sandbox.commands.start("sleep 60")
    with pytest.raises(errors.SandboxTimeout):
        await handle.wait(0.3)
    job = await handle.cancel()
    assert (await handle.wait(30)).error_code == "cancelled"
    assert job.job_id == handle.job_id


async def test_a_command_takes_signals(sandbox: Any) -> None:
    handle = await sandbox.commands.start(["sleep", "60"])
    for _ in range(200):
        if (await handle.refresh()).status == "running":
            break
        await asyncio.sleep(0.02)
    await handle.signal("INT")
    assert (await handle.wait(30)).signal == "INT"
    with pytest.raises(errors.JobNotRunning):
        await handle.signal("INT")
    await handle.kill()


async def test_a_sandbox_may_be_changed_and_looked_at(sandbox: Any) -> None:
    info = await sandbox.update(ttl_seconds=500, labels={"a": "b"})
    assert (info.ttl_seconds, info.labels) == (500, {"a": "b"})
    assert (await sandbox.stats()).pids >= 0
    assert (await sandbox.logs()).lines
    assert (await sandbox.heartbeat()).lease_expires_at is not None


async def test_sandboxes_are_found_by_label_and_by_id(sdk: Sdk, images: Images) -> None:
    label = new_id("sdk")
    made = [await sdk.create(images.full, labels={"run": label}) for _ in range(3)]
    found = await collected(sdk.list(labels={"run": label}, page_size=2))
    assert {s.sandbox_id for s in found} == {s.sandbox_id for s in made}
    again = await sdk.get(made[0].sandbox_id)
    assert (await again.exec("echo same")).stdout == "same\n"
    deleted = await sdk.delete_all(labels={"run": label})
    assert set(deleted) == {s.sandbox_id for s in made}


async def test_a_batch_is_created_in_order(sdk: Sdk, images: Images) -> None:
    ids = [new_id("batch") for _ in range(3)]
    boxes = await sdk.create_batch([{"image": images.full, "sandbox_id": i} for i in ids])
    assert [b.sandbox_id for b in boxes] == ids
    for box in boxes:
        assert (await box.exec("echo ok")).ok
        await box.delete()


async def test_a_deleted_sandbox_raises_its_own_error(sdk: Sdk, images: Images) -> None:
    sandbox = await sdk.create(images.full)
    await sandbox.delete()
    await sandbox.delete()
    with pytest.raises(errors.SandboxDeleted) as caught:
        await sandbox.exec("true")
    assert (caught.value.reason, caught.value.retryable) == ("deleted", False)


async def test_an_expired_sandbox_raises_its_own_error(sdk: Sdk, images: Images) -> None:
    sandbox = await sdk.create(images.full, ttl_seconds=0.7)
    await asyncio.sleep(0.8)
    for _ in range(100):
        try:
            await sandbox.exec("true", timeout_s=0.1)
        except errors.SandboxFailed as error:
            assert (error.reason, error.infra, error.retryable) == ("ttl", True, False)
            return
        except errors.LifetimeExceeded:
            await asyncio.sleep(0.05)
    raise AssertionError("it did not expire")


async def test_an_unknown_sandbox_raises_its_own_error(sdk: Sdk) -> None:
    with pytest.raises(errors.SandboxNotFound) as caught:
        await sdk.get(new_id())
    assert not isinstance(caught.value, errors.SandboxDeleted | errors.SandboxFailed)


async def test_an_image_that_does_not_exist_raises_its_own_error(sdk: Sdk) -> None:
    with pytest.raises((errors.SandboxFailed, errors.ImageNotFound)) as caught:
        await sdk.create("no-such-image:1")
    assert "no-such-image:1" in str(caught.value)
    assert isinstance(caught.value, errors.ImageNotFound) or caught.value.reason == "image_not_found"


async def test_a_senseless_request_raises_before_or_after_it_is_sent(sdk: Sdk, images: Images) -> None:
    with pytest.raises(errors.InvalidRequest):
        await sdk.create(images.full, sandbox_id="Not Valid")
    with pytest.raises(errors.InvalidRequest):
        await sdk.create(images.full, cpu="many")


async def test_a_conflict_raises_its_own_error(sdk: Sdk, images: Images, new_box: NewBox) -> None:
    box = new_box()
    with pytest.raises(errors.Conflict):
        await sdk.create(images.busybox, sandbox_id=box.id)


@pytest.mark.parametrize("flavour", ["async", "sync"])
async def test_a_wrong_key_raises_unauthorized(flavour: str, service: Service) -> None:
    async with open_sdk(flavour, service.base_url, "wrong") as client:
        with pytest.raises(errors.Unauthorized):
            await client.resources()


@pytest.mark.parametrize("flavour", ["async", "sync"])
async def test_the_environment_names_service_and_key(
    flavour: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for base, key in (("SANDBOX_BASE_URL", "SANDBOX_API_KEY"), ("ORCHARD_BASE_URL", "ORCHARD_API_KEY")):
        monkeypatch.setenv(base, service.base_url)
        monkeypatch.setenv(key, service.api_key or "")
        async with open_sdk(flavour, None, None) as client:  # type: ignore[arg-type]
            assert (await client.resources()).cpu_cores > 0
        monkeypatch.setenv(base, "http://127.0.0.1:1")


@pytest.mark.parametrize("flavour", ["async", "sync"])
async def test_a_client_asked_to_clean_up_deletes_what_it_made(
    flavour: str, service: Service, rest: Rest, images: Images
) -> None:
    async with open_sdk(flavour, service.base_url, service.api_key, cleanup=True) as client:
        sandbox = await client.create(images.full)
        sandbox_id = sandbox.sandbox_id
    assert rest.get(f"/sandboxes/{sandbox_id}").code == "sandbox_deleted"


async def test_an_async_sandbox_is_deleted_at_the_end_of_its_block(
    service: Service, rest: Rest, images: Images
) -> None:
    async with open_sdk("async", service.base_url, service.api_key) as client:
        with pytest.raises(RuntimeError):
            async with await client.create(images.full) as sandbox:
                raise RuntimeError("inside")
    assert rest.get(f"/sandboxes/{sandbox.sandbox_id}").code == "sandbox_deleted"


async def test_a_sync_sandbox_is_deleted_at_the_end_of_its_block(
    service: Service, rest: Rest, images: Images
) -> None:
    from orchard.env.client import SandboxClient

    def use() -> str:
        client = SandboxClient(base_url=service.base_url, api_key=service.api_key)
        with client, client.create(images.full) as sandbox:
            assert sandbox.exec("echo hi").stdout == "hi\n"
            return sandbox.sandbox_id

    sandbox_id = await asyncio.to_thread(use)
    assert rest.get(f"/sandboxes/{sandbox_id}").code == "sandbox_deleted"


async def test_the_published_names_work(sandbox: Any, sdk: Sdk, images: Images, tmp_path: Path) -> None:
    await sandbox.upload_content(b"content", "/tmp/f")
    assert await sandbox.download_content("/tmp/f") == b"content"
    await sandbox.download_file("/tmp/f", str(tmp_path / "f"))
    await sandbox.upload_file(str(tmp_path / "f"), "/tmp/g")
    assert {"f", "g"} <= {e.name for e in await sandbox.list_files("/tmp")}
    job = await sandbox.exec("echo x")
    assert (await sandbox.get_job(job.job_id)).stdout == "x\n"
    other = await sdk.create_sandbox(images.full)
    await other.delete()


async def test_a_thousand_commands_at_once_need_no_pool_setting(service: Service, images: Images) -> None:
    async with open_sdk("async", service.base_url, service.api_key) as client:
        boxes = [await client.create(images.full) for _ in range(10)]
        jobs = await asyncio.gather(
            *(boxes[n % 10].exec(["echo", str(n)], concurrent=True) for n in range(1000))
        )
        assert [job.stdout for job in jobs] == [f"{n}\n" for n in range(1000)]
        for box in boxes:
            await box.delete()
