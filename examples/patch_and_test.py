"""A step of an agent that repairs code: run the test, apply a patch, run it again."""

from orchard import SandboxClient

PROGRAM = "#!/bin/sh\necho $((6 * 6))\n"
PATCH = """\
--- a/answer.sh
+++ b/answer.sh
@@ -1,2 +1,2 @@
 #!/bin/sh
-echo $((6 * 6))
+echo $((6 * 7))
"""
TEST = 'test "$(./answer.sh)" = 42 && echo passed || { echo failed; exit 1; }'


def main() -> None:
    with SandboxClient() as client, client.create("host", working_dir="/tmp") as sandbox:
        sandbox.files.write("/tmp/answer.sh", PROGRAM, mode=0o755)
        print("before:", sandbox.exec(TEST).stdout.strip())
        result = sandbox.apply_patch(PATCH)
        print("patched:", result.success)
        print("after:", sandbox.exec(TEST).stdout.strip())


if __name__ == "__main__":
    main()
