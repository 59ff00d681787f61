"""``GET .../ai/usage/{request_id}``: the signed receipt of one request; and the keys to check it with."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web
from sqlalchemy import Connection

from billing.receipt_keys import KeyRing, key_set, list_keys
from billing.receipts import Receipt, find_receipt, sign
from gateway.auth import Authenticator
from gateway.errors import Reason, Refusal
from gateway.handlers.enveloped import enveloped
from gateway.readers import authenticate_reader
from gateway.reading import UsageReader

_MAX_ID_CHARS = 200
_KEY_SET_TTL_S = 10.0


class ReceiptRoutes:
    """Receipts for whoever may read an account's usage; public keys for everybody.

    ``salt_for`` gives the salt of an account's block hashes, of which only the root that follows from it is
    shown, and to that account only.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        reader: UsageReader,
        keys: KeyRing,
        *,
        salt_for: Callable[[str], str],
        currency: str,
        clock: Callable[[], float],
    ) -> None:
        self._authenticator = authenticator
        self._reader = reader
        self._keys = keys
        self._salt_for = salt_for
        self._currency = currency
        self._clock = clock
        self._signing_key_id = ""
        self._key_set = b""
        self._key_set_expires_at = 0.0

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get("/client/v4/accounts/{account_id}/ai/usage/{request_id}", self.receipt)
        router.add_get("/.well-known/jwks.json", self.keys)

    async def receipt(self, request: web.Request) -> web.Response:
        """The signed receipt. Raises Refusal: 401, 403, or 404 for a request that is not on the books."""
        account_id, request_id = request.match_info["account_id"], request.match_info["request_id"]
        await authenticate_reader(self._authenticator, request.headers.get("authorization"), account_id)

        def find(connection: Connection) -> Receipt | None:
            return find_receipt(
                connection,
                account_id,
                request_id,
                cache_salt=self._salt_for(account_id),
                currency=self._currency,
            )

        receipt = await self._reader.read(find) if len(request_id) <= _MAX_ID_CHARS else None
        if receipt is None:
            raise Refusal(
                Reason.NOT_FOUND,
                "There is no such request on the books; one appears a moment after its answer.",
            )
        key = await self._reader.call(self._keys.signing_key)
        if key.id != self._signing_key_id:
            self._signing_key_id = key.id
            self._key_set_expires_at = 0.0  # it must be found by whoever looks it up now
        return enveloped(sign(receipt, key))

    async def keys(self, request: web.Request) -> web.Response:
        """All public keys, as a JSON Web Key Set; the signing key is there before it signs anything.

        Anybody may ask, so the database is asked every few seconds at most.
        """
        if self._clock() >= self._key_set_expires_at:
            await self._reader.call(self._keys.signing_key)
            self._key_set = msgspec.json.encode(key_set(await self._reader.read(list_keys)))
            self._key_set_expires_at = self._clock() + _KEY_SET_TTL_S
        return web.Response(
            body=self._key_set,
            content_type="application/json",
            headers={"cache-control": "public, max-age=300"},
        )
