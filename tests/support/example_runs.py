"""Runs the example agents as their readers do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

from embergate.dev_account import DevAccount
from tests.support.installation import ROOT

DIFF = """--- a/kernels/scale.py
+++ b/kernels/scale.py
@@ -1,3 +1,3 @@
 def scale(values, factor):
-    return [value * factor for value in values]
+    return [value / factor for value in values]
"""


def run_example(account: DevAccount, program: str, *options: str, stdin: str = "") -> tuple[Any, str]:
    """What a program of ``examples/`` prints, as JSON, and what it says on standard error."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / program), *options],
        env={
            "EMBERGATE_URL": account.url,
            "EMBERGATE_ACCOUNT_ID": account.account_id,
            "EMBERGATE_API_TOKEN": account.api_token,
            "PATH": os.environ["PATH"],
        },
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def billed(errors: str) -> dict[str, float]:
    """The numbers of a bill that was printed."""
    patterns = {
        "num_requests": r"^(\d+) requests:",
        "cached_percent": r"([\d.]+)% of them cached",
        "cost": r"^  cost +\$([\d.]+)$",
        "saved": r"^  saved by caching +\$([\d.]+) ",
        "elsewhere": r"^  on Kimi K2.5 on Workers AI +\$([\d.]+)$",
    }
    found = {name: re.search(pattern, errors, re.MULTILINE) for name, pattern in patterns.items()}
    assert all(found.values()), errors
    return {name: float(match[1]) for name, match in found.items() if match}
