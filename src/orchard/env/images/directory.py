"""Images of the kind `dir:PATH`: a directory of this machine, used in place as the root file system."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from orchard.env.errors import Forbidden, ImageNotFound, PathInvalid
from orchard.env.images.model import ResolvedImage

_KERNEL_TREES = ("/proc", "/sys", "/dev")


class DirectoryImages:
    """Resolves them. private: the service's own state, which no sandbox may see. allowed: where they may lie;
    None means anywhere else."""

    def __init__(self, private: tuple[Path, ...], allowed: tuple[Path, ...] | None) -> None:
        self._private = private
        self._allowed = allowed

    def resolve(self, ref: str, text: str) -> ResolvedImage:
        """The image at the path `text`; its digest names the directory, not what is in it, which may change.

        Raises ImageNotFound, PathInvalid, Forbidden.
        """
        path = Path(text)
        if not path.is_absolute() or ".." in path.parts or "\0" in text:
            raise PathInvalid(f"{ref!r}: give an absolute path without `..`, such as `dir:/srv/rootfs`.")
        try:
            real = path.resolve(strict=True)
            info = real.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise ImageNotFound(
                f"{ref!r}: there is no directory {text!r} on the service's machine."
            ) from None
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
            raise PathInvalid(f"{ref!r} cannot be used: {error}.") from error
        self._refuse(ref, real)
        if not stat.S_ISDIR(info.st_mode):
            raise PathInvalid(f"{ref!r} is no directory; archives are imported with `orchard images import`.")
        identity = f"dir:{real}:{info.st_dev}:{info.st_ino}"
        digest = hashlib.sha256(os.fsencode(identity)).hexdigest()
        return ResolvedImage(ref=ref, digest=f"sha256:{digest}", layers=(real,))

    def _refuse(self, ref: str, real: Path) -> None:
        if self._allowed is not None and not any(real.is_relative_to(each) for each in self._allowed):
            raise Forbidden(
                f"{ref!r}: the operator of this service does not allow images from that directory."
            )
        if real == Path("/"):
            raise PathInvalid(
                f"{ref!r} is this whole machine; use the image `host` for its system directories."
            )
        for state in {each.resolve() for each in self._private}:
            if state.is_relative_to(real) or real.is_relative_to(state):
                raise PathInvalid(
                    f"{ref!r} overlaps the service's own state in {str(state)!r}: sandboxes would see each other. "
                    f"Copy the root file system elsewhere."
                )
        if any(real.is_relative_to(each) for each in _KERNEL_TREES):
            raise PathInvalid(f"{ref!r} lies in a file system of the kernel, which cannot be an image.")
