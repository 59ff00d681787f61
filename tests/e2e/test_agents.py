"""The example agents on the embedded model, which calls no tools: valid reviews, and what they cost."""

from __future__ import annotations

import pytest

from tests.support.example_runs import DIFF, billed, run_example
from tests.support.installation import Installation

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.slow]

SMALL = ("--max-files", "3", "--max-prefix-chars", "1200", "--max-file-chars", "200", "--max-tokens", "300")


def test_a_code_review_reads_for_a_model_that_cannot(installation: Installation) -> None:
    options = ("--max-file-chars", "300", "--max-tokens", "900")
    review, errors = run_example(installation.account, "code_review.py", *options, stdin=DIFF)
    assert review["verdict"] in ("approve", "comment", "request_changes")
    assert all(finding["file"] == "kernels/scale.py" for finding in review["findings"])
    bill = billed(errors)
    assert bill["num_requests"] == 1
    assert 0 < bill["cost"] < bill["elsewhere"]


def test_a_security_review_live_and_over_night(installation: Installation) -> None:
    live, errors = run_example(installation.account, "security_review.py", *SMALL)
    night, _ = run_example(installation.account, "security_review.py", "--batch", "--poll-s", "0.5", *SMALL)
    for run in (live, night):
        assert list(run["files"]) == list(live["files"])
        assert all(report["risk"] in ("none", "low", "medium", "high") for report in run["files"].values())
        assert run["bill"]["num_requests"] == 3
    assert billed(errors)["saved"] > 0
    assert live["bill"]["num_cached"] > live["bill"]["num_input"] / 2
    # A batch costs half: what was live a moment ago is even cached now.
    assert night["bill"]["undiscounted"] < 0.75 * live["bill"]["undiscounted"]
