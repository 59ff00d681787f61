"""Two turns of one conversation: the second finds the first in the prefix cache, and costs less.

Run it with what ``make up`` wrote: ``set -a; . .embergate/dev.env; set +a; python3 examples/two_turns.py``.
Nothing but the standard library is needed.
"""

import json
import os
import time
import urllib.request
from typing import Any

ACCOUNT_URL = f"{os.environ['EMBERGATE_URL']}/client/v4/accounts/{os.environ['EMBERGATE_ACCOUNT_ID']}"
NOTES = """\
Start with `make up DETACH=1` or `embergate up --detach`. Ask for the state with `embergate status`, and
follow what happens with `embergate logs --follow`. Stop with `embergate down`.

A stop drains: the gateway takes no more requests and finishes those in flight within its grace, then the
replicas stop. A second Ctrl-C kills at once. One supervisor runs for each data directory. If it is
killed, its processes stop by themselves; whatever is left is stopped by the next start.

A process that dies is started again after a pause, which doubles with each death. Requests go to the
other replica meanwhile. A request whose replica died before its first byte is tried on the next; one that
was under way ends with an error, never with half an answer that looks whole.

A load balancer asks the gateway whether it is ready. Metrics have the names that dashboards for such
systems already use, and labels are bounded. Logs are one JSON object a line: the request, the account,
the model, counts of tokens and times, and never a prompt or a token of the API.

The ledger is a database and a journal of usage records that were not posted yet. The audit proves at any
time that each record has one transaction, that entries sum to zero, and that prices are right."""
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
