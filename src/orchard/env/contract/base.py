"""What all models of the contract share: names, limits, kinds of text and numbers."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

API_VERSION = "1.0"
VERSION_HEADER = "X-Orchard-Version"
KEY_HEADER = "X-API-Key"
REQUEST_ID_HEADER = "X-Request-ID"
DEFAULT_READY_TIMEOUT_S = 600.0
DEFAULT_COMMAND_TIMEOUT_S = 600.0
DEFAULT_TTL_S = 24 * 3600.0
DEFAULT_MAX_OUTPUT_BYTES = 1 << 20
FINISHED_JOB_RETENTION_S = 3600.0
#: Files through the JSON endpoints; the agent moves them in chunks, but JSON holds them whole.
MAX_JSON_FILE_BYTES = 256 << 20
_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
_ID_HINT = "use 1 to 63 of a-z, 0-9 and '-', beginning and ending with a letter or digit"


def valid_id(value: str) -> str:
    """`value` if it is a valid client-chosen id, else ValueError."""
    if not _ID.match(value):
        raise ValueError(f"invalid id {value!r:.80}: {_ID_HINT}")
    return value


def field_of(loc: tuple[str | int, ...]) -> str:
    """The field that a validation problem is about, as its user knows it: without the kinds that it may have."""
    return ".".join(
        str(step) for step in loc if not re.search(r"[^\w-]", str(step)) and step not in ("str", "list")
    )


_SUFFIX = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
}  # fmt: skip


def parse_cpu(value: str) -> float:
    """Cores from a Kubernetes quantity: "2" → 2.0, "500m" → 0.5. ValueError if malformed or not positive."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(m?)", value)
    if not match:
        raise ValueError(f"invalid cpu {value!r:.40}: write cores as '2' or '0.5', or thousandths as '500m'")
    cores = float(match[1]) / (1000 if match[2] else 1)
    if cores < 0.01:
        raise ValueError(f"invalid cpu {value!r:.40}: at least 10m")
    return cores


def parse_bytes(value: str) -> int:
    """Bytes from a Kubernetes quantity: "8Gi" → 8 · 2³⁰, "500M" → 5 · 10⁸. ValueError if malformed."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?", value)
    if not match:
        raise ValueError(f"invalid size {value!r:.40}: write bytes as '8Gi', '512Mi', '1G' or a plain number")
    size = int(float(match[1]) * _SUFFIX[match[2] or ""])
    if size < 1:
        raise ValueError(f"invalid size {value!r:.40}: at least one byte")
    return size


def _quantity(parse: Any) -> Any:
    def check(value: str) -> str:
        parse(value)
        return value

    return check


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


SandboxId = Annotated[str, AfterValidator(valid_id)]
JobId = Annotated[str, AfterValidator(valid_id)]
Cpu = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(_quantity(parse_cpu))]
Size = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(_quantity(parse_bytes))]


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not contain a NUL byte")
    return value


Text = Annotated[str, AfterValidator(_no_nul)]
Seconds = Annotated[float, Field(gt=0, le=365 * 24 * 3600, allow_inf_nan=False)]


def _env(value: dict[str, str]) -> dict[str, str]:
    for name in value:
        if not name or "=" in name:
            raise ValueError(f"invalid environment name {name!r:.80}: it must be non-empty and hold no '='")
    return value


Env = Annotated[dict[Text, Text], AfterValidator(_env)]


def _labels(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,126}[A-Za-z0-9])?", name) or len(text) > 256:
            raise ValueError(
                f"invalid label {name!r:.80}: names are 1 to 128 of letters, digits, '_', '.', '/', '-'; values up to 256"
            )
    return value


Labels = Annotated[dict[str, Text], Field(max_length=64), AfterValidator(_labels)]


def decode_base64(value: str) -> bytes:
    """Bytes from strict base64; ValueError names the position-free reason."""
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"not valid base64: {error}") from None


def _base64(value: str) -> str:
    decode_base64(value)
    return value


Base64 = Annotated[str, AfterValidator(_base64)]


class Request(BaseModel):
    # Strict: true is not 1 and "5" is not 5; what a client got wrong is told, not guessed.
    model_config = ConfigDict(extra="forbid", strict=True)


class Answer(BaseModel):
    model_config = ConfigDict(extra="ignore")
