"""`orchard images build`, in real sandboxes of a small image."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchard.env.images import ImageStore
from tests.cli.conftest import Done, environment, run_cli
from tests.env.images.archives import directory, file, symlink, tar
from tests.support.images import BUSYBOX, applets

pytestmark = [
    pytest.mark.xdist_group("cli"),
    pytest.mark.skipif(os.geteuid() != 0, reason="of the local runtime as root"),
]

Build = Callable[..., Done]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory with the image `small`: busybox, a user, a directory with files to remove."""
    folder = tmp_path_factory.mktemp("build")
    files = [
        directory("bin"),
        file("bin/busybox", BUSYBOX.read_bytes(), 0o755),
        *(symlink(f"bin/{name}", "busybox") for name in applets() if name != "busybox"),
        directory("etc"),
        file("etc/passwd", "root:x:0:0::/root:/bin/sh\nworker:x:1000:1000::/:/bin/sh\n"),
        file("etc/group", "root:x:0:\nworker:x:1000:\n"),
        directory("old"),
        file("old/gone"),
        file("old/kept", "kept"),
        directory("replaced"),
        file("replaced/hidden"),
    ]
    archive = folder / "small.tar"
    archive.write_bytes(tar(*files))
    ImageStore(folder / "state" / "images").import_archive(archive, "small")
    return folder / "state"


@pytest.fixture
def build(state: Path, tmp_path: Path) -> Build:
    """Build `recipe`, given as its fields, with more arguments of the command."""

    def build(tag: str, *arguments: str, **recipe: Any) -> Done:
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps({"base": "small", **recipe}))
        command = ["images", "build", str(path), "--tag", tag, "--state-dir", str(state), *arguments]
        return run_cli(*command, env=environment())

    return build


@pytest.fixture
def inside(state: Path) -> Callable[..., str]:
    """The output of a command in a sandbox of an image."""

    def inside(image: str, *command: str) -> str:
        done = run_cli("run", image, "--state-dir", str(state), "--", *command, env=environment())
        assert done.returncode == 0, done.stderr
        return done.stdout

    return inside


def fine(done: Done) -> Done:
    assert done.returncode == 0, done.stderr
    return done


def test_run_lines_and_copies_make_the_image(
    build: Build, inside: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/hello").write_text("#!/bin/sh\necho hello $WHO\n")
    (tmp_path / "tools/hello").chmod(0o755)
    done = build(
        "made:1",
        copy=[{"from": "tools", "to": "/opt/tools"}],
        run=["/opt/tools/hello > made-by-run", "ln -s made-by-run link"],
        env={"WHO": "there"},
        working_dir="/work",
    )
    assert fine(done).stdout == "made:1\n"
    assert (
        inside("made:1", "sh", "-c", "pwd; cat link; /opt/tools/hello") == "/work\nhello there\nhello there\n"
    )


def test_the_user_is_that_of_the_images_commands(build: Build, inside: Callable[..., str]) -> None:
    fine(build("user:1", run=["id -u > /by-root"], user="worker"))
    assert inside("user:1", "sh", "-c", "cat /by-root; id -u") == "0\n1000\n"


def test_what_a_step_removes_is_gone(build: Build, inside: Callable[..., str]) -> None:
    fine(
        build("removed:1", run=["rm /old/gone", "rm -r /replaced", "mkdir /replaced", "touch /replaced/new"])
    )
    assert inside("removed:1", "sh", "-c", "ls /old /replaced") == "/old:\nkept\n\n/replaced:\nnew\n"


def test_owners_modes_and_hard_links_are_kept(build: Build, inside: Callable[..., str]) -> None:
    lines = ["echo x > /a", "ln /a /b", "chown worker:worker /a", "chmod 4750 /a", "mkfifo /pipe"]
    fine(build("owned:1", run=lines))
    assert (
        inside("owned:1", "stat", "-c", "%n %u %g %a %h", "/a", "/b")
        == "/a 1000 1000 4750 2\n/b 1000 1000 4750 2\n"
    )
    assert inside("owned:1", "stat", "-c", "%F", "/pipe") == "fifo\n"


def test_an_image_can_be_the_base_of_another(build: Build, inside: Callable[..., str]) -> None:
    fine(build("first:1", run=["echo one > /one"], env={"A": "1"}))
    fine(build("second:1", base="first:1", run=["cat /one > /two", "rm /one"], env={"B": "2"}))
    assert (
        inside("second:1", "sh", "-c", "cat /two; echo $A$B; ls /one 2>&1 | grep -c 'No such'")
        == "one\n12\n1\n"
    )


def test_the_same_recipe_on_the_same_base_is_built_once(build: Build, state: Path) -> None:
    recipe = {"run": ["cat /proc/sys/kernel/random/uuid > /id"]}
    first = json.loads(fine(build("cached:1", "--json", **recipe)).stdout)
    again = fine(build("cached:2", "--json", **recipe))
    assert json.loads(again.stdout)["digest"] == first["digest"]
    assert "built before" in again.stderr
    assert (
        json.loads(fine(build("cached:3", "--json", "--no-cache", **recipe)).stdout)["digest"]
        != first["digest"]
    )
    assert ImageStore(state / "images").resolve("cached:2").digest == first["digest"]


def test_a_changed_file_is_built_anew(build: Build, inside: Callable[..., str], tmp_path: Path) -> None:
    recipe = {"copy": [{"from": "data", "to": "/data"}]}
    (tmp_path / "data").write_text("old")
    fine(build("data:1", **recipe))
    (tmp_path / "data").write_text("new")
    fine(build("data:1", **recipe))
    assert inside("data:1", "cat", "/data") == "new"


def test_a_failing_step_is_told_with_its_output_and_code(build: Build, state: Path) -> None:
    done = build("broken:1", "--json", run=["true", "echo out; echo err >&2; exit 7", "touch /never"])
    assert done.returncode == 1
    assert "step 2 of 3 (run: echo out; echo err >&2; exit 7) exited with 7" in done.stderr
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["exit_code"], error["output"]) == ("build_failed", 7, "out\nerr")
    assert "broken:1" not in [record.name for record in ImageStore(state / "images").list()]


def test_a_step_that_does_not_end_is_ended(build: Build) -> None:
    done = build("endless:1", "--step-timeout", "1", run=["sleep 1000"])
    assert done.returncode == 1
    assert "did not end within 1 s" in done.stderr


def test_a_python_package_is_installed_from_a_wheel(
    build: Build, inside: Callable[..., str], tmp_path: Path
) -> None:
    if subprocess.run(["/usr/bin/python3", "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip("needs this machine's python3 with pip (apt install python3-pip)")
    wheel = tmp_path / "made-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("made.py", "print('made')\n")
        archive.writestr("made-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: made\nVersion: 1.0\n")
        archive.writestr(
            "made-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("made-1.0.dist-info/RECORD", "")
    fine(
        build(
            "wheel:1",
            base="host",
            copy=[{"from": wheel.name, "to": f"/opt/{wheel.name}"}],
            pip=["--no-index", "--target=/opt/lib", f"/opt/{wheel.name}"],
            env={"PYTHONPATH": "/opt/lib"},
        )
    )
    assert inside("wheel:1", "python3", "-c", "import made") == "made\n"


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ({"runs": ["x"]}, "wrong at runs"),
        ({"run": "one line"}, "wrong at run"),
        ({"copy": [{"from": "a"}]}, "wrong at copy.0.to"),
        ({"working_dir": "relative"}, "wrong at working_dir"),
        ({"copy": [{"from": "absent", "to": "/x"}]}, "no 'absent' to copy"),
        ({"base": "nothing:1"}, "orchard images pull"),
    ],
)
def test_a_wrong_recipe_is_told(build: Build, recipe: dict[str, Any], told: str) -> None:
    done = build("wrong:1", **recipe)
    assert done.returncode == 1
    assert told in done.stderr


def test_a_recipe_may_be_yaml(state: Path, tmp_path: Path, inside: Callable[..., str]) -> None:
    (tmp_path / "recipe.yaml").write_text("base: small\nrun:\n  - echo from yaml > /said\n")
    command = ["images", "build", str(tmp_path / "recipe.yaml"), "-t", "yaml:1", "--state-dir", str(state)]
    fine(run_cli(*command, env=environment()))
    assert inside("yaml:1", "cat", "/said") == "from yaml\n"
