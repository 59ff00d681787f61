"""Who may read usage: a customer its own account's, an operator anyone's."""

from __future__ import annotations

from billing.accounts import ANALYTICS_PERMISSION, OPERATOR_PERMISSION, Principal
from gateway.auth import Authenticator
from gateway.errors import unauthenticated


async def authenticate_reader(
    authenticator: Authenticator, authorization: str | None, account_id: str
) -> Principal:
    """A caller who may read the usage of ``account_id``. Raises Refusal: 401 or 403."""
    principal = await authenticator.authenticate(authorization, "", permission=ANALYTICS_PERMISSION)
    if not may_read(principal, account_id):
        raise unauthenticated()
    return principal


def may_read(principal: Principal, account_id: str) -> bool:
    """Its own account, or any for an operator."""
    return principal.account_id == account_id or OPERATOR_PERMISSION in principal.permissions
