"""The keys that receipts are signed with: Ed25519, replaced at will, none ever forgotten.

The private key is a file of mode 600 in the installation's secrets. Public keys are kept in the database, old
ones too, so that a receipt can be checked for as long as there are books. A key's id is its thumbprint
(RFC 7638), so that it cannot name another key.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from sqlalchemy import Connection, select

from billing.money_schema import receipt_keys
from billing.store import Store

SIGNATURE_ALGORITHM = "Ed25519"
KEY_FILE = "receipt_signing_key.pem"


class ReceiptKeyError(ValueError):
    """A key that cannot be used; the message names the file."""


class PublicKey(msgspec.Struct, frozen=True, kw_only=True):
    """A public key as the database has it."""

    id: str
    public_key: bytes
    created_at_us: int


class SigningKey:
    """A private key and its id."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public_bytes = private.public_key().public_bytes(
            serialization.Encoding.Raw, serialization.PublicFormat.Raw
        )
        self.id = key_id_of(self.public_bytes)

    @classmethod
    def generate(cls) -> SigningKey:
        return cls(Ed25519PrivateKey.generate())

    def sign(self, message: bytes) -> str:
        """The signature in base64url without padding."""
        return _base64url(self._private.sign(message))

    def to_pem(self) -> bytes:
        return self._private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


class KeyRing:
    """The signing key of an installation, and the public keys of all times. Thread-safe."""

    def __init__(
        self,
        store: Store,
        secrets_dir: Path,
        clock: Callable[[], int] = lambda: time.time_ns() // 1_000,
    ) -> None:
        """``clock`` returns UTC microseconds."""
        self._store = store
        self._path = secrets_dir / KEY_FILE
        self._clock = clock
        self._lock = threading.Lock()
        self._known: tuple[int, SigningKey] | None = None

    def signing_key(self) -> SigningKey:
        """The key to sign with now: made on first use, read again after it was replaced. Blocking.

        Raises:
            StoreError: its public half could not be put where it will be looked for.
            ReceiptKeyError, OSError: the file cannot be read or written.
        """
        with self._lock:
            if not self._path.exists():
                _create(self._path, SigningKey.generate(), replaces=False)
            stamp = self._path.stat().st_mtime_ns
            if self._known is None or self._known[0] != stamp:
                key = _read(self._path)
                self._register(key)
                self._known = (stamp, key)
            return self._known[1]

    def replace(self) -> SigningKey:
        """Sign with a new key from now on; what the old one signed stays valid. Raises as above."""
        key = SigningKey.generate()
        with self._lock:
            self._register(key)  # first: nothing is signed with a key that nobody can look up
            _create(self._path, key, replaces=True)
            self._known = None
        return key

    def _register(self, key: SigningKey) -> None:
        row = {"id": key.id, "public_key": key.public_bytes, "created_at_us": self._clock()}
        with self._store.writing() as connection:
            if connection.scalar(select(receipt_keys.c.id).where(receipt_keys.c.id == key.id)) is None:
                connection.execute(receipt_keys.insert(), row)


def list_keys(connection: Connection) -> list[PublicKey]:
    """All public keys, oldest first."""
    query = select(receipt_keys).order_by(receipt_keys.c.created_at_us, receipt_keys.c.id)
    return [PublicKey(**row._mapping) for row in connection.execute(query)]


def key_set(keys: list[PublicKey]) -> dict[str, Any]:
    """The keys as a JSON Web Key Set (RFC 7517, RFC 8037)."""
    return {
        "keys": [
            {
                "kty": "OKP",
                "crv": "Ed25519",
                "use": "sig",
                "alg": "EdDSA",
                "kid": key.id,
                "x": _base64url(key.public_key),
            }
            for key in keys
        ]
    }


def read_key_set(document: Any) -> dict[str, bytes]:
    """Public keys by id out of a key set. Raises ReceiptKeyError."""
    try:
        found = {}
        for key in document["keys"]:
            if key.get("kty") == "OKP" and key.get("crv") == "Ed25519":
                public_bytes = _from_base64url(key["x"])
                found[key_id_of(public_bytes)] = public_bytes
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ReceiptKeyError("this is no JSON Web Key Set") from None
    return found


def key_id_of(public_bytes: bytes) -> str:
    """The thumbprint of a public key."""
    members = {"crv": "Ed25519", "kty": "OKP", "x": _base64url(public_bytes)}
    return _base64url(hashlib.sha256(json.dumps(members, separators=(",", ":")).encode()).digest())


def is_signature_of(message: bytes, signature: str, public_bytes: bytes) -> bool:
    """Whether the key made this signature (base64url) of the message."""
    try:
        Ed25519PublicKey.from_public_bytes(public_bytes).verify(_from_base64url(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _read(path: Path) -> SigningKey:
    try:
        private = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except ValueError as error:
        raise ReceiptKeyError(f"{path} holds no private key: {error}") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise ReceiptKeyError(f"{path} holds no Ed25519 key")
    return SigningKey(private)


def _create(path: Path, key: SigningKey, *, replaces: bool) -> None:
    """Write the file whole or not at all; without ``replaces`` the first of several writers wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key.to_pem())
            file.flush()
            os.fsync(file.fileno())
        if replaces:
            draft.replace(path)
        else:
            os.link(draft, path)
    except FileExistsError:
        return
    finally:
        draft.unlink(missing_ok=True)


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _from_base64url(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
