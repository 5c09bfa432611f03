"""Standard input: empty unless given, whole when given, open when asked for."""

from __future__ import annotations

import base64

from tests.support.rest import Box
from tests.support.waiting import Stopwatch


def send(box: Box, job_id: str, data: bytes = b"", eof: bool = False) -> int:
    body = {"data": base64.b64encode(data).decode(), "eof": eof}
    return box.rest.post(f"/jobs/{job_id}/stdin", body).status


def test_input_is_empty_unless_given(box: Box) -> None:
    watch = Stopwatch()
    assert box.out("cat; echo end", timeout_seconds=60) == "end\n"
    assert watch.seconds < 10


def test_a_prompt_for_a_password_ends_at_once(box: Box) -> None:
    job = box.run("read -p 'Password: ' x; echo \"got [$x] $?\"", timeout_seconds=60)
    assert (job["timed_out"], job["stdout"]) == (False, "got [] 1\n")


def test_there_is_no_terminal_to_read_from(box: Box) -> None:
    job = box.run("cat < /dev/tty", timeout_seconds=60)
    assert (job["timed_out"], job["exit_code"]) == (False, 1)


def test_given_input_arrives_whole_and_ends(box: Box) -> None:
    assert box.out(["/usr/bin/wc", "-c"], stdin="x" * 1_000_000).strip() == "1000000"


def test_given_input_is_exact(box: Box) -> None:
    text = "no newline at the end ☃\r\n\0 tab\t'\"$HOME"
    assert box.out(["/bin/cat"], stdin=text) == text


def test_empty_input_is_input(box: Box) -> None:
    assert box.out(["/usr/bin/wc", "-c"], stdin="").strip() == "0"


def test_input_that_nobody_reads_is_no_obstacle(box: Box) -> None:
    watch = Stopwatch()
    assert box.out("echo done", stdin="x" * 5_000_000) == "done\n"
    assert watch.seconds < 20


def test_input_stays_open_when_asked_for(fresh: Box) -> None:
    job_id = fresh.running("tee /tmp/got", stdin="first\n", stdin_open=True)
    assert send(fresh, job_id, b"second\n") == 200
    fresh.until("grep -q second /tmp/got")
    assert fresh.rest.job(job_id)["status"] == "running"
    assert send(fresh, job_id, b"last", eof=True) == 200
    job = fresh.rest.wait_job(job_id)
    assert (job["stdout"], job["exit_code"]) == ("first\nsecond\nlast", 0)


def test_input_may_be_any_bytes(fresh: Box) -> None:
    job_id = fresh.running("od -An -tx1", stdin_open=True)
    assert send(fresh, job_id, b"\xff\x00\n\x80", eof=True) == 200
    assert fresh.rest.wait_job(job_id)["stdout"].split() == ["ff", "00", "0a", "80"]


def test_input_to_a_finished_command_is_refused(fresh: Box) -> None:
    job_id = fresh.run("true", stdin_open=True)["job_id"]
    answer = fresh.rest.post(f"/jobs/{job_id}/stdin", {"data": "", "eof": True})
    assert (answer.status, answer.code) == (409, "job_not_running")


def test_input_to_a_command_that_was_not_started_for_it_is_refused(fresh: Box) -> None:
    job_id = fresh.running("sleep 20")
    assert send(fresh, job_id, b"x") == 409
    fresh.rest.delete(f"/jobs/{job_id}").expect(200)


def test_input_that_is_not_base64_is_refused(fresh: Box) -> None:
    job_id = fresh.running(["/bin/cat"], stdin_open=True)
    assert fresh.rest.post(f"/jobs/{job_id}/stdin", {"data": "***"}).status == 422
    assert send(fresh, job_id, eof=True) == 200
    assert fresh.rest.wait_job(job_id)["stdout"] == ""


def test_a_great_deal_of_input_in_pieces_arrives_in_order(fresh: Box) -> None:
    job_id = fresh.running("sha256sum; sleep 0", stdin_open=True)
    import hashlib

    digest = hashlib.sha256()
    for number in range(40):
        piece = bytes([number]) * 200_000
        digest.update(piece)
        assert send(fresh, job_id, piece) == 200
    assert send(fresh, job_id, eof=True) == 200
    assert fresh.rest.wait_job(job_id)["stdout"].split()[0] == digest.hexdigest()
