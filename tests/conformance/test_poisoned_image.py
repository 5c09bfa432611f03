"""Nothing that an image holds ever runs in the agent: no module, no library, no preload."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.runtimes import RuntimeCase
from tests.support.images import busybox_tree
from tests.support.poison import MARK_DIR, library, poisoned_tree
from tests.support.rest import Box, Rest, new_id
from tests.support.waiting import Stopwatch


@pytest.fixture(scope="module")
def image(runtime: RuntimeCase, tmp_path_factory: pytest.TempPathFactory) -> str:
    assert runtime.on_this_machine
    folder = tmp_path_factory.mktemp("poison")
    return f"dir:{poisoned_tree(folder / 'tree', folder)}"


@pytest.fixture
def poisoned(rest: Rest, image: str) -> Iterator[Box]:
    with rest.sandbox(image) as box:
        yield box


def clean(box: Box) -> None:
    assert box.ls(MARK_DIR) == {}
    assert box.out(f"ls {MARK_DIR}", concurrent=True) == ""


def test_the_poison_works_where_it_is_taken(tmp_path: Path) -> None:
    """The check checks something: loaded outside, library and module leave their marks."""
    Path(MARK_DIR).mkdir(exist_ok=True)
    try:
        shared_object = library(tmp_path / "p.so")
        subprocess.run(
            [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(shared_object)!r})"], check=True
        )
        poisoned_tree(tmp_path / "tree", tmp_path)
        json_module = next((tmp_path / "tree").rglob("json/__init__.py"))
        folder = str(json_module.parent.parent)
        code = f"import sys; sys.path.insert(0, {folder!r}); sys.modules.pop('json', None); import json"
        subprocess.run([sys.executable, "-S", "-c", code], check=False, capture_output=True)
        names = {mark.stem for mark in Path(MARK_DIR).iterdir()}
        assert names >= {"library", "json"}
    finally:
        for mark in Path(MARK_DIR).iterdir():
            mark.unlink()
        Path(MARK_DIR).rmdir()
    assert ctypes.sizeof(ctypes.c_void_p) == 8


def test_a_sandbox_of_it_starts_clean(poisoned: Box) -> None:
    clean(poisoned)


def test_commands_by_any_user_load_nothing(poisoned: Box) -> None:
    assert poisoned.out("id -u") == "0\n"
    for user in ("worker", "1000", "worker:worker", "12345"):
        poisoned.post_exec("id -u", user=user, wait=True)
    assert poisoned.post_exec("true", user="no-such-user", wait=True).code == "user_not_found"
    clean(poisoned)


def test_odd_commands_load_nothing(poisoned: Box) -> None:
    poisoned.run(["no-such-program"])
    poisoned.run("exit 3", login_shell=True)
    poisoned.run(["printf", "\\377\\376"])
    poisoned.run("cat", stdin="ünïcode ☃")
    poisoned.run(
        'echo "$A"', env={"A": "☃", "LANG": "de_DE.ISO-8859-1", "LC_ALL": "de_DE.ISO-8859-1", "TZ": "evil"}
    )
    poisoned.run("sleep 60", timeout_seconds=0.3, grace_seconds=0.2)
    poisoned.post_exec("true", cwd="/nope", wait=True)
    job_id = poisoned.start("sleep 60")
    poisoned.rest.post(f"/jobs/{job_id}/signal", {"signal": "TERM"})
    poisoned.rest.delete(f"/jobs/{job_id}")
    clean(poisoned)


def test_files_with_odd_names_load_nothing(poisoned: Box) -> None:
    for name in ("ünïcode ☃", "xn--idna", "a" * 255, "new\nline"):
        poisoned.write(f"/tmp/{name}", os.urandom(1000), mode="0755")
        poisoned.read(f"/tmp/{name}")
    poisoned.ls("/tmp")
    poisoned.get_file("/nope")
    poisoned.get_file("/proc/self/fd/3")
    poisoned.post_write("/proc/nope", b"x")
    poisoned.get_list("/" + "x" * 5000)
    clean(poisoned)


def test_patches_statistics_and_logs_load_nothing(poisoned: Box) -> None:
    poisoned.out("echo a > /tmp/f")
    poisoned.apply_patch("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n", cwd="/tmp").expect(200)
    poisoned.rest.get(f"{poisoned.path}/stats").expect(200)
    poisoned.rest.get(f"{poisoned.path}/logs").expect(200)
    poisoned.rest.get(f"{poisoned.path}/jobs").expect(200)
    clean(poisoned)


def test_faults_in_the_agent_load_nothing(poisoned: Box) -> None:
    """Tracebacks read source lines, and formatting them imports modules."""
    poisoned.post_exec(["x" * 200_000] * 30, wait=True)
    poisoned.post_exec("true", env={f"N{i}": "x" * 100_000 for i in range(40)}, wait=True)
    poisoned.post_exec("true", job_id=new_id(), max_output_bytes=0, wait=True)
    poisoned.rest.post(f"/jobs/{new_id()}/stdin", {"data": ""})
    clean(poisoned)


def test_a_sandbox_limited_in_every_way_loads_nothing(rest: Rest, image: str) -> None:
    fields = {
        "memory": "64Mi",
        "pids": 50,
        "cpu": "1",
        "disk": "64Mi",
        "user": "worker",
        "working_dir": "/home/worker",
    }
    env = {"PYTHONPATH": "/usr/lib/python3.11", "PYTHONSTARTUP": "/x", "LD_PRELOAD": "/lib/libnss_evil.so.2"}
    with rest.sandbox(image, env=env, **fields) as box:
        assert box.out("id -u", env={"LD_PRELOAD": ""}) == "1000\n"
        box.run("head -c 100000000 /dev/zero | tail")
        box.run("f() { f | f & }; f", timeout_seconds=1)
        assert box.ls(MARK_DIR) == {}


def test_devices_and_set_user_id_programs_of_an_image_give_nothing(rest: Rest, tmp_path: Path) -> None:
    tree = busybox_tree(tmp_path / "tree")
    os.mknod(tree / "mem", 0o666 | stat.S_IFCHR, os.makedev(1, 1))
    os.mknod(tree / "disk", 0o666 | stat.S_IFBLK, Path("/tmp").stat().st_dev)
    shutil.copy(tree / "bin/busybox", tree / "bin/suid")
    (tree / "bin/suid").chmod(0o4755)
    with rest.sandbox(f"dir:{tree}") as box:
        for device in ("/mem", "/disk"):
            assert "Permission denied" in box.run(["head", "-c", "1", device])["stderr"]
        assert box.run(["/bin/suid", "touch", "/root/owned"], user="worker")["exit_code"] != 0


@pytest.mark.parametrize("name", ["proc", "dev", "tmp", "etc"])
def test_an_image_whose_mount_points_are_links_leads_nowhere(rest: Rest, tmp_path: Path, name: str) -> None:
    """/proc, /dev, /tmp or /etc planted as links to a place outside."""
    tree = busybox_tree(tmp_path / "tree")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("unchanged")
    target = tree / name
    if target.is_dir():
        for entry in target.iterdir():
            entry.unlink()
        target.rmdir()
    target.symlink_to(outside)
    box = rest.submit(f"dir:{tree}")
    info = rest.get(f"{box.path}/wait", timeout=60).expect(200)
    if info["status"] == "ready":
        box.post_write(f"/{name}/keep", b"overwritten")
        box.run("echo x > /etc/hosts; echo y > /tmp/keep")
    else:
        assert info["status"] == "failed"
        assert info["status_message"]
    assert [p.name for p in outside.iterdir()] == ["keep"]
    assert (outside / "keep").read_text() == "unchanged"
    box.delete()


def test_an_image_whose_account_files_are_devices_or_pipes_does_not_hang(rest: Rest, tmp_path: Path) -> None:
    tree = busybox_tree(tmp_path / "tree")
    for name in ("passwd", "group"):
        (tree / "etc" / name).unlink()
        os.mkfifo(tree / "etc" / name)
    watch = Stopwatch()
    with rest.sandbox(f"dir:{tree}") as box:
        box.post_exec("true", wait=True, timeout_seconds=5)
        assert watch.seconds < 40
    (tree / "etc/passwd").unlink()
    (tree / "etc/passwd").write_text(
        "\n".join(["root:x:0:0", ":::::::", "x" * 100_000, "worker:x:a:b:::", "\0"])
    )
    with rest.sandbox(f"dir:{tree}") as box:
        box.post_exec("true", wait=True, user="worker", timeout_seconds=5)
        assert box.run(["/bin/true"])["exit_code"] == 0
