"""Login shells, images without bash, and images without any shell."""

from __future__ import annotations

import pytest

from tests.conformance.conftest import NewBox
from tests.support.rest import Box

pytestmark = pytest.mark.unprivileged

#: What conda writes into a bashrc, in essence: it returns at once in shells that are not interactive.
CONDA_BASHRC = """
case $- in *i*) ;; *) return;; esac
export PS1='\\u@\\h> '
__conda_setup() { export CONDA_PREFIX=/opt/conda; export PATH="/opt/conda/bin:$PATH"; }
__conda_setup
conda() { echo "conda function: $*"; }
"""


@pytest.fixture(scope="module")
def conda_like(rest, images):  # type: ignore[no-untyped-def]
    """A sandbox whose root has a bashrc and a profile as conda images have."""
    with rest.sandbox(images.full) as box:
        box.write("/root/.bashrc", CONDA_BASHRC.encode())
        box.write(
            "/root/.profile", b"export FROM_PROFILE=yes\nmesg n || true\n[ -f ~/.bashrc ] && . ~/.bashrc\n"
        )
        box.write("/opt/conda/bin/mytool", b"#!/bin/sh\necho conda tool\n", mode="0755")
        yield box


def test_a_login_shell_sees_profile_and_bashrc(conda_like: Box) -> None:
    job = conda_like.run("echo $FROM_PROFILE $CONDA_PREFIX; mytool; conda x", login_shell=True)
    assert job["stdout"].splitlines() == ["yes /opt/conda", "conda tool", "conda function: x"]


def test_a_login_shell_adds_nothing_to_stderr(conda_like: Box) -> None:
    job = conda_like.run("echo out; echo err >&2", login_shell=True)
    assert (job["stdout"], job["stderr"]) == ("out\n", "err\n")


def test_a_login_shell_keeps_tracebacks(conda_like: Box) -> None:
    job = conda_like.run("python3 -c 'import nope'", login_shell=True)
    assert job["exit_code"] == 1
    assert job["stderr"].startswith("Traceback (most recent call last):\n")
    assert job["stderr"].endswith("ModuleNotFoundError: No module named 'nope'\n")


def test_a_login_shell_keeps_lines_that_look_like_its_own_noise(conda_like: Box) -> None:
    noise = (
        "bash: cannot set terminal process group (-1): Inappropriate ioctl for device\n"
        "bash: no job control in this shell"
    )
    job = conda_like.run(f"echo '{noise}' >&2; echo 'mesg: ttyname failed' >&2", login_shell=True)
    assert job["stderr"] == noise + "\nmesg: ttyname failed\n"


def test_a_login_shell_reports_the_exit_code_and_signals(conda_like: Box) -> None:
    assert conda_like.run("exit 7", login_shell=True)["exit_code"] == 7
    job = conda_like.run("kill -9 $$", login_shell=True)
    assert (job["exit_code"], job["signal"]) == (137, "KILL")


def test_a_login_shell_ends_at_its_timeout(conda_like: Box) -> None:
    assert conda_like.run("sleep 60", login_shell=True, timeout_seconds=0.5)["timed_out"]


def test_a_login_shell_reads_the_commands_input(conda_like: Box) -> None:
    assert conda_like.run("cat", login_shell=True, stdin="given")["stdout"] == "given"
    assert conda_like.run("cat; echo end", login_shell=True)["stdout"] == "end\n"


def test_a_list_in_a_login_shell_is_still_exact_argv(conda_like: Box) -> None:
    argument = "a b $HOME 'x' \"y\" \n*"
    job = conda_like.run(["printf", "%s|", argument, ""], login_shell=True)
    assert job["stdout"] == f"{argument}||"


def test_a_list_in_a_login_shell_sees_its_path(conda_like: Box) -> None:
    assert conda_like.run(["mytool"], login_shell=True)["stdout"] == "conda tool\n"


def test_a_plain_shell_reads_neither_profile_nor_bashrc(conda_like: Box) -> None:
    assert conda_like.out('echo "[$FROM_PROFILE$CONDA_PREFIX]"') == "[]\n"


def test_an_image_without_bash_runs_strings_in_sh(busybox: Box) -> None:
    assert busybox.out("echo one; echo two | tr t T; exit 0") == "one\nTwo\n"


def test_an_image_without_bash_has_login_shells(new_box: NewBox, images) -> None:  # type: ignore[no-untyped-def]
    box = new_box(images.busybox)
    box.write("/root/.profile", b"export FROM_PROFILE=yes\n")
    job = box.run("echo $FROM_PROFILE; echo err >&2", login_shell=True)
    assert (job["stdout"], job["stderr"]) == ("yes\n", "err\n")


def test_an_image_without_python_is_served_in_full(busybox: Box) -> None:
    assert busybox.run(["python3"])["exit_code"] == 127
    busybox.write("/tmp/file", b"content", mode="0600")
    assert busybox.read("/tmp/file") == b"content"
    assert busybox.ls("/tmp")["file"]["size"] == 7
    assert busybox.run("sleep 60", timeout_seconds=0.3)["timed_out"]


def test_an_image_without_a_shell_runs_lists(shell_less: Box) -> None:
    assert shell_less.out(["/bin/echo", "a  b", ""]) == "a  b \n"
    assert shell_less.out(["echo", "found along the path"]) == "found along the path\n"


def test_an_image_without_a_shell_refuses_strings_as_a_missing_program(shell_less: Box) -> None:
    job = shell_less.run("echo hello")
    assert (job["status"], job["exit_code"]) == ("failed", 127)
    assert "shell" in (job["error"] or "") + job["stderr"]


def test_an_image_without_a_shell_has_files_timeouts_and_input(shell_less: Box) -> None:
    shell_less.write("/tmp/file", b"content")
    assert shell_less.out(["cat", "/tmp/file"]) == "content"
    assert shell_less.out(["cat"], stdin="x") == "x"
    assert shell_less.run(["sleep", "60"], timeout_seconds=0.3)["timed_out"]
