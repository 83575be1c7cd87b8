"""Who pushed a store or a collection: its lists, by name, signed with Ed25519; alone imports cryptography.

URL.signed        the statement: the SHA-256 of NAME/SHA256SUMS and of NAME.indexes/SHA256SUMS; of a
                  collection that of its lists, and of those two of each of its stores
URL.signed.sig    64 bytes, which `openssl pkeyutl -verify -rawin` checks too

The name is in the statement, so that of a signer's stores none is taken for another.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from indexes.plain_files import NotPlain, open_plain
from offload_decode.errors import ConfigError, StoreUntrusted
from offload_decode.store.checksums import SUMS, render
from prefill_jobs.buckets.bucket import Bucket
from prefill_jobs.buckets.lists import parse_sums

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

STATEMENT, SIGNATURE = ".signed", ".signed.sig"
_LARGEST_KEY = 1 << 14


class Signer:
    """Signs with a private key. verifier: of the public key that belongs to it."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key, self.verifier = key, Verifier(key.public_key())

    def sign(self, bucket: Bucket, sums: bytes, index_sums: bytes | None) -> None:
        """Put a statement of these lists of checksums beside the store, and its signature."""
        self.sign_all(bucket, _digests(bucket, sums, index_sums))

    def sign_all(self, bucket: Bucket, digests: Mapping[str, str]) -> None:
        """Put a statement of these SHA-256, by path from the folder that holds what lies at the URL."""
        said = render(digests)
        for end, data in ((STATEMENT, said), (SIGNATURE, self._key.sign(said))):
            bucket.put(bucket.name + end, data, hashlib.sha256(data).hexdigest(), len(data))


class Checks(Protocol):
    """What knows what was signed."""

    def check(self, bucket: Bucket, sums: bytes, index_sums: bytes | None) -> None:
        """`StoreUntrusted` unless these lists of checksums were signed of the store in this bucket."""


class Verifier:
    """Checks with a public key."""

    def __init__(self, key: Ed25519PublicKey) -> None:
        self._key = key

    def check(self, bucket: Bucket, sums: bytes, index_sums: bytes | None) -> None:
        """`StoreUntrusted` unless the key signed that a store of this name has these lists of checksums."""
        check_said(bucket, self.said(bucket), _digests(bucket, sums, index_sums))

    def said(self, bucket: Bucket) -> dict[str, str]:
        """SHA-256 by path that the key signed of what lies at the URL. Raises `StoreUntrusted`."""
        from cryptography.exceptions import InvalidSignature

        said, signature = (bucket.read(bucket.name + end) for end in (STATEMENT, SIGNATURE))
        if said is None or signature is None:
            raise StoreUntrusted(
                f"{bucket.url} is not signed: have it pushed again with --sign, or pull without --verify if "
                "you trust everybody who may write there."
            )
        try:
            self._key.verify(signature, said)
        except InvalidSignature as error:
            raise StoreUntrusted(
                f"The signature of {bucket.url} is not by this key: ask its owner for the right one, or do "
                "not use the store."
            ) from error
        return parse_sums(bucket, said)

    def signed(self, bucket: Bucket, sums: bytes, index_sums: bytes | None) -> bool:
        """Whether the signature there is the key's, and of these lists, whatever the statement beside it
        says: of a push that was cut off, one of the two may be older.
        """
        from cryptography.exceptions import InvalidSignature

        signature = bucket.read(bucket.name + SIGNATURE)
        if signature is None:
            return False
        try:
            self._key.verify(signature, render(_digests(bucket, sums, index_sums)))
        except InvalidSignature:
            return False
        return True


def signer(path: Path) -> Signer:
    """Of the private key in a PEM file. Raises `ConfigError`."""
    data = _read(path)
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(data, password=None)
    except TypeError as error:  # so it says that a password is missing
        raise ConfigError(
            f"{path} is encrypted: decrypt it where nobody else reads, `openssl pkey -in {path} -out KEY`"
        ) from error
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            f"{path} is no private Ed25519 key in PEM: make one with "
            "`openssl genpkey -algorithm ed25519 -out KEY`"
        )
    return Signer(key)


def verifier(path: Path) -> Verifier:
    """Of the public key in a PEM file. Raises `ConfigError`."""
    data = _read(path)
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(
            f"{path} is no public Ed25519 key in PEM: whoever signed has it from "
            "`openssl pkey -in KEY -pubout -out KEY.pub`"
        )
    return Verifier(key)


def is_signed(bucket: Bucket) -> bool:
    """Whether anybody's statement lies beside the store."""
    return bucket.read(bucket.name + STATEMENT) is not None


def check_said(bucket: Bucket, said: Mapping[str, str], found: Mapping[str, str]) -> None:
    """`StoreUntrusted` unless what was said is what was found."""
    if said != found:
        raise StoreUntrusted(
            f"What lies at {bucket.url} is not what was signed: its name, its files or its indexes are "
            "others. Have it pushed again with --sign, or do not use it."
        )


def name_of(bucket: Bucket) -> str:
    """What lies at the URL is called so in statements."""
    return bucket.name.rpartition("/")[2]


def _digests(bucket: Bucket, sums: bytes, index_sums: bytes | None) -> dict[str, str]:
    """Lines of `sha256sum`, which can be checked from the folder that holds the store."""
    return digests_at(name_of(bucket), sums, index_sums)


def digests_at(store: str, sums: bytes, index_sums: bytes | None) -> dict[str, str]:
    """SHA-256 of the lists of checksums of a store and of its indexes, by path."""
    lists = {f"{store}/{SUMS}": sums} | ({f"{store}.indexes/{SUMS}": index_sums} if index_sums else {})
    return {path: hashlib.sha256(data).hexdigest() for path, data in lists.items()}


def _read(path: Path) -> bytes:
    """A key, where there is something to use it with."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"signatures need cryptography, which cannot be imported ({error}): "
            "pip install 'offload-decode[signatures]'"
        ) from error
    try:
        with os.fdopen(open_plain(path, follow=True), "rb") as file:
            data = file.read(_LARGEST_KEY + 1)
    except (NotPlain, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"the key {path} cannot be read ({reason}): give the file of a key") from error
    if len(data) > _LARGEST_KEY:
        raise ConfigError(f"{path} is too large for a key: give the file of a key")
    return data
