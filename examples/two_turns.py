"""Two turns of one conversation: the second finds the first in the prefix cache, and costs less.

Run it with what ``make up`` wrote: ``set -a; . .embergate/dev.env; set +a; python3 examples/two_turns.py``.
Nothing but the standard library is needed.
"""

import json
import os
import time
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT_URL = f"{os.environ['EMBERGATE_URL']}/client/v4/accounts/{os.environ['EMBERGATE_ACCOUNT_ID']}"
NOTES = (Path(__file__).parents[1] / "docs" / "operations.md").read_text()[:1500]
QUESTIONS = ("In one sentence: what does a stop do?", "And what happens to a process that dies?")


def ask(messages: list[dict[str, str]]) -> Any:
    """The completion of one turn; every turn of this run belongs to one session."""
    body = {"model": "@cf/moonshotai/kimi-k2.5", "messages": messages, "max_tokens": 60, "temperature": 0}
    request = urllib.request.Request(
        f"{ACCOUNT_URL}/ai/v1/chat/completions",
        json.dumps(body).encode(),
        {
            "authorization": f"Bearer {os.environ['EMBERGATE_API_TOKEN']}",
            "content-type": "application/json",
            "x-session-affinity": f"ses_{os.getpid()}",
        },
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


messages = [{"role": "system", "content": f"Answer briefly, from these notes:\n\n{NOTES}"}]
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    started = time.perf_counter()
    completion = ask(messages)
    seconds = time.perf_counter() - started
    answer = completion["choices"][0]["message"]["content"]
    messages.append({"role": "assistant", "content": answer})
    usage = completion["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    print(f"> {question}\n{answer}")
    print(f"  prompt {usage['prompt_tokens']} tokens, {cached} of them cached; answer", end=" ")
    print(f"{usage['completion_tokens']} tokens; {usage['neurons']} neurons; {seconds:.2f} s\n")
