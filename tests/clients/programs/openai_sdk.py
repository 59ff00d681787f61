"""OpenAI's Python SDK: run, stream, list, tools, retry."""

import json
import os
import time

import openai

MODEL, TINY = os.environ["MODEL"], os.environ["TINY"]
BASE = f"{os.environ['EMBERGATE_URL']}/client/v4/accounts/{os.environ['EMBERGATE_ACCOUNT_ID']}/ai/v1"
OPTIONS = {"api_key": os.environ["EMBERGATE_API_TOKEN"], "base_url": BASE}
ASK = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Name a city."}],
    "max_tokens": 8,
    "temperature": 0,
}

client = openai.OpenAI(**OPTIONS)
seen = {}
if os.environ.get("WHAT") == "retry":
    started = time.monotonic()
    seen["answers"] = [client.chat.completions.create(**ASK).to_dict() for _ in range(2)]
    seen["seconds"] = time.monotonic() - started
    try:
        openai.OpenAI(**OPTIONS, max_retries=0).chat.completions.create(**ASK)
    except openai.RateLimitError as error:
        seen["refusal"] = {"name": type(error).__name__, "status": error.status_code}
else:
    seen["run"] = client.chat.completions.create(**ASK).to_dict()
    stream = client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    seen["chunks"] = [chunk.to_dict() for chunk in stream]
    seen["models"] = [model.id for model in client.models.list()]
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    called = client.chat.completions.create(
        **ASK | {"model": TINY, "max_tokens": 64},
        tools=[{"type": "function", "function": {"name": "weather", "parameters": parameters}}],
        tool_choice="required",
        reasoning_effort="none",
        parallel_tool_calls=False,
    )
    seen["tool"] = called.choices[0].to_dict()
    try:
        client.chat.completions.create(**ASK | {"model": "nobody"})
    except openai.BadRequestError as error:
        seen["refusal"] = {"name": type(error).__name__, "status": error.status_code}
print(json.dumps(seen))
