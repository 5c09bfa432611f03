"""What the agent itself resolves for a client or reads from the image: never its own descriptors, never without bound."""

from __future__ import annotations

import time

import pytest

from tests.conformance.conftest import NewBox
from tests.conformance.runtimes import Images, RuntimeCase
from tests.support.inside import inside
from tests.support.machine import namespace_init, pids_with_argument, resident_bytes
from tests.support.rest import Box, Rest
from tests.support.waiting import Stopwatch, eventually

MIB = 1 << 20


def agent_of(box: Box) -> int:
    """The agent's pid, seen from outside."""
    tag = f"{time.monotonic_ns() % 10**9 + 10**6}.5"
    box.out(["/bin/sh", "-c", f"sleep {tag} & exit 0"])
    return namespace_init(eventually(lambda: pids_with_argument(tag), "the tagged process")[0])


@pytest.mark.parametrize("process", ["self", "1", "thread-self"])
def test_a_directory_to_start_in_is_never_a_descriptor_of_the_agent(box: Box, process: str) -> None:
    """The agent holds directories of the machine (control groups); a command must not start in one."""
    for number in range(64):
        answer = box.post_exec("pwd -P; ls", cwd=f"/proc/{process}/fd/{number}", wait=True)
        assert (answer.status, answer.code) == (400, "cwd_not_found"), (number, answer)


def test_a_link_swapped_while_a_command_starts_never_leads_to_a_descriptor(fresh: Box) -> None:
    """Between the check of a directory and the change to it, the path may become another."""
    fresh.out("mkdir -p /tmp/r/real")
    swap = "cd /tmp/r; n=3; while :; do ln -sfn real now; ln -sfn /proc/self/fd/$n now; n=$(( (n + 1) % 24 )); done"
    swapper = fresh.running(swap, background=True)
    started = 0
    for _ in range(300):
        answer = fresh.post_exec(["/bin/ls", "-a"], cwd="/tmp/r/now", wait=True)
        if answer.status == 200 and answer.json["exit_code"] == 0:
            started += 1
            assert answer.json["stdout"] == ".\n..\n", "it started in a directory that is not the sandbox's"
    assert started > 0
    fresh.rest.delete(f"/jobs/{swapper}").expect(200)


@pytest.mark.parametrize(
    "path", ["/proc/self/root", "/proc/self/cwd", "/proc/1/root", "/proc/1/cwd", "/proc/thread-self/root"]
)
def test_a_directory_to_start_in_through_proc_is_inside_or_refused(box: Box, path: str) -> None:
    answer = box.post_exec("/bin/ls -di .", cwd=path, wait=True)
    if answer.status == 200:
        assert answer.json["stdout"].split()[0] == box.out("/bin/ls -di /").split()[0]
    else:
        assert (answer.status, answer.code) == (400, "cwd_not_found")


@pytest.mark.unprivileged
def test_a_program_is_never_a_descriptor_of_the_agent(box: Box) -> None:
    for number in range(3, 64):
        for process in ("self", "1"):
            assert box.run([f"/proc/{process}/fd/{number}"])["exit_code"] in (126, 127)


@pytest.mark.parametrize("working_dir", ["/proc/self/fd/5", "/proc/1/fd/5", "/proc/self/fd/7/../../.."])
def test_a_working_directory_is_never_a_descriptor_of_the_agent(
    rest: Rest, images: Images, working_dir: str
) -> None:
    box = rest.submit(images.full, working_dir=working_dir)
    info = rest.get(f"{box.path}/wait", timeout=60).expect(200)
    if info["status"] == "ready":
        answer = box.post_exec("ls -a", wait=True)
        assert answer.status == 400 or "cgroup.procs" not in answer.json["stdout"]
        assert b"cgroup.procs" not in box.get_list(".").body
    box.delete()


@pytest.mark.parametrize("name", ["passwd", "group"])
@pytest.mark.parametrize(
    "target",
    [
        "/proc/self/environ",
        "/proc/self/mem",
        "/proc/self/maps",
        "/proc/self/fd/5",
        "/dev/zero",
        "/dev/random",
    ],
)
def test_account_files_that_lead_elsewhere_neither_tell_nor_hang(
    new_box: NewBox, name: str, target: str
) -> None:
    box = new_box()
    box.out(["/bin/ln", "-sf", target, f"/etc/{name}"])
    watch = Stopwatch()
    for user in (None, "root", "somebody", "1000"):
        # Without a shell: bash itself would read such a file for ever.
        box.post_exec(["/bin/true"], wait=True, **({"user": user} if user else {}))
    assert watch.seconds < 40
    assert box.run(["/bin/true"], user="0")["exit_code"] == 0


def test_huge_account_files_do_not_fill_the_agents_memory(runtime: RuntimeCase, new_box: NewBox) -> None:
    assert runtime.on_this_machine
    box = new_box()
    agent = agent_of(box)
    box.out("truncate -s 4G /etc/passwd; truncate -s 4G /etc/group")
    watch = Stopwatch()
    for user in ("root", "worker", "1000", "1000:worker"):
        box.post_exec("true", wait=True, user=user)
    assert watch.seconds < 60
    assert resident_bytes(agent) < 100 * MIB
    assert box.run(["/bin/true"])["exit_code"] == 0


def test_a_deep_tree_and_a_long_path_do_not_harm_the_agent(fresh: Box) -> None:
    program = """
os.chdir("/tmp")
for _ in range(3000):
    os.mkdir("d"); os.chdir("d")
report("made")
"""
    assert inside(fresh, program) == "made"
    fresh.get_list("/tmp/" + "d/" * 2000)
    fresh.post_write("/tmp/" + "d/" * 1900 + "f", b"x")
    fresh.rest.get(f"{fresh.path}/stats").expect(200)
    assert fresh.alive()


def test_many_jobs_at_once_do_not_exhaust_the_agent(runtime: RuntimeCase, new_box: NewBox) -> None:
    """More running commands than the agent could have descriptors for: refused or run, and the agent lives."""
    box = new_box(pids=4000)
    before = box.agent_start()
    for _ in range(600):
        box.post_exec(["/bin/sleep", "30"], background=True)
    assert box.agent_start() == before
    assert box.rest.get(f"{box.path}/jobs").status == 200


@pytest.mark.unprivileged
def test_a_command_may_not_protect_itself_from_the_killer_of_memory(box: Box) -> None:
    program = """
def lower():
    with open("/proc/self/oom_score_adj", "w") as f: f.write("-1000")
    return "OK"
report(attempt(lower))
"""
    assert inside(box, program) in {"EACCES", "EPERM"}


@pytest.mark.unprivileged
def test_the_agent_is_the_last_to_be_killed_for_memory(box: Box) -> None:
    agent, command = box.out("sleep 0.3; cat /proc/1/oom_score_adj /proc/self/oom_score_adj").split()
    assert int(agent) < int(command)


def test_output_that_nobody_reads_does_not_fill_the_agents_memory(
    runtime: RuntimeCase, new_box: NewBox
) -> None:
    """Fifty commands of endless output at once."""
    assert runtime.on_this_machine
    box = new_box()
    agent = agent_of(box)
    jobs = [box.start("yes", background=True, max_output_bytes=1 << 20) for _ in range(50)]
    eventually(lambda: box.rest.get("/health").status == 200, "the service answers")
    time.sleep(1)
    assert resident_bytes(agent) < 300 * MIB
    for job_id in jobs:
        box.rest.delete(f"/jobs/{job_id}").expect(200)


def test_output_windows_of_many_jobs_do_not_fill_the_machine(runtime: RuntimeCase, new_box: NewBox) -> None:
    """The agent keeps output outside of the sandbox's memory limit, so it must have a bound of its own."""
    assert runtime.on_this_machine
    box = new_box(memory="256Mi")
    agent = agent_of(box)
    command = "head -c 60000000 /dev/zero; touch /tmp/$$; sleep 60"
    running = [box.start(command, background=True, max_output_bytes=64 << 20) for _ in range(20)]
    eventually(lambda: len(box.ls("/tmp")) == len(running), "all output is written", 60)
    assert resident_bytes(agent) < 400 * MIB


def test_input_that_nobody_takes_does_not_fill_the_agents_memory(
    runtime: RuntimeCase, new_box: NewBox
) -> None:
    """Input is only accepted as fast as the command reads: the sender waits, the agent does not hoard."""
    import base64
    from concurrent.futures import ThreadPoolExecutor

    assert runtime.on_this_machine
    box = new_box()
    agent = agent_of(box)
    job_id = box.running("sleep 8", stdin_open=True)
    piece = base64.b64encode(bytes(8 << 20)).decode()
    with ThreadPoolExecutor(20) as pool:
        sending = [pool.submit(box.rest.post, f"/jobs/{job_id}/stdin", {"data": piece}) for _ in range(20)]
        time.sleep(3)
        assert resident_bytes(agent) < 250 * MIB
        for future in sending:
            assert future.result(120).status in (200, 409, 503)
    assert box.alive()
