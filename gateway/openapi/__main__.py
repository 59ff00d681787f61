"""``python -m gateway.openapi PAGE`` writes the document as YAML (``make docs``)."""

from __future__ import annotations

import sys
from pathlib import Path

from gateway.openapi.whole import as_yaml

if __name__ == "__main__":
    Path(sys.argv[1]).write_text(as_yaml())
