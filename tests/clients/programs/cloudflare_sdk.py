"""The official Python SDK: run, stream, list, schema, verify, retry."""

import json
import os
import time

import cloudflare

MODEL, ACCOUNT = os.environ["MODEL"], os.environ["EMBERGATE_ACCOUNT_ID"]
OPTIONS = {
    "api_token": os.environ["EMBERGATE_API_TOKEN"],
    "base_url": f"{os.environ['EMBERGATE_URL']}/client/v4",
}
MESSAGES = [{"role": "user", "content": "Name a city."}]

client = cloudflare.Cloudflare(**OPTIONS)


def run(which: cloudflare.Cloudflare = client, model: str = MODEL, max_tokens: int = 8):
    return which.ai.run(model, account_id=ACCOUNT, messages=MESSAGES, max_tokens=max_tokens)


def refusal(error: cloudflare.APIStatusError):
    errors = [{"code": each.code, "message": each.message} for each in error.errors]
    return {"name": type(error).__name__, "status": error.status_code, "errors": errors}


seen = {}
if os.environ.get("WHAT") == "retry":
    started = time.monotonic()
    seen["answers"] = [run(max_tokens=4), run(max_tokens=4)]
    seen["seconds"] = time.monotonic() - started
    try:
        run(cloudflare.Cloudflare(**OPTIONS, max_retries=0))
    except cloudflare.RateLimitError as error:
        seen["refusal"] = refusal(error)
else:
    seen["run"] = run()
    with client.ai.with_streaming_response.run(
        MODEL, account_id=ACCOUNT, messages=MESSAGES, max_tokens=8, stream=True
    ) as response:
        seen["contentType"] = response.headers["content-type"]
        seen["stream"] = response.read().decode()
    seen["models"] = [model["name"] for model in client.ai.models.list(account_id=ACCOUNT, per_page=1)]
    seen["schema"] = client.ai.models.schema.get(account_id=ACCOUNT, model=MODEL).to_dict()
    seen["tasks"] = [task["name"] for task in client.ai.tasks.list(account_id=ACCOUNT)]
    seen["authors"] = [author["name"] for author in client.ai.authors.list(account_id=ACCOUNT)]
    seen["token"] = client.user.tokens.verify().to_dict()
    seen["accountToken"] = client.accounts.tokens.verify(account_id=ACCOUNT).to_dict()
    seen["accounts"] = [account.id for account in client.accounts.list()]
    supported = client.ai.to_markdown.supported(account_id=ACCOUNT)
    seen["supported"] = [each.extension for each in supported]
    try:
        run(model="@cf/nobody/nothing")
    except cloudflare.BadRequestError as error:
        seen["refusal"] = refusal(error)
print(json.dumps(seen))
