"""An image that would run its own code inside the agent, if the agent let it.

Modules lie wherever the service's Python and its own code live on the machine; the C library's plug-ins (name
service, character conversion, preloads) are shared objects whose constructor leaves a file behind.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.support.images import busybox_tree

MARK_DIR = "/poison"

_MODULE = f"""
import os as _os
try:
    _os.close(_os.open("{MARK_DIR}/" + __name__ + "." + str(_os.getpid()), _os.O_CREAT | _os.O_WRONLY))
except Exception:
    pass
"""

_LIBRARY = f"""
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void poisoned(void) {{
    char path[64];
    snprintf(path, sizeof path, "{MARK_DIR}/library.%d", (int)getpid());
    close(open(path, O_CREAT | O_WRONLY, 0666));
}}
"""

_NSSWITCH = "".join(
    f"{database}: evil files\n"
    for database in ("passwd", "group", "shadow", "hosts", "networks", "services", "protocols")
)


def library(path: Path) -> Path:
    """A shared object whose constructor leaves a file in MARK_DIR."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise AssertionError(
            "a C compiler is needed to build the poisoned libraries: apt-get install gcc libc6-dev"
        )
    source = path.with_suffix(".c")
    source.write_text(_LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(path), str(source)], check=True)
    source.unlink()
    return path


def _inside(root: Path, path: str | Path) -> Path:
    return root / str(path).lstrip("/")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(text)


def _module_folders() -> set[str]:
    """Every directory from which the service's Python could import, and that of its own code."""
    listed = subprocess.run(
        [sys.executable, "-c", "import sys,orchard.env.agent as a; print(*sys.path, *a.__path__, sep='\\n')"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    folders = {line for line in listed.stdout.split("\n") if line.startswith("/")}
    paths = sysconfig.get_paths()
    folders |= {paths["stdlib"], paths["platstdlib"], paths["purelib"]}
    return folders | {str(Path(paths["stdlib"]) / "lib-dynload")}


def _poison_modules(root: Path, shared_object: Path) -> None:
    names = sorted(sys.stdlib_module_names)
    encodings = [p.stem for p in (Path(sysconfig.get_paths()["stdlib"]) / "encodings").glob("*.py")]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for folder in _module_folders():
        here = _inside(root, folder)
        for name in names:
            _write(here / f"{name}.py", _MODULE)
        for name in (
            "encodings",
            "json",
            "logging",
            "asyncio",
            "collections",
            "ctypes",
            "importlib",
            "email",
        ):
            (here / f"{name}.py").unlink(missing_ok=True)
            _write(here / name / "__init__.py", _MODULE)
        for name in encodings:
            _write(here / "encodings" / f"{name}.py", _MODULE)
        for name in ("sitecustomize", "usercustomize", "site"):
            _write(here / f"{name}.py", _MODULE)
        for name in (
            "_ctypes",
            "_socket",
            "_json",
            "_struct",
            "_hashlib",
            "grp",
            "_posixsubprocess",
            "fcntl",
            "select",
        ):
            shutil.copy(shared_object, here / f"{name}{suffix}")
    agent = Path(subprocess.run(
        [sys.executable, "-c", "import orchard; print(orchard.__file__)"], capture_output=True, text=True, check=True
    ).stdout.strip()).parent  # fmt: skip
    for source in agent.rglob("*.py"):
        _write(_inside(root, source), _MODULE)


def _poison_libraries(root: Path, shared_object: Path) -> None:
    triplet = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    for folder in ("lib", "lib64", "usr/lib", "usr/lib64", f"lib/{triplet}", f"usr/lib/{triplet}"):
        for service in ("evil", "files", "compat", "dns", "db", "systemd", "myhostname", "resolve"):
            target = root / folder / f"libnss_{service}.so.2"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(shared_object, target)
        for name in ("libgcc_s.so.1", "libdl.so.2", "libm.so.6", "libffi.so.8", "libssl.so.3", "libcrypto.so.3",
                     "libz.so.1", "libpthread.so.0", "libresolv.so.2", "libnss_evil.so"):  # fmt: skip
            shutil.copy(shared_object, root / folder / name)
        conversions = root / folder / "gconv"
        conversions.mkdir(exist_ok=True)
        for name in ("UTF-16", "UTF-32", "ISO8859-1", "UNICODE"):
            shutil.copy(shared_object, conversions / f"{name}.so")
        (conversions / "gconv-modules").write_text("module ISO-8859-1// INTERNAL ISO8859-1 1\n")
    (root / "etc/nsswitch.conf").write_text(_NSSWITCH)
    (root / "etc/ld.so.preload").write_text("/lib/libnss_evil.so.2\n")


def poisoned_tree(root: Path, scratch: Path) -> Path:
    """A busybox image with all of it."""
    busybox_tree(root)
    (root / MARK_DIR.lstrip("/")).mkdir()
    (root / MARK_DIR.lstrip("/")).chmod(0o1777)
    shared_object = library(scratch / "poison.so")
    _poison_modules(root, shared_object)
    _poison_libraries(root, shared_object)
    return root
