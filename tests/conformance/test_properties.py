"""Properties over generated input: quoting, paths, output windows, patches."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.rest import Box, new_id

MODEST = settings(
    max_examples=30, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip

#: Text that a command line, a file name or JSON may carry: anything but NUL and surrogates.
TEXT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=60)
SPECIAL = st.text(st.sampled_from("'\"\\$`!*?[]{}()<>|&;~#%=\n\t\r -é☃ab"), max_size=30)
NAME = st.text(
    st.characters(blacklist_characters="\0/", blacklist_categories=("Cs",)), min_size=1, max_size=40
).filter(lambda name: name not in (".", "..") and len(name.encode()) <= 255)


@MODEST
@given(arguments=st.lists(TEXT | SPECIAL, max_size=6))
def test_arguments_arrive_as_they_are(box: Box, arguments: list[str]) -> None:
    code = "import os,sys; sys.stdout.buffer.write(b''.join(os.fsencode(a) + b'\\0' for a in sys.argv[1:]))"
    assert box.out(["python3", "-I", "-c", code, *arguments]) == "".join(a + "\0" for a in arguments)


@MODEST
@given(text=TEXT | SPECIAL)
def test_quoted_text_survives_the_shell(box: Box, text: str) -> None:
    import shlex

    assert box.out(f"printf %s {shlex.quote(text)}") == text


@MODEST
@given(name=st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]{0,20}\Z"), value=TEXT | SPECIAL)
def test_variables_arrive_as_they_are(box: Box, name: str, value: str) -> None:
    code = f"import os,sys; sys.stdout.buffer.write(os.environb[{name.encode()!r}])"
    assert box.out(["/usr/bin/python3", "-I", "-c", code], env={name: value}) == value


@MODEST
@given(text=st.text(max_size=2000))
def test_input_comes_back_as_output(box: Box, text: str) -> None:
    clean = text.encode("utf-8", "ignore").decode()
    assert box.out(["cat"], stdin=clean) == clean


@MODEST
@given(data=st.binary(max_size=3000), name=NAME)
def test_files_come_back_as_they_went(box: Box, place: str, data: bytes, name: str) -> None:
    folder = f"{place}/{new_id()}"
    box.write(f"{folder}/{name}", data)
    assert box.read(f"{folder}/{name}") == data
    assert list(box.ls(folder)) == [name]


@MODEST
@given(data=st.binary(max_size=3000))
def test_output_is_the_bytes_replaced_where_undecodable(box: Box, place: str, data: bytes) -> None:
    box.write(f"{place}/data", data)
    job = box.run(["cat", f"{place}/data"])
    assert job["stdout"] == data.decode("utf-8", "replace")
    assert job["stdout_bytes"] == len(data)


@MODEST
@given(size=st.integers(0, 5000), limit=st.integers(0, 3000))
def test_an_output_window_is_head_and_tail(box: Box, size: int, limit: int) -> None:
    code = "import sys; sys.stdout.write(''.join('%07d\\n' % i for i in range(10**3))[:int(sys.argv[1])])"
    whole = "".join(f"{i:07d}\n" for i in range(1000))[:size]
    job = box.run(["python3", "-I", "-c", code, str(size)], max_output_bytes=limit)
    assert job["stdout_bytes"] == len(whole)
    assert job["stdout_truncated"] == (len(whole) > limit)
    if len(whole) <= limit:
        assert job["stdout"] == whole
        return
    # Whatever stands between them, what is shown begins as the output began and ends as it ended.
    shown = job["stdout"]
    common_head = next(
        (i for i, (a, b) in enumerate(zip(shown, whole, strict=False)) if a != b), min(len(shown), len(whole))
    )
    common_tail = next(
        (i for i, (a, b) in enumerate(zip(shown[::-1], whole[::-1], strict=False)) if a != b),
        min(len(shown), len(whole)),
    )
    assert common_head >= limit // 3
    assert common_tail >= limit // 3
    assert len(shown) <= limit + 500


SEGMENT = st.sampled_from(
    ["..", ".", "", "tmp", "etc", "proc", "self", "root", "1", "cwd", "fd", "3", "link", "d", "task"]
)


@MODEST
@given(segments=st.lists(SEGMENT, max_size=10))
def test_no_generated_path_shows_the_machine(
    box: Box, tmp_path_factory: pytest.TempPathFactory, segments: list[str]
) -> None:
    secret = _secret(tmp_path_factory)
    path = "/" + "/".join(segments) + str(secret)
    answer = box.get_file(path)
    assert answer.status in (400, 404, 422)
    assert b"c2VjcmV0" not in answer.body


_SECRETS: list[Path] = []


def _secret(factory: pytest.TempPathFactory) -> Path:
    if not _SECRETS:
        path = factory.mktemp("outside") / "secret"
        path.write_text("secret")
        _SECRETS.append(path)
    return _SECRETS[0]


LINE = st.text(
    st.characters(blacklist_characters="\0\n", blacklist_categories=("Cs",)), max_size=12
) | st.sampled_from(
    [
        "EOF",
        "PATCH",
        "\r",
        "+",
        "-",
        "@@ -1 +1 @@",
        "--- a/f",
        "diff --git a/f b/f",
        "\\ No newline at end of file",
        " ",
    ]
)
CONTENT = st.builds(
    lambda lines, end, last: end.join(lines) + last, st.lists(LINE, max_size=12), st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["", "\n", "\r\n"]),
).map(str.encode)  # fmt: skip


@settings(MODEST, max_examples=20)
@given(old=CONTENT, new=CONTENT)
def test_the_patch_between_two_contents_turns_one_into_the_other(
    box: Box, place: str, tmp_path_factory: pytest.TempPathFactory, old: bytes, new: bytes
) -> None:
    if old == new:
        return
    folder = tmp_path_factory.mktemp("diff")
    for side, content in (("a", old), ("b", new)):
        (folder / side).mkdir()
        (folder / side / "f").write_bytes(content)
    diff = subprocess.run(
        ["git", "-c", "core.autocrlf=false", "diff", "--no-index", "--binary", "--no-prefix", "a/f", "b/f"], cwd=folder,
        capture_output=True,
    ).stdout.decode()  # fmt: skip
    for git in (True, False):
        target = f"{place}/{new_id()}"
        box.write(f"{target}/f", old)
        if git:
            box.out(["git", "init", "-q"], cwd=target)
        elif "GIT binary patch" in diff or not new or not old:
            continue  # the program `patch` cannot
        result = box.apply_patch(diff, cwd=target).expect(200)
        assert result["success"], (result, diff)
        assert box.read(f"{target}/f") == new
