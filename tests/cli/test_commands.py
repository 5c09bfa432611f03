"""The commands that talk to a service, as programs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from orchard.env.client import SandboxClient
from tests.cli.conftest import Cli, environment, run_cli
from tests.support.service import Service

pytestmark = pytest.mark.xdist_group("cli")


def test_exec_passes_output_and_exit_code_on(cli: Cli, sandbox_id: str) -> None:
    done = cli("exec", sandbox_id, "--", "sh", "-c", "printf out; printf err >&2; exit 37")
    assert (done.stdout, done.stderr, done.returncode) == ("out", "err", 37)


def test_exec_with_options_of_the_command(cli: Cli, sandbox_id: str) -> None:
    done = cli(
        "exec",
        sandbox_id,
        "-w",
        "/usr",
        "-e",
        "A=x=y",
        "-u",
        "nobody",
        "--shell",
        "--",
        "pwd; echo $A; id -un",
    )
    assert done.stdout == "/usr\nx=y\nnobody\n"


def test_a_timeout_exits_with_124_and_says_so(cli: Cli, sandbox_id: str) -> None:
    done = cli("exec", sandbox_id, "-t", "0.5", "--", "sh", "-c", "echo before; sleep 60")
    assert (done.stdout, done.returncode) == ("before\n", 124)
    assert "timed out" in done.stderr
    assert "--timeout" in done.stderr


def test_a_signal_exits_with_128_and_its_number(cli: Cli, sandbox_id: str) -> None:
    assert cli("exec", sandbox_id, "--", "sh", "-c", "kill -9 $$").returncode == 137


def test_input_is_passed_on_only_when_asked_for(cli: Cli, sandbox_id: str) -> None:
    assert cli("exec", sandbox_id, "--", "wc", "-c", text="12345").stdout == "0\n"
    assert cli("exec", sandbox_id, "-i", "--", "wc", "-c", text="12345").stdout == "5\n"
    large = "x" * 3_000_000
    assert cli("exec", sandbox_id, "-i", "--", "wc", "-c", text=large).stdout == "3000000\n"
    assert cli("exec", sandbox_id, "-i", "--", "true", text=large).returncode == 0


def test_exec_as_json(cli: Cli, sandbox_id: str) -> None:
    done = cli("exec", sandbox_id, "--json", "--", "sh", "-c", "echo out; exit 2")
    job = json.loads(done.stdout)
    assert (job["stdout"], job["exit_code"], job["command"][0]) == ("out\n", 2, "sh")
    assert done.returncode == 2


def test_a_detached_command_goes_on(cli: Cli, served: Service, sandbox_id: str) -> None:
    done = cli("exec", sandbox_id, "-d", "--", "sleep", "300")
    with SandboxClient(served.base_url, served.api_key) as client:
        handle = client.get(sandbox_id).commands.attach(done.stdout.strip())
        assert not handle.refresh().is_complete
        handle.cancel()


def test_run_leaves_nothing(cli: Cli) -> None:
    before = cli("ps", "-q").stdout
    done = cli("run", "host", "--label", "made=by-run", "--", "sh", "-c", "echo ran; exit 5")
    assert (done.stdout, done.returncode) == ("ran\n", 5)
    assert cli("ps", "-q").stdout == before


def test_run_can_keep_its_sandbox(cli: Cli) -> None:
    done = cli("run", "host", "--keep", "--", "true")
    found = re.search(r"orchard rm (\S+)", done.stderr)
    assert found is not None
    assert cli("rm", found[1]).stdout.strip() == found[1]


def test_tunnels_of_a_new_sandbox(tmp_path: Path) -> None:
    server = Service(tmp_path / "state", arguments=("--tunnel-target", "model=http://127.0.0.1:1")).start()
    env = environment(ORCHARD_BASE_URL=server.base_url, ORCHARD_API_KEY=server.api_key or "")
    made = run_cli(
        "create", "host", "--tunnel", "8001=model", "--tunnel", "8002=model", env=env
    ).stdout.strip()
    listing = server.rest.get(f"/sandboxes/{made}/tunnels").expect(200)["tunnels"]
    assert [(each["listen_port"], each["target"]) for each in listing] == [(8001, "model"), (8002, "model")]
    ran = run_cli("run", "host", "--tunnel", "8001=model", "--", "cat", "/proc/net/tcp", env=env)
    assert f"0100007F:{8001:04X}" in ran.stdout
    refused = run_cli("create", "host", "--tunnel", "8001=other", env=env)
    assert refused.returncode == 1
    assert "use one of: model" in refused.stderr
    server.delete_all()
    assert server.stop() == 0


@pytest.mark.parametrize("value", ["model", "8001", "0=model", "x=model", "70000=model", "8001="])
def test_what_is_no_tunnel_is_a_usage_error(cli: Cli, value: str) -> None:
    done = cli("create", "host", "--tunnel", value)
    assert done.returncode == 2
    assert "PORT=NAME" in done.stderr


def test_create_ps_rm(cli: Cli) -> None:
    first = cli("create", "host", "--label", "cli=1", "--memory", "64Mi").stdout.strip()
    second = json.loads(cli("create", "host", "--label", "cli=1", "--json").stdout)["sandbox_id"]
    assert set(cli("ps", "-q", "--label", "cli=1").stdout.split()) == {first, second}
    table = cli("ps", "--label", "cli=1").stdout.splitlines()
    assert table[0].split()[:3] == ["SANDBOX", "IMAGE", "STATUS"]
    assert any(first in line and "64Mi" in line and "cli=1" in line for line in table)
    assert cli("rm", first).returncode == 0
    assert set(cli("rm", "--label", "cli=1").stdout.split()) == {second}
    assert cli("ps", "-q", "--label", "cli=1").stdout == ""
    assert {first, second} <= set(cli("ps", "-q", "--all", "--label", "cli=1").stdout.split())
    unknown = cli("rm", "never-was")
    assert unknown.returncode == 1
    assert "never-was" in unknown.stderr


def test_cp_both_ways(cli: Cli, sandbox_id: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "file").chmod(0o755)
    (tmp_path / "tree/below").mkdir(parents=True)
    (tmp_path / "tree/below/leaf").write_text("leaf")
    assert cli("cp", str(tmp_path / "file"), f"{sandbox_id}:/tmp").returncode == 0
    assert cli("cp", str(tmp_path / "tree"), f"{sandbox_id}:/tmp/renamed").returncode == 0
    out = tmp_path / "out"
    out.mkdir()
    assert cli("cp", f"{sandbox_id}:/tmp/file", str(out)).returncode == 0
    assert cli("cp", f"{sandbox_id}:/tmp/renamed", str(out / "copy")).returncode == 0
    assert (out / "file").read_text() == "content"
    assert (out / "file").stat().st_mode & 0o777 == 0o755
    assert (out / "copy/below/leaf").read_text() == "leaf"
    missing = cli("cp", f"{sandbox_id}:/tmp/nothing", str(out))
    assert missing.returncode == 1
    assert "/tmp/nothing" in missing.stderr


def test_logs(cli: Cli, sandbox_id: str) -> None:
    assert "lifecycle: ready" in cli("logs", sandbox_id).stdout
    assert json.loads(cli("logs", sandbox_id, "--json").stdout)["sandbox_id"] == sandbox_id


def test_an_error_is_one_line_for_people_and_a_body_for_programs(cli: Cli) -> None:
    done = cli("exec", "never-was", "--json", "--", "true")
    assert done.returncode == 1
    assert done.stderr.startswith("orchard: ")
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "sandbox_not_found"


def test_the_words_after_the_dashes_are_no_options_of_ours(cli: Cli, sandbox_id: str) -> None:
    assert cli("exec", sandbox_id, "--", "echo", "--json", "-h", "--", "-t").stdout == "--json -h -- -t\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["run", "host"],
        ["run", "host", "-e", "novalue", "--", "true"],
        ["exec", "some", "--shell", "--", "two", "words"],
        ["rm"],
        ["rm", "one", "--all"],
        ["cp", "here", "there"],
        ["cp", "one:/a", "two:/b"],
        ["serve", "--runtime", "docker"],
        ["serve", "--port", "many"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    done = run_cli(*arguments, env=environment())
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_key_is_told(served: Service) -> None:
    done = run_cli("ps", "--base-url", served.base_url, "--api-key", "wrong", env=environment())
    assert done.returncode == 1
    assert "key" in done.stderr


def test_no_service_is_told_with_what_to_do() -> None:
    done = run_cli("ps", "--base-url", "http://127.0.0.1:9", env=environment())
    assert done.returncode == 1
    assert "orchard serve" in done.stderr


def test_version_and_help() -> None:
    assert run_cli("--version", env=environment()).stdout.startswith("orchard ")
    for command in ("serve", "run", "create", "exec", "cp", "ps", "logs", "rm", "images", "doctor"):
        assert command in run_cli("--help", env=environment()).stdout
