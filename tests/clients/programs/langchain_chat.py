"""LangChain's OpenAI chat model: invoke, stream, tools, a structured answer, retry."""

import json
import os
import time

from langchain_openai import ChatOpenAI

BASE = f"{os.environ['EMBERGATE_URL']}/client/v4/accounts/{os.environ['EMBERGATE_ACCOUNT_ID']}/ai/v1"


def model(name: str, **options):
    return ChatOpenAI(
        model=name, base_url=BASE, api_key=os.environ["EMBERGATE_API_TOKEN"], temperature=0, **options
    )


chat = model(os.environ["MODEL"], max_tokens=8, stream_usage=True)
QUESTION = "Name a city."
SCHEMA = {
    "title": "Answer",
    "description": "A city.",
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}

seen = {}
if os.environ.get("WHAT") == "retry":
    started = time.monotonic()
    seen["answers"] = [chat.invoke(QUESTION).content for _ in range(2)]
    seen["seconds"] = time.monotonic() - started
else:
    whole = chat.invoke(QUESTION)
    seen["run"] = {"text": whole.content, "usage": whole.usage_metadata}
    pieces = list(chat.stream(QUESTION))
    usages = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    seen["stream"] = {"text": "".join(piece.content for piece in pieces), "usages": usages}
    tool = {**SCHEMA, "title": "weather"}
    bound = model(os.environ["TINY"], max_tokens=64, reasoning_effort="none").bind_tools(
        [tool], tool_choice="required", parallel_tool_calls=False
    )
    seen["tools"] = bound.invoke(QUESTION).tool_calls
    structured = model(os.environ["MODEL"], max_tokens=64)
    seen["structured"] = structured.with_structured_output(SCHEMA, method="json_schema").invoke(QUESTION)
print(json.dumps(seen))
