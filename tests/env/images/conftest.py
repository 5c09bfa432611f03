"""A store with its state directory, a small machine for `host`, and a way to import bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchard.env.images import ImageRecord, ImageStore

Import = Callable[..., ImageRecord]

#: The files of a machine: programs, accounts, secrets.
_MACHINE = {
    "usr/bin/tool": "#!/bin/sh\n",
    "usr/lib/libx.so": "x",
    "usr/lib/os-release": "ID=made\n",
    "usr/local/etc/service.conf": "password = x\n",
    "usr/share/private/key": "x",
    "usr/share/doc/readme": "x",
    "etc/passwd": (
        "root:x:0:0:The Admin:/root:/bin/bash\ndaemon:x:1:1:d:/usr/sbin:/usr/sbin/nologin\n"
        "mail:x:8:8:mail:/var/mail:/usr/sbin/nologin\npostgres:x:112:120::/var/lib/postgresql:/bin/bash\n"
        "alice:x:1000:1000:Alice A.:/home/alice:/bin/zsh\n"
    ),
    "etc/group": "root:x:0:\ndaemon:x:1:alice\nusers:x:100:alice\npostgres:x:120:\nalice:x:1000:\n",
    "etc/shadow": "root:$6$hash:1::::::\n",
    "etc/hosts": "10.0.0.7 database.internal\n",
    "etc/nsswitch.conf": "passwd: files ldap\n",
    "etc/services": "http 80/tcp\n",
    "etc/profile": "PATH=/usr/bin\n",
    "etc/profile.d/lang.sh": "export LANG=C\n",
    "etc/profile.d/deploy.sh": "export DEPLOY_TOKEN=abc\n",
    "etc/profile.d/proxy.sh": "export https_proxy=http://me:pw@proxy:3128\n",
    "etc/ssl/openssl.cnf": "# input_password = secret\n[req]\n",
    "etc/ssl/certs/ca.pem": "-----BEGIN CERTIFICATE-----\n",
    "etc/ssl/certs/server.pem": "-----BEGIN RSA PRIVATE KEY-----\n",
    "etc/ssl/private/server.key": "x",
    "etc/myservice/config": "token",
    "etc/skel/.bashrc": "alias ll='ls -l'\n",
    "etc/skel/.netrc": "machine x login y password z\n",
    "home/alice/.ssh/id": "x",
    "root/.bashrc": "x",
    "opt/service/data": "x",
    "var/lib/service/data": "x",
}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The root of a machine with merged /usr, some programs, accounts and secrets."""
    root = tmp_path / "machine"
    for name, text in _MACHINE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name in ("bin", "lib"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc/shadow").chmod(0o640)
    (root / "etc/alternatives").mkdir()
    (root / "etc/alternatives/tool").symlink_to("/usr/bin/tool")
    (root / "etc/alternatives/outside").symlink_to("/opt/service/tool")
    (root / "etc/os-release").symlink_to("../usr/lib/os-release")
    (root / "etc/ssl/certs/linked.pem").symlink_to("ca.pem")
    (root / "etc/ssl/certs/stolen.pem").symlink_to("../private/server.key")
    (root / "usr/share/private").chmod(0o750)
    (root / "usr/bin/admin-only").write_text("x")
    (root / "usr/bin/admin-only").chmod(0o700)
    return root


@pytest.fixture
def store(state: Path, machine: Path) -> ImageStore:
    return ImageStore(state / "images", durable=False, machine=machine)


@pytest.fixture
def add(store: ImageStore, tmp_path: Path) -> Import:
    """Write an archive's bytes to a file and import it."""

    def add(
        archive: bytes, name: str | None = None, *, file_name: str = "archive.tar", **more: Any
    ) -> ImageRecord:
        path = tmp_path / file_name
        path.write_bytes(archive)
        return store.import_archive(path, name, **more)

    return add


@pytest.fixture
def files(store: ImageStore) -> Callable[[str], Path]:
    """The directory of a flattened image's files."""

    def files(ref: str) -> Path:
        (layer,) = store.resolve(ref).layers
        return layer

    return files
