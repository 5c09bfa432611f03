"""The local runtime against the real kernel: creation, death, adoption, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from orchard.env.contract import EndReason
from orchard.env.errors import AgentUnreachable
from orchard.env.images import ImageStore
from orchard.env.runtimes.base import Postmortem, SandboxSpec, StartFailed
from orchard.env.runtimes.local.cgroups import Cgroups
from orchard.env.runtimes.local.runtime import LocalRuntime

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="of the local runtime as root")

BUSYBOX = Path("/bin/busybox")


@pytest.fixture
def image(tmp_path: Path) -> str:
    root = tmp_path / "image"
    (root / "bin").mkdir(parents=True)
    shutil.copy(BUSYBOX, root / "bin" / "busybox")
    for name in ("sh", "cat", "echo", "sleep", "touch", "true"):
        (root / "bin" / name).symlink_to("busybox")
    return f"dir:{root}"


def make_runtime(state_dir: Path) -> LocalRuntime:
    return LocalRuntime(state_dir, images=ImageStore(state_dir / "images"))


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[LocalRuntime]:
    runtime = make_runtime(tmp_path / "state")
    await runtime.start()
    await runtime.adopt({})
    yield runtime
    for sandbox_id in list(runtime._handles):
        await runtime.delete(sandbox_id)
    await runtime.close()
    assert leftovers(runtime) == []


def leftovers(runtime: LocalRuntime) -> list[str]:
    """Everything on the machine that carries the runtime's names."""
    cgroups: Cgroups = runtime._cgroups
    found = sorted(cgroups.sandboxes())
    found += sorted(entry.name for entry in os.scandir(runtime._state_dir / "sandboxes"))
    state_dir = str(runtime._state_dir)
    with open("/proc/self/mounts") as mounts:
        found += [line for line in mounts if state_dir in line]
    found += [path.name for path in Path("/sys/class/net").glob(f"ov{runtime._instance[:6]}*")]
    return found


async def run(
    runtime: LocalRuntime, sandbox_id: str, command: list[str] | str, job_id: str = ""
) -> tuple[dict, bytes]:
    channel = await runtime.channel(sandbox_id)
    header, payload = await channel.call(
        "exec", job_id=job_id or os.urandom(6).hex(), command=command, wait=True, timeout_s=20
    )
    return header["job"], payload


async def until(condition: Callable[[], bool], what: str, deadline_s: float = 10.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - the kernel sends no event for this
            await asyncio.sleep(0.01)
    assert condition(), what


async def test_a_sandbox_runs_commands_of_its_image(runtime: LocalRuntime, image: str) -> None:
    await runtime.create(SandboxSpec("one", image, env={"COLOUR": "green"}))
    job, output = await run(runtime, "one", 'echo "$COLOUR"')
    assert (job["exit_code"], output) == (0, b"green\n")


async def test_deleting_twice_and_deleting_the_unknown_are_fine(runtime: LocalRuntime, image: str) -> None:
    await runtime.create(SandboxSpec("one", image))
    await runtime.delete("one")
    await runtime.delete("one")
    await runtime.delete("never-made")
    assert leftovers(runtime) == []


async def test_concurrent_deletes_share_one_removal(runtime: LocalRuntime, image: str) -> None:
    await runtime.create(SandboxSpec("one", image))
    await asyncio.gather(*(runtime.delete("one") for _ in range(5)))
    assert leftovers(runtime) == []


async def test_an_unknown_image_is_named_as_the_cause(runtime: LocalRuntime) -> None:
    with pytest.raises(StartFailed) as failure:
        await runtime.create(SandboxSpec("one", "no-such-image"))
    assert failure.value.reason is EndReason.IMAGE_NOT_FOUND
    assert leftovers(runtime) == []


async def test_a_failing_start_leaves_nothing_and_says_why(runtime: LocalRuntime, tmp_path: Path) -> None:
    root = tmp_path / "hostile"
    root.mkdir()
    (root / "proc").symlink_to("/etc")
    with pytest.raises(StartFailed, match="/proc is not a directory"):
        await runtime.create(SandboxSpec("one", f"dir:{root}"))
    assert leftovers(runtime) == []


async def test_a_cancelled_creation_leaves_nothing(runtime: LocalRuntime, image: str) -> None:
    for delay_s in (0.0, 0.001, 0.003, 0.006):
        task = asyncio.create_task(runtime.create(SandboxSpec("one", image)))
        await asyncio.sleep(delay_s)
        task.cancel()
        try:
            await task
            await runtime.delete("one")
        except asyncio.CancelledError:
            pass
        assert leftovers(runtime) == []


async def test_the_death_of_the_agent_is_told_with_its_exit_code(runtime: LocalRuntime, image: str) -> None:
    deaths: dict[str, Postmortem] = {}
    runtime.on_death = deaths.__setitem__
    handle = await runtime.create(SandboxSpec("one", image))
    os.kill(handle.state["pid"], signal.SIGKILL)
    await until(lambda: "one" in deaths, "the death is told")
    assert deaths["one"].reason is EndReason.AGENT_LOST
    assert deaths["one"].exit_code == -signal.SIGKILL
    assert any("the agent is process" in line for line in deaths["one"].agent_log)
    with pytest.raises(AgentUnreachable):
        await runtime.channel("one")
    assert leftovers(runtime) == []


async def test_creation_goes_on_after_the_zygote_was_killed(runtime: LocalRuntime, image: str) -> None:
    await runtime.create(SandboxSpec("before", image))
    assert runtime._launcher.process is not None
    runtime._launcher.process.kill()
    await runtime._launcher.process.wait()
    await until(lambda: not runtime._launcher.alive, "the loss is noticed")
    await runtime.create(SandboxSpec("after", image))
    for sandbox_id in ("before", "after"):
        job, _ = await run(runtime, sandbox_id, ["/bin/true"])
        assert job["exit_code"] == 0


async def test_creation_goes_on_after_midwives_were_killed_at_their_work(
    runtime: LocalRuntime, image: str
) -> None:
    """What they were at is tried again by the service, or has failed and left nothing."""
    made: list[str] = []
    for number in range(4):
        names = [f"box{number}-{n}" for n in range(6)]
        creations = [asyncio.ensure_future(runtime.create(SandboxSpec(name, image))) for name in names]
        await until(lambda wanted=set(names): any(runtime._cgroups.sandboxes() & wanted), "one is being made")
        process = runtime._launcher.process
        assert process is not None
        midwives = [p for p in children(process.pid) if comm(p) == "orchard-midwife"]
        assert midwives
        os.kill(midwives[number % len(midwives)], signal.SIGKILL)
        results = await asyncio.gather(*creations, return_exceptions=True)
        for name, result in zip(names, results, strict=True):
            if isinstance(result, BaseException):
                assert isinstance(result, StartFailed)
                assert result.retryable
            else:
                made.append(name)
        assert runtime._cgroups.sandboxes() == set(made)
        assert {entry.name for entry in os.scandir(runtime._state_dir / "sandboxes")} == set(made)
    for name in made:
        job, _ = await run(runtime, name, ["/bin/true"])
        assert job["exit_code"] == 0


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return ""  # it has ended


async def test_a_start_that_is_given_up_while_the_launcher_hangs_does_not_wait_for_it(
    runtime: LocalRuntime, image: str
) -> None:
    process = runtime._launcher.process
    assert process is not None
    stopped = [process.pid, *children(process.pid)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    start = asyncio.ensure_future(runtime.create(SandboxSpec("unwanted", image)))
    await asyncio.sleep(0.1)
    start.cancel()
    async with asyncio.timeout(8):
        await asyncio.wait((start,))
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    await runtime.create(SandboxSpec("wanted", image))
    await until(lambda: runtime._cgroups.sandboxes() == {"wanted"}, "what came late is undone")
    await until(
        lambda: {e.name for e in os.scandir(runtime._state_dir / "sandboxes")} == {"wanted"},
        "its directory is gone",
    )


async def test_a_second_runtime_adopts_the_living_and_clears_away_the_rest(
    tmp_path: Path, image: str
) -> None:
    first = make_runtime(tmp_path / "state")
    await first.start()
    await first.adopt({})
    states = {}
    for name in ("kept", "dead", "unknown"):
        states[name] = (await first.create(SandboxSpec(name, image))).state
    await run(first, "kept", "echo remembered", job_id="job-1")
    del states["unknown"]
    await first.close()  # as a crash would: the sandboxes go on
    os.kill(states["dead"]["pid"], signal.SIGKILL)

    second = make_runtime(tmp_path / "state")
    await second.start()
    states["never-started"] = {}
    found = await second.adopt(states)
    assert not isinstance(found["kept"], Postmortem)
    for name in ("dead", "never-started"):
        postmortem = found[name]
        assert isinstance(postmortem, Postmortem)
        assert postmortem.reason is EndReason.AGENT_LOST
    channel = await second.channel("kept")
    header, payload = await channel.call("job", job_id="job-1")
    assert (header["job"]["status"], payload) == ("succeeded", b"remembered\n")
    assert second._cgroups.sandboxes() == {"kept"}
    new = await second.create(SandboxSpec("new", image))
    assert new.state["slot"] != states["kept"]["slot"]
    await second.delete("kept")
    await second.delete("new")
    await second.close()
    assert leftovers(second) == []


async def test_a_wrong_token_opens_nothing(runtime: LocalRuntime, image: str) -> None:
    await runtime.create(SandboxSpec("one", image))
    path = f"/proc/self/fd/{runtime._sandboxes_fd}/one/agent.sock"
    from orchard.env.agent.wire import FrameReader, frame

    for first in ({"id": 1, "op": "hello", "token": "0" * 64}, {"id": 1, "op": "exec", "command": ["true"]}):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(frame(first))
        answer = FrameReader().feed(await reader.read())
        assert answer[0][0]["error"]["code"] == "unauthorized"
        writer.close()


async def test_garbage_on_the_socket_does_not_hurt_the_agent(runtime: LocalRuntime, image: str) -> None:
    await runtime.create(SandboxSpec("one", image))
    path = f"/proc/self/fd/{runtime._sandboxes_fd}/one/agent.sock"
    for junk in (b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(junk)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
    job, _ = await run(runtime, "one", ["/bin/true"])
    assert job["exit_code"] == 0


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "exec"},
        {"op": "exec", "job_id": "x", "command": 7},
        {"op": "exec", "job_id": "x", "command": []},
        {"op": "exec", "job_id": "x", "command": ["a\0b"]},
        {"op": "exec", "job_id": "x", "command": "true", "env": {"A": 1}},
        {"op": "read", "path": 3},
        {"op": "write", "path": "/x", "upload": "u", "offset": "much"},
        {"op": "signal", "job_id": "nope", "signal": 15},
        {"op": "fly"},
    ],
    ids=str,
)
async def test_malformed_requests_are_answered_with_an_error(
    runtime: LocalRuntime, image: str, request_: dict
) -> None:
    from orchard.env.errors import OrchardError

    await runtime.create(SandboxSpec("one", image))
    channel = await runtime.channel("one")
    operation = request_.pop("op")
    try:
        header, _ = await channel.call(operation, **request_)
        assert header["job"]["status"] == "failed" or header["job"]["status"] == "queued"
    except OrchardError:
        pass
    job, _ = await run(runtime, "one", ["/bin/true"])
    assert job["exit_code"] == 0


async def test_limits_and_use_are_reported(runtime: LocalRuntime, image: str) -> None:
    await runtime.create(
        SandboxSpec("one", image, memory_bytes=64 << 20, pids=50, cpu_cores=0.5, disk_bytes=8 << 20)
    )
    usage = await runtime.usage("one")
    assert (usage.memory_limit_bytes, usage.pids_limit, usage.disk_limit_bytes) == (64 << 20, 50, 8 << 20)
    job, _ = await run(runtime, "one", "busybox dd if=/dev/zero of=/big bs=1M count=20")
    assert job["exit_code"] != 0
    usage = await runtime.usage("one")
    assert usage.disk_bytes is not None
    assert 7 << 20 <= usage.disk_bytes <= 8 << 20
