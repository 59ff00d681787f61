"""All parts together, as the gateway serves them and as ``docs/openapi.yaml`` shows them."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.openapi import batches, inference, operating, reading
from gateway.openapi.document import build_document

_PARTS = (inference, reading, batches, operating)
_HEAD = "# Written by `make docs` from gateway/openapi; edit that.\n"


def whole_document() -> dict[str, Any]:
    """The document as plain data."""
    return build_document(operation for part in _PARTS for operation in part.operations())


def as_yaml() -> str:
    """The document as people read it."""
    return _HEAD + msgspec.yaml.encode(whole_document()).decode()
