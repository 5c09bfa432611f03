"""The SDK, both flavours, against the real service."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchard.env import errors
from orchard.env.client import AsyncSandbox, AsyncSandboxClient, JobResult, Sandbox, SandboxClient
from orchard.env.contract import CreateSandbox
from tests.support.sdk import Sdk, open_sdk
from tests.support.service import Service

pytestmark = pytest.mark.xdist_group("client-service")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    server = Service(tmp_path_factory.mktemp("client") / "state").start()
    yield server
    server.delete_all()
    assert server.stop() == 0


@pytest.fixture(params=["async", "sync"])
async def sdk(request: pytest.FixtureRequest, real: Service) -> AsyncIterator[Sdk]:
    async with open_sdk(request.param, real.base_url, real.api_key, cleanup=True) as client:
        yield client


@pytest.fixture
async def client(real: Service) -> AsyncIterator[AsyncSandboxClient]:
    async with AsyncSandboxClient(real.base_url, real.api_key, cleanup=True) as open_client:
        yield open_client


@pytest.fixture(scope="module")
def box(real: Service) -> Iterator[Sandbox]:
    with SandboxClient(real.base_url, real.api_key) as shared, shared.create("host") as sandbox:
        yield sandbox


async def test_create_exec_delete(sdk: Sdk) -> None:
    sandbox = await sdk.create("host", labels={"purpose": "test"}, env={"COLOUR": "green"})
    job = await sandbox.exec("echo $COLOUR; echo bad >&2; exit 3")
    assert (job.stdout, job.stderr, job.exit_code, job.ok) == ("green\n", "bad\n", 3, False)
    await sandbox.delete()
    await sandbox.delete()
    with pytest.raises(errors.SandboxDeleted):
        await sandbox.exec("true")


async def test_check_raises_what_happened(sdk: Sdk) -> None:
    sandbox = await sdk.create("host")
    with pytest.raises(errors.CommandFailed, match="exited with 4"):
        await sandbox.exec("exit 4", check=True)
    with pytest.raises(errors.CommandTimeout) as caught:
        await sandbox.exec("echo before; sleep 60", timeout_s=0.5, check=True)
    assert caught.value.job.stdout == "before\n"
    with pytest.raises(errors.CwdNotFound):
        await sandbox.exec("true", cwd="/nope")


async def test_every_option_of_exec_arrives(sdk: Sdk) -> None:
    sandbox = await sdk.create("host")
    own_id = f"mine-{sandbox.sandbox_id}"
    job = await sandbox.exec(
        "pwd; printenv A; cat; id -un",
        cwd="/usr",
        env={"A": "x y"},
        stdin="in\n",
        user="nobody",
        timeout_s=30,
        grace_s=0.5,
        on_disconnect="keep",
        job_id=own_id,
        max_output_bytes=1000,
        concurrent=True,
    )
    assert job.stdout == "/usr\nx y\nin\nnobody\n"
    assert job.job_id == own_id
    assert (await sandbox.get_job(own_id)).stdout == job.stdout
    assert (await sandbox.exec(["head", "-c", "5000", "/dev/zero"], max_output_bytes=100)).stdout_truncated


async def test_kill_on_disconnect_returns_the_result(sdk: Sdk) -> None:
    sandbox = await sdk.create("host")
    assert (await sandbox.exec("echo hi", on_disconnect="kill")).stdout == "hi\n"


async def test_start_input_signal_wait(sdk: Sdk) -> None:
    sandbox = await sdk.create("host")
    handle = await sandbox.commands.start("cat; echo end", stdin_open=True)
    await handle.send_stdin("one\n")
    await handle.send_stdin(b"two\n", eof=True)
    assert (await handle.wait(30)).stdout == "one\ntwo\nend\n"

    sleeper = await sandbox.commands.start(["sleep", "300"])
    again = await sandbox.commands.attach(sleeper.job_id)
    assert again.status in ("queued", "running")
    with pytest.raises(errors.SandboxTimeout):
        await again.wait(0.2)
    assert sleeper.job_id in {job.job_id for job in await sandbox.commands.list()}
    await again.signal("TERM")
    assert (await sleeper.wait(30)).signal == "TERM"
    await sleeper.kill()
    with pytest.raises(errors.JobNotRunning):
        await sleeper.signal("TERM")


async def test_cancel(sdk: Sdk) -> None:
    sandbox = await sdk.create("host")
    handle = await sandbox.commands.start("sleep 300 & sleep 300")
    job = await handle.cancel()
    assert job.is_complete
    assert job.error_code == "cancelled"
    assert (await handle.cancel()).is_complete


async def test_files(sdk: Sdk) -> None:
    sandbox = await sdk.create("host")
    data = bytes(range(256)) * 4096
    await sandbox.files.write("/tmp/new/deep/file", data, mode=0o750)
    assert await sandbox.files.read("/tmp/new/deep/file") == data
    (entry,) = await sandbox.files.list("/tmp/new/deep")
    assert (entry.name, entry.size, entry.mode & 0o777) == ("file", len(data), 0o750)
    await sandbox.upload_content("täxt\n", "/tmp/text")
    assert await sandbox.files.read_text("/tmp/text") == "täxt\n"
    assert await sandbox.download_content("/tmp/text") == "täxt\n".encode()
    with pytest.raises(errors.FileMissing):
        await sandbox.files.read("/tmp/nothing")
    with pytest.raises(errors.PathInvalid):
        await sandbox.files.read("/tmp")


def make_tree(root: Path) -> None:
    (root / "empty").mkdir(parents=True)
    (root / "ünïcode dir").mkdir()
    (root / "ünïcode dir/run").write_text("#!/bin/sh\necho ran\n")
    (root / "ünïcode dir/run").chmod(0o755)
    (root / "-rf").write_bytes(os.urandom(100_000))
    (root / "secret").write_text("s")
    (root / "secret").chmod(0o600)
    (root / "link").symlink_to("ünïcode dir/run")
    (root / "shut").mkdir()
    (root / "shut/file").write_text("inside")
    (root / "shut").chmod(0o555)


def picture(root: Path) -> dict[str, tuple[int, bytes | str | None]]:
    """Path → mode and content of everything below."""
    found: dict[str, tuple[int, bytes | str | None]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            found[str(path.relative_to(root))] = (0, str(path.readlink()))
        else:
            content = path.read_bytes() if path.is_file() else None
            found[str(path.relative_to(root))] = (status.st_mode & 0o777, content)
    return found


async def test_a_tree_makes_the_round_trip(sdk: Sdk, tmp_path: Path) -> None:
    sandbox = await sdk.create("host")
    make_tree(tmp_path / "here")
    await sandbox.upload_file(tmp_path / "here", "/tmp/there")
    assert (await sandbox.exec(["/tmp/there/link"])).stdout == "ran\n"
    await sandbox.download_file("/tmp/there", tmp_path / "back")
    assert picture(tmp_path / "back") == picture(tmp_path / "here")


async def test_a_link_in_the_sandbox_cannot_lead_a_download_astray(sdk: Sdk, tmp_path: Path) -> None:
    sandbox = await sdk.create("host")
    await sandbox.exec("mkdir /tmp/trap && ln -s ../../../../etc /tmp/trap/etc", check=True)
    with pytest.raises(errors.PathInvalid, match="etc"):
        await sandbox.files.download("/tmp/trap", tmp_path / "out")
    assert not (tmp_path / "out/etc").exists()


async def test_a_single_file_and_a_link_named_itself(sdk: Sdk, tmp_path: Path) -> None:
    sandbox = await sdk.create("host")
    (tmp_path / "script").write_text("#!/bin/sh\n")
    (tmp_path / "script").chmod(0o755)
    await sandbox.files.upload(tmp_path / "script", "/tmp/script")
    await sandbox.exec("ln -s script /tmp/alias", check=True)
    await sandbox.files.download("/tmp/alias", tmp_path / "got")
    assert (tmp_path / "got").read_text() == "#!/bin/sh\n"
    await sandbox.files.download("/tmp/script", tmp_path / "new/place")
    assert (tmp_path / "new/place").stat().st_mode & 0o777 == 0o755
    with pytest.raises(errors.FileMissing):
        await sandbox.files.download("/tmp/nothing", tmp_path / "nothing")


async def test_patch(sdk: Sdk) -> None:
    sandbox = await sdk.create("host")
    await sandbox.files.write("/tmp/p/file", "one\ntwo\n")
    patch = "--- a/file\n+++ b/file\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n"
    assert (await sandbox.apply_patch(patch, cwd="/tmp/p")).success
    assert await sandbox.files.read_text("/tmp/p/file") == "one\nthree\n"


async def test_looking_and_changing(sdk: Sdk) -> None:
    sandbox = await sdk.create("host", ttl_seconds=100)
    assert (await sandbox.stats()).sandbox_id == sandbox.sandbox_id
    assert any("ready" in line.message for line in (await sandbox.logs()).lines)
    info = await sandbox.update(ttl_seconds=1000, labels={"a": "1"})
    assert (info.ttl_seconds, info.labels) == (1000, {"a": "1"})
    assert (await sandbox.refresh()).labels == {"a": "1"}
    assert (await sandbox.heartbeat()).lease_expires_at is not None
    assert (await sdk.resources()).runtime == "local"
    assert (await sdk.info()).service


async def test_a_background_heartbeat_renews_the_lease(client: AsyncSandboxClient) -> None:
    sandbox = await client.create("host", heartbeat_timeout=1)
    await sandbox.start_heartbeat(0.2)
    await asyncio.sleep(2.5)
    assert (await sandbox.refresh()).ready
    await sandbox.stop_heartbeat()
    with pytest.raises(errors.SandboxFailed) as caught:
        for _ in range(500):
            await asyncio.sleep(0.05)
            await sandbox.refresh()
    assert caught.value.reason == "heartbeat"


async def test_list_and_delete_by_label(client: AsyncSandboxClient) -> None:
    made = {(await client.create("host", labels={"set": "a"})).sandbox_id for _ in range(3)}
    other = await client.create("host", labels={"set": "b"})
    assert {each.sandbox_id async for each in client.list(labels={"set": "a"}, page_size=2)} == made
    assert set(await client.delete_all({"set": "a"})) == made
    assert [each.sandbox_id async for each in client.list(labels={"set": "a"})] == []
    assert made <= {each.sandbox_id async for each in client.list(status=["deleted"])}
    assert (await client.get(other.sandbox_id)).status == "ready"
    with pytest.raises(errors.InvalidRequest):
        await client.delete_all({})


async def test_batch(sdk: Sdk) -> None:
    good = CreateSandbox(image="host", labels={"n": "1"})
    outcome = await sdk.create_batch([good, {"image": "no-such-image"}, {"image": "host"}])
    assert [each.exec is not None for each in (outcome[0], outcome[2])] == [True, True]
    assert (await outcome[0].exec("echo 1")).stdout == "1\n"
    assert isinstance(outcome[1], errors.SandboxFailed)
    assert outcome[1].reason == "image_not_found"


async def test_a_creation_that_fails_names_its_cause(sdk: Sdk) -> None:
    with pytest.raises(errors.SandboxFailed, match="no-such-image") as caught:
        await sdk.create("no-such-image")
    assert caught.value.reason == "image_not_found"


async def test_with_blocks_delete(real: Service) -> None:
    async with AsyncSandboxClient(real.base_url, real.api_key) as client:
        async with await client.create("host") as sandbox:
            pass
        with pytest.raises(errors.SandboxDeleted):
            await client.get(sandbox.sandbox_id)


async def test_a_cancelled_create_leaves_nothing(real: Service, client: AsyncSandboxClient) -> None:
    task = asyncio.ensure_future(client.create("host", labels={"cancelled": "yes"}))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait({task})
    if task.cancelled():
        assert [each async for each in client.list(labels={"cancelled": "yes"})] == []


async def test_a_restart_of_the_service_is_not_noticed(tmp_path: Path) -> None:
    server = Service(tmp_path / "state").start()
    port = server.base_url.rsplit(":", 1)[1]
    async with AsyncSandboxClient(server.base_url, server.api_key, cleanup=True) as client:
        sandbox: AsyncSandbox = await client.create("host")
        running = asyncio.ensure_future(sandbox.exec("sleep 3; echo through", timeout_s=60))
        while not await sandbox.commands.list():  # noqa: ASYNC110 - what is awaited is in another process
            await asyncio.sleep(0.05)
        server.kill()
        server.arguments += ["--port", port]
        await asyncio.to_thread(server.start)
        job: JobResult = await running
        assert job.stdout == "through\n"
    assert await asyncio.to_thread(server.stop) == 0


argv = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20), max_size=8
)


@given(argv)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_list_is_exact_argv(box: Sandbox, words: list[str]) -> None:
    # One word too many, so that printf's format is used at least once.
    job = box.exec(["printf", "%s\\0", *words, "end"], concurrent=True, check=True)
    assert job.stdout.split("\0") == [*words, "end", ""]
