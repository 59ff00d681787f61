"""Answers of the plain API routes: a result in the envelope that clients of Workers AI unwrap."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from aiohttp import web

from billing.accounts import Principal
from billing.usage import new_request_id
from gateway.auth import Authenticator
from gateway.call import ray_of


class _Message(msgspec.Struct, frozen=True):
    code: int
    message: str


class _Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``result_info`` stands only where there are pages."""

    result: Any
    success: bool
    errors: list[_Message]
    messages: list[_Message]
    result_info: msgspec.Struct | None = None


def enveloped(
    result: Any, *, info: msgspec.Struct | None = None, message: tuple[int, str] | None = None
) -> web.Response:
    """200 with ``result``, which msgspec can encode, and perhaps one code and message beside it."""
    messages = [] if message is None else [_Message(*message)]
    envelope = _Envelope(result=result, success=True, errors=[], messages=messages, result_info=info)
    return bare(envelope)


def bare(result: Any) -> web.Response:
    """200 with nothing around ``result``."""
    ray = ray_of(new_request_id(time.time_ns() // 1000))
    return web.Response(
        body=msgspec.json.encode(result), content_type="application/json", headers={"cf-ray": ray}
    )


async def caller(authenticator: Authenticator, request: web.Request) -> Principal:
    """Who asks: any valid token of the account that the path names, or of any when it names none.

    Raises Refusal: 401 or 503.
    """
    account_id = request.match_info.get("account_id", request.headers.get("x-cf-account-id", ""))
    authorization = request.headers.get("authorization")
    return await authenticator.authenticate(authorization, account_id, permission="")
