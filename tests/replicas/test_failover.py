"""The SDK with the addresses of two services, one of which is killed."""

from __future__ import annotations

import threading

from orchard import SandboxClient
from tests.support.replicas import Replicas
from tests.support.waiting import eventually


def test_a_client_of_both_sees_a_command_through_the_death_of_one(pair: Replicas) -> None:
    first, second = pair.services
    with SandboxClient(f"{first.base_url},{second.base_url}", first.api_key) as client:
        sandbox = client.create("host")
        jobs = []
        thread = threading.Thread(
            target=lambda: jobs.append(sandbox.exec("echo ran >> /tmp/ran; sleep 2; echo through"))
        )
        thread.start()
        eventually(lambda: sandbox.files.list("/tmp") and sandbox.files.stat("/tmp/ran"), "it runs")
        first.kill()
        thread.join(60)
        assert jobs[0].stdout == "through\n"
        assert sandbox.files.read_text("/tmp/ran") == "ran\n"
        handle = sandbox.commands.start("sleep 1; echo again; sleep 1", background=False)
        first.start()
        second.kill()
        assert b"".join(chunk.data for chunk in handle.stream()) == b"again\n"
        sandbox.delete()
