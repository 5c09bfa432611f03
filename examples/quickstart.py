"""The README's example: ORCHARD_BASE_URL and ORCHARD_API_KEY say where the service is."""

from orchard import SandboxClient

with SandboxClient() as client, client.create("host", memory="512Mi") as sandbox:
    sandbox.files.write("/tmp/poem.txt", "one apple\ntwo pears\n")
    job = sandbox.exec("wc -l < /tmp/poem.txt", timeout_s=10)
    print(job.exit_code, job.stdout.strip())
    print(sandbox.exec(["cat", "/tmp/poem.txt"]).stdout.splitlines()[-1])

    stuck = sandbox.exec("echo before; sleep 300 & wait", timeout_s=1)
    print(stuck.timed_out, stuck.stdout.strip())
