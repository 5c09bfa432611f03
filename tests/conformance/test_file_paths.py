"""No path of a client leads out of the sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rest import Box
from tests.support.waiting import Stopwatch

pytestmark = pytest.mark.unprivileged

SECRET = b"a secret of the machine"


@pytest.fixture
def host_secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of this machine that no sandbox may read or change; its path exists in no sandbox."""
    path = tmp_path_factory.mktemp("outside") / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o644)
    return path


def tricks(secret: str) -> dict[str, str]:
    """Paths that would lead to `secret` if they were resolved outside."""
    up = "/.." * 40
    return {
        "plain": secret,
        "dots": f"{up}{secret}",
        "dots after a directory": f"/tmp{up}{secret}",
        "root of the agent": f"/proc/self/root{secret}",
        "root of process 1": f"/proc/1/root{secret}",
        "root of the parent": f"/proc/self/../1/root{up}{secret}",
        "working directory of process 1": f"/proc/1/cwd{up}{secret}",
        "thread": f"/proc/thread-self/root{secret}",
        "doubled slashes": f"//{secret}".replace("/", "//"),
    }


@pytest.mark.parametrize("name", tricks(""))
def test_reading_never_leaves(box: Box, host_secret: Path, name: str) -> None:
    answer = box.get_file(tricks(str(host_secret))[name])
    assert answer.status in (400, 403, 404), answer
    assert b"secret of" not in answer.body


@pytest.mark.parametrize("name", tricks(""))
def test_writing_never_leaves(box: Box, host_secret: Path, name: str) -> None:
    box.post_write(tricks(str(host_secret))[name], b"overwritten")
    assert host_secret.read_bytes() == SECRET


@pytest.mark.parametrize("name", tricks(""))
def test_listing_never_leaves(box: Box, host_secret: Path, name: str) -> None:
    (host_secret.parent / "visible-only-outside").touch()
    answer = box.get_list(tricks(str(host_secret.parent))[name])
    assert b"visible-only-outside" not in answer.body


def test_an_absolute_link_is_resolved_inside(box: Box, place: str, host_secret: Path) -> None:
    box.out(f"cd {place}; ln -s {host_secret} f; ln -s {host_secret.parent} d; ln -s /etc e")
    assert box.get_file(f"{place}/f").status == 404
    assert box.get_file(f"{place}/d/secret").status == 404
    assert box.read(f"{place}/e/passwd") == box.out(["/bin/cat", "/etc/passwd"]).encode()


def test_a_relative_link_that_climbs_stays_inside(box: Box, place: str, host_secret: Path) -> None:
    box.out(["/bin/ln", "-s", "../" * 40 + str(host_secret)[1:], f"{place}/f"])
    assert box.get_file(f"{place}/f").status == 404


def test_a_link_to_the_root_of_another_process_stays_inside(box: Box, place: str, host_secret: Path) -> None:
    for number, target in enumerate(["/proc/1/root", "/proc/self/root", "/proc/1/cwd", "/proc/self/fd/0"]):
        box.out(["/bin/ln", "-s", target, f"{place}/{number}"])
        assert box.get_file(f"{place}/{number}{host_secret}").status in (400, 403, 404)


def test_writing_through_a_link_stays_inside(box: Box, place: str, host_secret: Path) -> None:
    box.out(f"cd {place}; ln -s {host_secret} f; ln -s {host_secret.parent} d")
    box.post_write(f"{place}/f", b"overwritten")
    box.post_write(f"{place}/d/secret", b"overwritten")
    box.post_write(f"{place}/d/planted", b"planted")
    assert host_secret.read_bytes() == SECRET
    assert not (host_secret.parent / "planted").exists()


def test_a_loop_of_links_is_refused(box: Box, place: str) -> None:
    box.out(f"cd {place}; ln -s b a; ln -s a b")
    for answer in (box.get_file(f"{place}/a"), box.get_list(f"{place}/a"), box.get_file(f"{place}/a/x")):
        assert (answer.status, answer.code) == (400, "path_invalid")


def test_the_agents_descriptors_are_not_readable(box: Box) -> None:
    for number in range(40):
        for process in ("self", "1"):
            answer = box.get_file(f"/proc/{process}/fd/{number}")
            assert answer.status in (400, 403, 404), (process, number, answer)


@pytest.mark.parametrize("process", ["self", "1", "thread-self"])
@pytest.mark.parametrize("name", ["environ", "mem", "maps", "auxv", "map_files", "task/1/environ"])
def test_the_agents_memory_and_environment_are_not_readable(box: Box, process: str, name: str) -> None:
    answer = box.get_file(f"/proc/{process}/{name}")
    assert answer.status in (400, 403, 404), answer


@pytest.mark.parametrize(
    "name", ["mem", "oom_score_adj", "comm", "attr/current", "clear_refs", "uid_map", "fd/1"]
)
def test_the_agent_does_not_write_to_itself_for_a_client(box: Box, name: str) -> None:
    for process in ("self", "1"):
        box.post_write(f"/proc/{process}/{name}", b"1000")
    assert box.alive()
    assert box.out(["/bin/cat", "/proc/1/oom_score_adj"]) != "1000\n"


@pytest.mark.parametrize(
    "name", ["sysrq-trigger", "sys/kernel/core_pattern", "sys/kernel/hostname", "sys/vm/drop_caches"]
)
def test_kernel_settings_are_not_written_for_a_client(box: Box, name: str) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text(), Path("/proc/sys/kernel/hostname").read_text()
    answer = box.post_write(f"/proc/{name}", b"x")
    assert answer.status >= 400
    assert (
        Path("/proc/sys/kernel/core_pattern").read_text(),
        Path("/proc/sys/kernel/hostname").read_text(),
    ) == before


@pytest.mark.parametrize("name", ["kcore", "kmsg", "kallsyms", "sysrq-trigger", "keys", "timer_list"])
def test_secrets_of_the_kernel_are_not_read_for_a_client(box: Box, name: str) -> None:
    watch = Stopwatch()
    answer = box.get_file(f"/proc/{name}")
    if answer.status == 200:
        content = box.read(f"/proc/{name}")
        assert not content.strip() or {line.split()[0] for line in content.splitlines() if line} == {
            b"0" * 16
        }
    assert watch.seconds < 20


def test_a_fifo_neither_hangs_a_read_nor_a_write(box: Box, place: str) -> None:
    box.out(["/usr/bin/mkfifo", f"{place}/p"])
    watch = Stopwatch()
    answer = box.get_file(f"{place}/p")
    assert (answer.status, answer.code) == (400, "path_invalid")
    assert box.post_write(f"{place}/p", b"x").status in (200, 400)
    assert watch.seconds < 20


def test_a_link_to_a_fifo_does_not_hang_either(box: Box, place: str) -> None:
    box.out(f"cd {place}; mkfifo p; ln -s p l")
    watch = Stopwatch()
    assert box.get_file(f"{place}/l").status == 400
    assert watch.seconds < 20


@pytest.mark.parametrize(
    "device", ["/dev/zero", "/dev/null", "/dev/random", "/dev/full", "/dev/tty", "/dev/ptmx"]
)
def test_devices_are_no_files_to_read(box: Box, device: str) -> None:
    answer = box.get_file(device)
    assert answer.status in (400, 404)


def test_a_write_does_not_replace_a_device(box: Box) -> None:
    box.post_write("/dev/null", b"x")
    assert box.out("test -c /dev/null && echo still a device") == "still a device\n"


def test_a_socket_is_no_file_to_read(box: Box, place: str) -> None:
    box.python("import socket,sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])", f"{place}/s")
    answer = box.get_file(f"{place}/s")
    assert (answer.status, answer.code) == (400, "path_invalid")


def test_links_swapped_during_a_read_never_lead_out(fresh: Box, host_secret: Path) -> None:
    """A path that is now a directory and now a link to a directory outside: every read is of the inside."""
    folder = host_secret.parent
    fresh.out(f"mkdir -p /tmp/r/real{folder} /tmp/r/link; echo inside > /tmp/r/real/secret")
    swap = f"cd /tmp/r; while :; do rm -f now; ln -sfn real now; rm -f now; ln -sfn {folder} now; done"
    swapper = fresh.running(swap)
    for _ in range(200):
        answer = fresh.get_file("/tmp/r/now/secret")
        assert answer.status in (200, 400, 404)
        assert b"c2VjcmV0" not in answer.body and b"YSBzZWNyZXQ" not in answer.body
    fresh.rest.delete(f"/jobs/{swapper}").expect(200)


def test_a_path_longer_than_the_kernel_takes_is_refused(box: Box) -> None:
    assert box.post_write("/tmp/" + "a" * 300, b"").status == 400
    assert box.get_file("/tmp/" + "a/" * 2100).status in (400, 404, 422)
