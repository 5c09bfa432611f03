"""What a command is: argv or shell text, its directory, its environment, its user, its result."""

from __future__ import annotations

import pytest

from tests.support.rest import Box, Rest, new_id

pytestmark = pytest.mark.unprivileged

AWKWARD_ARGUMENTS = [
    "plain",
    "two words",
    "",
    "a'b",
    'a"b',
    "$HOME `id` $(id)",
    "line\nbreak",
    "tab\there",
    "back\\slash",
    "*",
    "~",
    "-n",
    "ünïcode ☃ 你",
    ";true",
    "x" * 100_000,
]


def test_a_string_runs_in_a_shell(box: Box) -> None:
    assert box.out("echo one && echo two | tr t T") == "one\nTwo\n"


def test_the_shell_is_bash_where_the_image_has_it(box: Box) -> None:
    assert box.out("x=(a b); echo ${#x[@]} ${BASH_VERSION:+bash}") == "2 bash\n"


@pytest.mark.parametrize("argument", AWKWARD_ARGUMENTS, ids=lambda a: repr(a)[:20])
def test_a_list_is_exact_argv(box: Box, argument: str) -> None:
    assert box.out(["/usr/bin/printf", "%s|", argument, "end"]) == f"{argument}|end|"


def test_a_program_given_as_a_list_is_found_along_the_path(box: Box) -> None:
    assert box.out(["python3", "-c", "print('a b')"]) == "a b\n"


def test_a_program_that_does_not_exist_fails_with_127(box: Box) -> None:
    job = box.run(["no-such-program"])
    assert (job["status"], job["exit_code"], job["timed_out"]) == ("failed", 127, False)
    assert "no-such-program" in job["stderr"] + (job["error"] or "")


def test_a_program_that_may_not_be_executed_fails_with_126(box: Box) -> None:
    assert box.run(["/etc/passwd"])["exit_code"] == 126


def test_a_directory_is_not_a_program(box: Box) -> None:
    assert box.run(["/usr"])["exit_code"] == 126


@pytest.mark.parametrize("code", [0, 1, 2, 42, 124, 137, 255])
def test_the_exit_code_is_the_commands_own(box: Box, code: int) -> None:
    job = box.run(f"exit {code}")
    assert (job["exit_code"], job["signal"], job["timed_out"]) == (code, None, False)
    assert job["status"] == ("succeeded" if code == 0 else "failed")


def test_a_command_that_exits_124_did_not_time_out(box: Box) -> None:
    job = box.run("exit 124", timeout_seconds=30)
    assert (job["exit_code"], job["timed_out"], job["error"]) == (124, False, None)


@pytest.mark.parametrize(
    ("name", "number"), [("KILL", 9), ("TERM", 15), ("SEGV", 11), ("USR1", 10), ("HUP", 1)]
)
def test_death_by_a_signal_is_128_plus_its_number_and_named(box: Box, name: str, number: int) -> None:
    job = box.run(f"kill -{name} $$; sleep 60")
    assert (job["exit_code"], job["signal"], job["status"]) == (128 + number, name, "failed")


def test_a_non_zero_exit_is_no_error_of_the_service(box: Box) -> None:
    job = box.run("exit 3")
    assert (job["error"], job["error_code"], job["infra"]) == (None, None, False)


def test_a_command_starts_in_the_given_directory(box: Box, place: str) -> None:
    assert box.out(["/bin/pwd"], cwd=place) == f"{place}\n"


def test_a_directory_that_does_not_exist_is_refused(box: Box) -> None:
    answer = box.post_exec("pwd", cwd="/nope", wait=True)
    assert (answer.status, answer.code) == (400, "cwd_not_found")
    assert "/nope" in answer.json["detail"]


def test_a_file_is_no_directory_to_start_in(box: Box) -> None:
    answer = box.post_exec("pwd", cwd="/etc/passwd", wait=True)
    assert (answer.status, answer.code) == (400, "cwd_not_found")


def test_a_refused_directory_runs_nothing(box: Box, place: str) -> None:
    box.post_exec(f"touch {place}/ran", cwd="/nope", wait=True).expect(400)
    assert box.ls(place) == {}


def test_a_directory_that_an_earlier_command_makes_is_there_for_the_next(fresh: Box) -> None:
    fresh.start("sleep 0.3; mkdir /tmp/later")
    assert fresh.out("pwd", cwd="/tmp/later") == "/tmp/later\n"


def test_variables_are_added_to_the_environment(box: Box) -> None:
    text = "two words\nand 'quotes' \"$HOME\" ☃"
    assert box.out(["/usr/bin/printenv", "GIVEN"], env={"GIVEN": text}) == text + "\n"
    assert box.out('echo "$PATH"', env={"GIVEN": "x"}).strip()


def test_a_variable_of_one_command_is_not_there_for_the_next(box: Box) -> None:
    box.out("true", env={"ONCE": "x"})
    assert box.out('echo "[$ONCE]"') == "[]\n"


def test_commands_have_a_usable_home_and_path(box: Box) -> None:
    home, path = box.out('cd "$HOME" && pwd && echo "$PATH"').splitlines()
    assert home == "/root"
    assert {"/usr/bin", "/bin"} <= set(path.split(":"))


def test_the_services_own_environment_is_not_passed_on(box: Box) -> None:
    assert "ORCHARD" not in box.out(["/usr/bin/env"])


def test_a_command_runs_as_root_unless_asked_otherwise(box: Box) -> None:
    assert box.out("id -u; id -un") == "0\nroot\n"


@pytest.mark.parametrize("user", ["worker", "1000", "worker:worker", "1000:1000"])
def test_a_command_runs_as_the_given_user(busybox: Box, user: str) -> None:
    assert busybox.out("id -u; id -g", user=user) == "1000\n1000\n"


def test_a_user_has_its_own_home_and_groups(busybox: Box) -> None:
    assert busybox.out("echo $HOME; id -Gn", user="worker").splitlines() == ["/home/worker", "worker extra"]


@pytest.mark.unprivileged(False)
def test_a_user_may_write_only_its_own(busybox: Box) -> None:
    assert busybox.run("touch /home/worker/mine", user="worker")["exit_code"] == 0
    assert busybox.run("touch /root/theirs", user="worker")["exit_code"] != 0


def test_a_user_that_the_image_lacks_is_refused(box: Box) -> None:
    answer = box.post_exec("true", user="nobody-of-this-name", wait=True)
    assert (answer.status, answer.code) == (400, "user_not_found")


def test_a_result_names_its_command_as_given(box: Box) -> None:
    assert box.run("echo 'x  y'")["command"] == "echo 'x  y'"
    assert box.run(["/bin/echo", "x  y"])["command"] == ["/bin/echo", "x  y"]


def test_a_command_that_forks_a_lot_leaves_no_zombies(fresh: Box) -> None:
    fresh.out("for i in $(seq 200); do (true & ) ; done; wait")
    assert fresh.out("ps -eo stat= | grep -c '^Z' || true", concurrent=True).strip() == "0"


def test_signals_ignored_by_the_service_are_not_ignored_by_commands(box: Box) -> None:
    masks = box.out("grep -E '^Sig(Ign|Blk)' /proc/self/status").split()
    assert masks == ["SigBlk:", "0" * 16, "SigIgn:", "0" * 16]


def test_a_command_holds_no_descriptors_but_the_three(box: Box) -> None:
    job = box.python("import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:-1])")
    assert job["stdout"] == "[0, 1, 2]\n"


def test_commands_have_a_group_and_session_of_their_own(box: Box) -> None:
    pid, group, session = box.python("import os; print(os.getpid(), os.getpgid(0), os.getsid(0))")[
        "stdout"
    ].split()
    assert pid == group == session


def test_a_command_without_a_program_is_refused(rest: Rest, box: Box) -> None:
    for command in ("", [], [""]):
        assert box.post_exec(command, wait=True).status == 422


def test_a_nul_byte_in_a_command_is_refused(box: Box) -> None:
    assert box.post_exec("echo a\0b").status == 422
    assert box.post_exec(["/bin/echo", "a\0b"]).status == 422
    assert box.post_exec("true", env={"A": "\0"}).status == 422


def test_an_argument_list_longer_than_the_kernel_takes_is_the_commands_failure(box: Box) -> None:
    job = box.run(["/bin/echo", *(["x" * 100_000] * 40)])
    assert job["exit_code"] not in (0, None)
    assert box.alive()


def test_commands_on_a_sandbox_that_was_never_seen_are_404(rest: Rest) -> None:
    answer = rest.post(f"/sandboxes/{new_id()}/exec", {"command": "true", "wait": True})
    assert (answer.status, answer.code) == (404, "sandbox_not_found")
