"""Errors of the object store as one sentence each, which never repeats what the service said.

Its answers may hold access keys and signed URLs.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from offload_decode.common.errors import BucketError, OffloadDecodeError

PREFIX = {"s3": "AWS_", "gs": "GOOGLE_"}
"""How the environment variables of a service begin."""
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
}
_ENDPOINT = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL"}
# What obstore's text shows, in the order in which it is looked for.
_NO_BUCKET = "<Code>NoSuchBucket"
_NO_CREDENTIALS = r"169\.254\.|metadata\.google|api/token|[Tt]oken ?[Rr]equest|[Cc]redential error|OpenCred"
_REFUSED = r"PermissionDenied|Unauthenticated|<Code>(AccessDenied|ExpiredToken|InvalidAccessKeyId|Signature)"
_UNREACHABLE = r"error sending request|kind: (Connect|Request|Timeout|Interrupted|Decode)|TimedOut"


@contextmanager
def surfaced(url: str) -> Iterator[None]:
    """What obstore raises, as BucketError; errors of this project pass."""
    try:
        yield
    except OffloadDecodeError:
        raise
    except BaseException as error:
        # A panic of the Rust below is no Exception: settings that nobody can use end there.
        builtin = isinstance(error, OSError | ValueError | NotImplementedError)
        if not builtin and not type(error).__module__.startswith(("obstore", "pyo3_runtime")):
            raise
        raise BucketError(_sentence(url, error)) from None


def no_bucket(error: BaseException) -> bool:
    """Whether what was not found is the bucket itself."""
    return _NO_BUCKET in str(error)


def _sentence(url: str, error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    scheme = url.partition("://")[0]
    found = re.search(r"<Code>(\w+)</Code>", text) or re.search(r"status code: (\d+)", text)
    code = f" ({found[1]})" if found else ""
    if no_bucket(error):
        return f"There is no bucket for {url}: create it first, or mend the URL."
    if re.search("redirect|Redirect", text):
        return f"The bucket of {url} is in another region: set AWS_REGION to it."
    if re.search(_NO_CREDENTIALS, text):
        return f"No credentials that work for {url} were found: set {_CREDENTIALS[scheme]}."
    if number := _errno(error, text):
        full = number in (errno.ENOSPC, errno.EDQUOT)
        way_out = "free some space" if full else "mend this"
        return f"{url} cannot be used ({os.strerror(number)}): {way_out} and run it again to go on."
    if re.search(_REFUSED, text):
        return (
            f"Access to {url} was refused{code}: check {_CREDENTIALS[scheme]}, and that they may list, read, "
            "write and delete there."
        )
    if "Generic Config error" in text:
        return f"One of the {PREFIX[scheme]}… variables cannot be used: mend it, or unset it."
    if "BadScheme" in text:
        return f"The endpoint of {url} is plain http: use https, or set {PREFIX[scheme]}ALLOW_HTTP=true."
    if re.search(_UNREACHABLE, text):
        return (
            f"The service of {url} is out of reach or went away: check the network and {_ENDPOINT[scheme]}, "
            "and run it again to go on."
        )
    if isinstance(error, FileNotFoundError):
        return f"An object of {url} is gone: run it again."
    return f"The service of {url} failed{code}: run it again to go on."


def _errno(error: BaseException, text: str) -> int | None:
    """The error number of a file system, wherever it stands."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    found = None if "HttpError" in text else re.search(r"\(os error (\d+)\)", text)
    return int(found[1]) if found else None
