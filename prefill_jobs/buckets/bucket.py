"""The objects of a store in a bucket, and its lists of checksums, which are not trusted to name only files of
a store. The only file that knows obstore.

Configured by the environment variables that obstore reads (`AWS_*`, `GOOGLE_*`); see docs/buckets.md. An
error becomes one sentence that never repeats what the service said: its answers may hold access keys and
signed URLs.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast
from urllib.parse import unquote, urlsplit

from offload_decode.common.errors import (
    BucketError,
    ConfigError,
    DoesNotFit,
    OffloadDecodeError,
    StoreDamaged,
    StoreIncomplete,
    StoreNotFound,
)
from offload_decode.common.memory import room
from offload_decode.store.files import LARGEST_LIST, SEAL, SUMS, seal_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

PART = 8 * 1024 * 1024
"""Bytes of one request of a large object; a smaller object is one request."""
PARTS_AT_ONCE = 2
"""Requests in flight for one object; several objects are on their way at once."""
LEAST_ROOM = 64 * 1024 * 1024
"""Bytes for the stacks of obstore's threads: without them it hangs."""
MOST_PARTS = 10_000
"""S3's limit for one object."""
CLAIM = "PUSHING"

_SCHEMES = ("s3", "gs", "file")
_ENDPOINT = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL"}  # what messages name
_PREFIX = {"s3": "AWS_", "gs": "GOOGLE_"}  # of a service's environment variables
_ENDPOINTS = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"), "gs": ("GOOGLE_BASE_URL",)}
_HTTP = "allow_http", "allow_invalid_certificates", "connect_timeout", "timeout", "proxy_url", "user_agent"
_SHA256 = "sha256"
_CREDENTIALS = {"s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "gs": "GOOGLE_APPLICATION_CREDENTIALS"}
# Patterns in obstore's messages, in the order of the search.
_NO_BUCKET = "<Code>NoSuchBucket"
_NO_CREDENTIALS = r"169\.254\.|metadata\.google|api/token|[Tt]oken ?[Rr]equest|[Cc]redential error|OpenCred"
_REFUSED = r"PermissionDenied|Unauthenticated|<Code>(AccessDenied|ExpiredToken|InvalidAccessKeyId|Signature)"
_UNREACHABLE = r"error sending request|kind: (Connect|Request|Timeout|Interrupted|Decode)|TimedOut"


def is_url(text: str) -> bool:
    """Whether `text` is the URL of a bucket and not a path."""
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme in _SCHEMES


class Found(NamedTuple):
    """An object: its bytes, and a version that no earlier object of its key had."""

    size: int
    version: str


class Bucket:
    """The objects under one URL; keys are `name` (the store) or `name.indexes`, a slash, and a file's path.

    The first request fails within seconds where the bucket cannot be used; later ones are retried for
    minutes. Raises `BucketError`, `DoesNotFit` where memory is limited to too little, and `ConfigError` for a
    wrong URL or installation.
    """

    def __init__(self, url: str) -> None:
        scheme, host, self.name = _parse(url)
        self.url = url.rstrip("/")
        self.indexes = self.name + ".indexes"
        self.folder = Path("/", self.name) if scheme == "file" else None
        self._obstore = _obstore()
        left = room()
        if left is not None and left < LEAST_ROOM:
            raise DoesNotFit(
                f"a bucket needs {LEAST_ROOM >> 20} MiB of memory, and the limit of this process leaves it "
                f"{max(0, left) >> 20} MiB: raise --ram or the limit (ulimit -d)"
            )
        with self._errors():
            self._store = self._connect(scheme, host, hurried=True)
        self.seal = self.read(f"{self.name}/{SEAL}")
        """The content of SHA256SUMS.sha256, which is there when the store is complete."""
        with self._errors():
            self._store = self._connect(scheme, host, hurried=False)

    def objects(self, folder: str) -> dict[str, int]:
        """Bytes of every object under `folder`, by path in it."""
        with self._errors():
            found = [entry for batch in self._obstore.list(self._store, prefix=folder) for entry in batch]
        return {entry["path"][len(folder) + 1 :]: entry["size"] for entry in found}

    def folders(self, folder: str) -> list[str]:
        with self._errors():
            found: list[str] = self._obstore.list_with_delimiter(self._store, folder)["common_prefixes"]
            return sorted(found)

    def found(self, key: str) -> Found | None:
        head = self._answer(lambda: self._obstore.head(self._store, self._plain(key)))
        return head and Found(head["size"], head["e_tag"] or str(head["last_modified"]))

    def read(self, key: str) -> bytes | None:
        """All of a small object; None where there is none."""

        def get() -> bytes:
            found = self._obstore.get(self._store, self._plain(key))
            if found.meta["size"] > LARGEST_LIST:
                raise StoreDamaged(
                    f"{key} in {self.url} has more bytes than a store needs: remove it and push again."
                )
            return bytes(found.bytes())

        return self._answer(get)

    def fetch(self, key: str, size: int, path: Path, seen: Callable[[int], None]) -> str:
        """Write an object to a new file: the hex SHA-256 of its bytes. `seen` gets the size of each part."""
        digest = hashlib.sha256()
        with open(path, "xb") as file:
            for start in range(0, size, PART):
                end = min(start + PART, size)
                with self._errors():
                    found = self._obstore.get_range(self._store, self._plain(key), start=start, end=end)
                part = memoryview(found)
                digest.update(part)
                file.write(part)
                seen(len(part))
        return digest.hexdigest()

    def put(self, key: str, data: bytes | Iterator[bytes], sha256: str, size: int) -> None:
        """Put an object of `size` bytes, with its checksum as an attribute where the service has them."""
        attributes = None if self.folder else {_SHA256: sha256}
        part = max(PART, -(-size // MOST_PARTS))
        with self._errors():
            self._obstore.put(
                self._store, key, data, attributes=attributes, chunk_size=part, max_concurrency=PARTS_AT_ONCE
            )

    def create(self, key: str, data: bytes) -> bool:
        """Put an object where there is none, atomically; whether that was done."""
        with self._errors():
            try:
                self._obstore.put(self._store, key, data, mode="create")
            except self._obstore.exceptions.AlreadyExistsError:
                return False
            return True

    def remove(self, key: str) -> None:
        self._answer(lambda: self._obstore.delete(self._store, key))

    def digest(self, key: str) -> str | None:
        """The hex SHA-256 that an object was put with; a file's is computed. None where it is unknown."""
        if self.folder:
            with self._errors(), open(Path("/", self._plain(key)), "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        head = self._answer(lambda: self._obstore.get(self._store, key, options={"head": True}))
        found = head and head.attributes.get(_SHA256)
        return found if isinstance(found, str) else None

    def _answer(self, ask: Callable[[], T]) -> T | None:
        """None where there is no such object."""
        with self._errors():
            try:
                return ask()
            except FileNotFoundError as error:
                if _NO_BUCKET in str(error):  # it is the bucket itself that was not found
                    raise
                return None

    def _plain(self, key: str) -> str:
        """The key; `StoreDamaged` where anything but a regular file, as a pipe, has that name in a folder."""
        path = Path("/", key)
        if self.folder and os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise StoreDamaged(f"{path} is not a plain file: remove it and push again.")
        return key

    def _connect(self, scheme: str, host: str, hurried: bool) -> ObjectStore:
        if scheme == "file":
            return cast("ObjectStore", self._obstore.store.LocalStore("/"))
        # obstore's default of 30 s a request is too short for a part on a slow line.
        options: dict[str, Any] = {"timeout": timedelta(minutes=5)}
        for name in _HTTP:
            if (value := os.environ.get(_PREFIX[scheme] + name.upper())) is not None:
                options[name] = value
        if _loopback(scheme):
            options["allow_http"] = True
        retries: dict[str, Any] = {}
        if hurried:
            options["timeout"] = timedelta(seconds=10)
            retries = {"max_retries": 1, "retry_timeout": timedelta(seconds=10)}
        url, from_url = f"{scheme}://{host}", self._obstore.store.from_url
        return cast("ObjectStore", from_url(url, client_options=options, retry_config=retries))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """What obstore raises, as BucketError; errors of this project pass."""
        try:
            yield
        except OffloadDecodeError:
            raise
        except BaseException as error:
            # A panic in obstore's Rust is no Exception: unusable settings end there.
            builtin = isinstance(error, OSError | ValueError | NotImplementedError)
            if not builtin and not type(error).__module__.startswith(("obstore", "pyo3_runtime")):
                raise
            raise BucketError(_sentence(self.url, error)) from None


def store_sums(bucket: Bucket) -> tuple[dict[str, str], bytes]:
    """Checksums of a store in a bucket by path, and the list itself. Raises where it is not complete."""
    if bucket.seal is None:
        there = bucket.objects(bucket.name)
        if CLAIM in there:
            raise StoreIncomplete(f"The push to {bucket.url} has not finished: run it again to go on.")
        raise StoreNotFound(
            f"There is no store at {bucket.url}: make one with `offload-decode push`, or mend the URL."
        )
    data = bucket.read(f"{bucket.name}/{SUMS}")
    if data is None or seal_of(data) != bucket.seal:
        raise StoreDamaged(
            f"{SUMS} and {SEAL} in {bucket.url} do not belong together: remove both and push the store again."
        )
    return parse_sums(bucket, data), data


def parse_sums(bucket: Bucket, data: bytes) -> dict[str, str]:
    """SHA-256 by path; `StoreDamaged` for an invalid line, or a path out of the store's folder."""
    lines = data.decode(errors="replace").splitlines()
    found = [re.fullmatch(r"([0-9a-f]{64})  (.+)", line) for line in lines]
    sums = {match[2]: match[1] for match in found if match and is_plain(match[2])}
    if len(sums) != len(lines) or not sums:
        raise StoreDamaged(f"{SUMS} in {bucket.url} is not the list of a store: remove it and push again.")
    return sums


def _parse(url: str) -> tuple[str, str, str]:
    """Scheme, bucket and key of a URL. It may hold secrets, and so no message repeats it."""
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES:
        raise ConfigError(
            f"{url!r} is not the URL of a store: give s3://BUCKET/NAME, gs://BUCKET/NAME or file:///FOLDER/NAME"
        )
    host, _, name = rest.partition("/")
    name = name.rstrip("/")
    if scheme == "file":
        name, host_is_right = unquote(name), host in ("", "localhost")
        wanted = "file:///FOLDER/NAME, with the whole path"
    else:
        host_is_right = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]+", host) is not None
        wanted = f"{scheme}://BUCKET/NAME: a bucket, and the store's name in it"
    if not host_is_right or not is_plain(name):
        raise ConfigError(f"the URL of a store is {wanted}")
    return scheme, host, name


def is_plain(path: str) -> bool:
    """Whether `path` only leads downwards."""
    parts = path.split("/")
    printable = path.isprintable() and "\\" not in path
    return printable and not {"", ".", ".."} & {*parts} and str(PurePosixPath(path)) == path


def _loopback(scheme: str) -> bool:
    """Whether the endpoint is this machine, where plain HTTP is safe."""
    variable = next((name for name in _ENDPOINTS[scheme] if name in os.environ), None)
    if variable is None:
        return False
    try:
        found = urlsplit(os.environ[variable])
        usable = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{variable} is not http://HOST:PORT or https://HOST: mend it, or unset it")
    return found.hostname in ("127.0.0.1", "::1", "localhost")


def _obstore() -> Any:
    try:
        for name in ("exceptions", "store"):
            importlib.import_module(f"obstore.{name}")
        return importlib.import_module("obstore")
    except ImportError as error:
        raise ConfigError(
            f"buckets need obstore, which cannot be imported ({error}): pip install 'offload-decode[buckets]'"
        ) from error


def _sentence(url: str, error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    scheme = url.partition("://")[0]
    found = re.search(r"<Code>(\w+)</Code>", text) or re.search(r"status code: (\d+)", text)
    code = f" ({found[1]})" if found else ""
    if _NO_BUCKET in text:
        return f"There is no bucket for {url}: create it first, or mend the URL."
    credentials, endpoint, prefix = (names.get(scheme, "") for names in (_CREDENTIALS, _ENDPOINT, _PREFIX))
    if re.search("[Rr]edirect", text):
        return f"The bucket of {url} is in another region: set AWS_REGION to it."
    if re.search(_NO_CREDENTIALS, text):
        return f"No credentials that work for {url} were found: set {credentials}."
    if number := _errno(error, text):
        full = number in (errno.ENOSPC, errno.EDQUOT)
        way_out = "free some space" if full else "mend this"
        return f"{url} cannot be used ({os.strerror(number)}): {way_out} and run it again to go on."
    sentences = {
        _REFUSED: f"Access to {url} was refused{code}: check {credentials}, and that they may list, read, "
        "write and delete there.",
        "Generic Config error": f"One of the {prefix}… variables cannot be used: mend it, or unset it.",
        "BadScheme": f"The endpoint of {url} is plain http: use https, or set {prefix}ALLOW_HTTP=true.",
        _UNREACHABLE: f"The service of {url} is out of reach or went away: check the network and {endpoint}, "
        "and run it again to go on.",
    }
    for pattern, sentence in sentences.items():
        if re.search(pattern, text):
            return sentence
    if isinstance(error, FileNotFoundError):
        return f"An object of {url} is gone: run it again."
    return f"The service of {url} failed{code}: run it again to go on."


def _errno(error: BaseException, text: str) -> int | None:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    found = None if "HttpError" in text else re.search(r"\(os error (\d+)\)", text)
    return int(found[1]) if found else None
