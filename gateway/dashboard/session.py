"""Who is signed in, in signed cookies: only sessions that were ended are kept on the server.

The session cookie holds an id, the SHA-256 of the API token and when it was made. Token and id are looked up
with every page, so one that is revoked is signed out within seconds, and so is a copy of a cookie when its
owner signs out. Forms carry a signed value that must equal a cookie's, and a post that a browser says comes
from another site is refused before that.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping

import msgspec
from aiohttp import web
from itsdangerous import BadSignature, URLSafeTimedSerializer

SESSION_COOKIE = "embergate_session"
FORM_COOKIE = "embergate_form"
FORM_FIELD = "form_token"

_PATH = "/dashboard"
_FORM_TTL_S = 86_400
_HASH_BYTES = 32


class Session(msgspec.Struct, frozen=True):
    """Somebody who signed in, and the hash of the API token that was shown."""

    id: str
    token_hash: bytes


class Sessions:
    """Makes and checks the cookies. Immutable; ``secret`` is shared by all gateways of one installation."""

    def __init__(self, secret: str, *, ttl_s: int, is_secure: bool) -> None:
        """``is_secure``: only over HTTPS."""
        self.ttl_s = ttl_s
        self._is_secure = is_secure
        self._sessions = _serializer(secret, "session")
        self._forms = _serializer(secret, "form")

    def begin(self, response: web.StreamResponse, token_hash: bytes) -> None:
        """Sign in whoever gets ``response``."""
        value = self._sessions.dumps([secrets.token_urlsafe(16), urlsafe_b64encode(token_hash).decode()])
        self._set(response, SESSION_COOKIE, value, self.ttl_s)

    def end(self, response: web.StreamResponse) -> None:
        """Forget the cookie; see :mod:`billing.sign_outs` for copies of it."""
        response.del_cookie(SESSION_COOKIE, path=_PATH)

    def session(self, cookies: Mapping[str, str]) -> Session | None:
        """The session of a valid cookie, None without one. Whether it was ended, the caller looks up."""
        try:
            session_id, text = self._sessions.loads(cookies.get(SESSION_COOKIE, ""), max_age=self.ttl_s)
            token_hash = urlsafe_b64decode(text)
        except (BadSignature, ValueError, TypeError):
            return None
        return Session(session_id, token_hash) if len(token_hash) == _HASH_BYTES else None

    def form_token(self, cookies: Mapping[str, str]) -> str:
        """The value for a page's forms; give it to :meth:`set_form_token` as well."""
        known = cookies.get(FORM_COOKIE, "")
        return known if self._is_form_token(known) else self._forms.dumps(secrets.token_urlsafe(16))

    def set_form_token(self, response: web.StreamResponse, form_token: str) -> None:
        """Let ``response``'s forms be posted."""
        self._set(response, FORM_COOKIE, form_token, _FORM_TTL_S)

    def is_own_form(self, request: web.Request, field: str) -> bool:
        """Whether a post comes from a page of ours."""
        site = request.headers.get("sec-fetch-site", "same-origin")
        origin = request.headers.get("origin", "")
        if site not in ("same-origin", "none") or (origin and origin.partition("://")[2] != request.host):
            return False
        cookie = request.cookies.get(FORM_COOKIE, "")
        return hmac.compare_digest(cookie.encode(), field.encode()) and self._is_form_token(cookie)

    def _is_form_token(self, value: str) -> bool:
        try:
            self._forms.loads(value, max_age=_FORM_TTL_S)
        except BadSignature:
            return False
        return True

    def _set(self, response: web.StreamResponse, name: str, value: str, max_age_s: int) -> None:
        response.set_cookie(
            name,
            value,
            max_age=max_age_s,
            path=_PATH,
            secure=self._is_secure,
            httponly=True,
            samesite="Strict",
        )


def _serializer(secret: str, purpose: str) -> URLSafeTimedSerializer:
    return URLSafeTimedSerializer(
        secret, salt=f"embergate dashboard {purpose} v1", signer_kwargs={"digest_method": hashlib.sha256}
    )
