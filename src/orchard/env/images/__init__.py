"""Images on this machine: import, list, resolve, remove."""

from orchard.env.images.model import ImageMount, ResolvedImage
from orchard.env.images.record import ImageRecord
from orchard.env.images.store import ImageStore

__all__ = ["ImageMount", "ImageRecord", "ImageStore", "ResolvedImage"]
