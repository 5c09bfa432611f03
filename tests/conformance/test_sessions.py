"""exec with `session`: a named shell that keeps what it was told, and that nothing can break."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance.conftest import NewBox
from tests.conformance.runtimes import Images
from tests.support.rest import Box, new_id
from tests.support.service import Service
from tests.support.waiting import Stopwatch

pytestmark = pytest.mark.unprivileged

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(box: Box) -> Run:
    """Runs a command in a session of the test's own."""
    name = new_id("s")
    return lambda command, **fields: box.run(command, session=fields.pop("session", name), **fields)


def out(job: dict[str, Any]) -> str:
    assert (job["exit_code"], job["stderr"], job["session_reset"]) == (0, "", False), job
    return str(job["stdout"])


def test_the_directory_lasts(run: Run) -> None:
    out(run("mkdir -p '/tmp/a b' && cd '/tmp/a b'"))
    assert out(run("pwd")) == "/tmp/a b\n"


def test_variables_last_exported_and_not(run: Run) -> None:
    out(run("A='x \"y'; export B=$'two\\nlines'; declare -a L=(1 '2 3'); declare -A M=([k]=v)"))
    assert out(run('echo "$A|$B|${L[1]}|${M[k]}"; env | grep -c ^A= || true')) == 'x "y|two\nlines|2 3|v\n0\n'


def test_functions_aliases_options_and_umask_last(run: Run) -> None:
    out(
        run(
            "f() { echo \"f of $1\"; }; shopt -s expand_aliases; alias g='echo aliased'; set -o noglob; umask 077"
        )
    )
    assert out(run("f me; g; echo *; umask")) == "f of me\naliased\n*\n0077\n"


def test_the_last_status_is_known_to_the_next(run: Run) -> None:
    assert run("false")["exit_code"] == 1
    assert out(run("echo $?")) == "1\n"


def test_sessions_do_not_see_each_other(run: Run) -> None:
    out(run("A=1", session="one"))
    assert out(run("echo ${A-unset}", session="two")) == "unset\n"


def test_a_list_is_exact_argv_and_may_be_a_builtin(run: Run) -> None:
    out(run(["cd", "/usr"]))
    assert out(run(["printf", "%s|", "a b", "$HOME", ""])) == "a b|$HOME||"
    assert out(run(["pwd"])) == "/usr\n"


def test_a_here_document_neither_hangs_nor_harms(run: Run) -> None:
    watch = Stopwatch()
    out(run("cat <<'EOF' > /tmp/f\nx $y\nEOF\n"))
    assert out(run("cat /tmp/f; echo ok")) == "x $y\nok\n"
    assert watch.seconds < 30


@pytest.mark.parametrize("text", ["cat <<EOF\nno end", "if true", "echo 'open", "(", "case x in", "}"])
def test_a_wrong_command_fails_and_the_session_lives(run: Run, text: str) -> None:
    out(run("A=kept"))
    run(text)
    assert out(run("echo $A")) == "kept\n"


@pytest.mark.parametrize("text", ["A=1\necho 'open", "A=1\necho `open", "A=1\necho ${open"])
def test_a_wrong_command_says_only_what_is_wrong_with_it(run: Run, text: str) -> None:
    job = run(text)
    assert (job["exit_code"], job["session_reset"]) == (2, False)
    assert "orchard_leave" not in job["stderr"]
    assert out(run("echo $A")) == "1\n"


def test_a_backslash_at_the_end_is_the_commands_own(run: Run) -> None:
    job = run("echo end \\")
    assert (job["exit_code"], job["stderr"]) == (0, "")


@pytest.mark.parametrize(
    "name", ["declare", "cd", "echo", "set", "trap", "unset", "alias", "exit", "builtin"]
)
def test_a_function_with_the_name_of_a_builtin_loses_nothing_unsaid(run: Run, name: str) -> None:
    out(run("A=before; cd /usr"))
    job = run(f"{name}() {{ command printf noise; }}; A=after")
    kept = "before" if job["session_reset"] else "after"
    assert job["session_reset"] is (name == "builtin")
    assert out(run("printf '%s' \"$A $PWD\"")) == f"{kept} /usr"


def test_aliases_of_builtins_do_no_harm(run: Run) -> None:
    out(run("A=kept; shopt -s expand_aliases; alias exec=false trap=false cd=false set=false '{=false'"))
    assert out(run("printf $A")) == "kept"


def test_functions_may_need_options_and_use_aliases(run: Run) -> None:
    out(run("shopt -s extglob expand_aliases; alias say='printf said; printf'"))
    out(run("f() { case $1 in @(a|b)) say $1 ;; esac; }"))
    out(run("A=kept"))
    assert out(run("f b; echo $A")) == "saidbkept\n"


def test_traps_see_only_the_command(run: Run) -> None:
    assert run("set -ET; A=1; trap 'printf .' DEBUG; :; :")["stdout"] == ".."
    assert out(run("echo $A")) == "1\n"


def test_many_lines_run_as_one_script(run: Run) -> None:
    assert out(run("for i in 1 2\ndo\n  echo $i\ndone\n# comment\necho end")) == "1\n2\nend\n"


def test_a_command_that_reads_input_gets_its_own(run: Run) -> None:
    assert out(run("cat; read x || echo none")) == "none\n"
    assert out(run("read x; echo got $x", stdin="line\n")) == "got line\n"


def test_exit_ends_the_command_and_keeps_what_it_did(run: Run) -> None:
    job = run("A=set; exit 3")
    assert (job["exit_code"], job["session_reset"]) == (3, False)
    assert out(run("echo $A")) == "set\n"


def test_exit_on_error_holds_from_command_to_command(run: Run) -> None:
    out(run("set -e"))
    job = run("false; echo not reached")
    assert (job["exit_code"], job["stdout"]) == (1, "")
    assert out(run("set +e; echo on")) == "on\n"


@pytest.mark.parametrize("command", ["A=lost; exec true", "A=lost; kill -9 $$"])
def test_a_replaced_or_killed_shell_is_said_and_the_session_is_as_before(run: Run, command: str) -> None:
    out(run("A=kept"))
    assert run(command)["session_reset"] is True
    assert out(run("echo $A")) == "kept\n"


def test_a_timeout_leaves_the_session_as_it_was(run: Run) -> None:
    out(run("cd /usr; A=kept"))
    job = run("cd /tmp; sleep 600", timeout_seconds=0.5)
    assert (job["timed_out"], job["session_reset"]) == (True, True)
    assert out(run("pwd; echo $A")) == "/usr\nkept\n"


def test_a_directory_and_variables_may_be_given_to_one_command(run: Run) -> None:
    out(run("cd /usr; A=session; export B=session"))
    assert out(run("pwd; echo $A $B", cwd="/tmp", env={"B": "it's given"})) == "/tmp\nsession it's given\n"


def test_what_runs_in_the_background_goes_on(run: Run, box: Box) -> None:
    watch = Stopwatch()
    out(run("sleep 4711.5 & echo started"))
    assert watch.seconds < 30
    assert out(run("pgrep -cf '^sleep 4711.5'; pkill -f '^sleep 4711.5'")) == "1\n"


def test_a_directory_that_is_gone_is_said(run: Run) -> None:
    out(run("mkdir /tmp/gone; cd /tmp/gone; rmdir /tmp/gone"))
    job = run("echo still here")
    assert (job["stdout"], job["exit_code"]) == ("still here\n", 0)
    assert "gone" in job["stderr"]


def test_tracing_shows_only_the_command(run: Run) -> None:
    run("set -x")
    assert re.fullmatch(r"\++ echo hi\n", run("echo hi")["stderr"])


def test_readonly_and_strange_variables_do_no_harm(run: Run) -> None:
    out(run("readonly R=1; set -u; IFS=:; PATH=/usr/bin:/bin; POSIXLY_CORRECT=1"))
    assert out(run('echo "$R $PATH"')) == "1 /usr/bin:/bin\n"


def test_commands_of_one_session_do_not_run_side_by_side(fresh: Box) -> None:
    fresh.running("sleep 600", session="s", concurrent=True)
    answer = fresh.post_exec("true", session="s", concurrent=True, wait=True)
    assert (answer.status, answer.code) == (409, "conflict")


def test_sessions_are_listed_and_forgotten(fresh: Box) -> None:
    fresh.run("A=1", session="first")
    fresh.run("true", session="second")
    listed = fresh.rest.get(f"{fresh.path}/sessions").expect(200)["sessions"]
    assert [(s["name"], s["busy"]) for s in listed] == [("first", False), ("second", False)]
    for _ in range(2):
        fresh.rest.delete(f"{fresh.path}/sessions/first").expect(200)
    assert fresh.run("echo ${A-new}", session="first")["stdout"] == "new\n"


@pytest.mark.parametrize("name", ["", "a b", "../x", "-a", "x" * 65, 5])
def test_a_wrong_name_is_refused(box: Box, name: object) -> None:
    answer = box.post_exec("true", session=name, wait=True)
    assert (answer.status, answer.code) == (422, "invalid_request")


def test_an_image_without_bash_keeps_directory_and_environment(new_box: NewBox, images: Images) -> None:
    box = new_box(images.busybox)
    box.run("mkdir -p \"/tmp/a'b\"; cd \"/tmp/a'b\"; export A='x y'", session="s")
    job = box.run('pwd; echo "$A"', session="s")
    assert (job["stdout"], job["stderr"], job["session_reset"]) == ("/tmp/a'b\nx y\n", "", False)


def test_a_session_outlives_the_service(own_service: Callable[..., Service]) -> None:
    service = own_service()
    box = service.rest.create("host")
    box.run("cd /usr; A=kept", session="s")
    service.kill()
    service.start()
    assert Box(service.rest, box.id).out("pwd; echo $A", session="s") == "/usr\nkept\n"
