"""Object stores on loopback: moto's S3 server, and a small one that speaks Google's XML API.

Both count what they are asked, can refuse everything after the k-th request, and can take their time.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from xml.sax.saxutils import escape

import boto3
import pytest

from offload_decode.prefill_jobs.buckets.bucket import Bucket

BUCKET = "bucket"
"""The bucket of the tests on S3."""

REFUSAL = b"<Error><Code>AccessDenied</Code><Message>closed by the test SECRETKEY</Message></Error>"


class Service:
    """A WSGI application between the client and a store of objects."""

    def __init__(self, application: Any) -> None:
        self.application = application
        self.requests: list[str] = []
        self.refuse_after: int | None = None
        self.delay = 0.0
        self.port = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sent(self, method: str) -> list[str]:
        """The requests of one method, without those for lists, claims and probes."""
        hidden = ("SHA256SUMS", "PUSHING", ".probe", "list-type")
        lines = [line for line in self.requests if line.startswith(method + " ")]
        return [line for line in lines if not any(word in line for word in hidden)]

    def __call__(self, environ: Any, start_response: Any) -> Any:
        query = environ.get("QUERY_STRING", "")
        with self._lock:
            self.requests.append(
                f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}{'?' if query else ''}{query}"
            )
            refused = self.refuse_after is not None and len(self.requests) > self.refuse_after
        time.sleep(self.delay)
        if refused:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("403 Forbidden", [("Content-Length", str(len(REFUSAL)))])
            return [REFUSAL]
        return self.application(environ, start_response)


@contextmanager
def serving(application: Any) -> Iterator[Service]:
    """The application behind a `Service`, on a free port."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: Any) -> None:
            pass

    service = Service(application)
    server = make_server("127.0.0.1", 0, service, threaded=True, request_handler=Quiet)
    service.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield service
    server.shutdown()
    thread.join()


def moto() -> Any:
    """moto's S3, with nothing in it."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    return DomainDispatcherApplication(create_backend_app)


class GoogleXml:
    """As much of Google's XML API as obstore uses: objects with metadata, ranges, uploads in parts, lists."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.uploads: dict[str, tuple[dict[str, str], dict[int, bytes]]] = {}

    def __call__(self, environ: Any, start_response: Any) -> Any:
        from werkzeug.wrappers import Request, Response

        request = Request(environ)
        status, headers, body = self._answer(request)
        response = Response(body, status, headers)
        if request.method == "GET":
            response.make_conditional(request, accept_ranges=True, complete_length=len(body))
        return response(environ, start_response)

    def _answer(self, request: Any) -> tuple[str, dict[str, str], bytes]:
        _, bucket, *rest = request.path.split("/", 2)
        key, data = rest[0] if rest else "", request.get_data()
        if request.headers.get("Authorization") != "Bearer right":
            return "401 Unauthorized", {}, b"<Error><Code>AuthenticationRequired</Code></Error>"
        if bucket != self.bucket:
            return "404 Not Found", {}, b"<Error><Code>NoSuchBucket</Code></Error>"
        upload = request.args.get("uploadId")
        metadata = {name: value for name, value in request.headers if name.lower().startswith("x-goog-meta-")}
        tag = {"ETag": '"e"', "Last-Modified": "Sat, 21 Nov 2026 00:00:00 GMT", "x-goog-generation": "1"}
        if request.method == "GET" and not key:
            prefix = request.args.get("prefix", "")
            listed = "".join(
                f"<Contents><Key>{escape(name)}</Key><LastModified>2026-11-21T00:00:00.000Z</LastModified>"
                f"<Size>{len(body)}</Size><ETag>e</ETag></Contents>"
                for name, (body, _) in sorted(self.objects.items())
                if name.startswith(prefix)
            )
            return "200 OK", {}, f"<ListBucketResult>{listed}</ListBucketResult>".encode()
        if request.method == "POST" and "uploads" in request.args:
            upload = str(len(self.uploads))
            self.uploads[upload] = (metadata, {})
            name = "InitiateMultipartUploadResult"
            answer = f"<{name}><UploadId>{upload}</UploadId></{name}>"
            return "200 OK", {}, answer.encode()
        if request.method == "PUT" and upload:
            self.uploads[upload][1][int(request.args["partNumber"])] = data
            return "200 OK", tag, b""
        if request.method == "POST" and upload:
            metadata, parts = self.uploads.pop(upload)
            self.objects[key] = b"".join(parts[number] for number in sorted(parts)), metadata
            name = "CompleteMultipartUploadResult"
            return "200 OK", tag, f"<{name}><ETag>e</ETag></{name}>".encode()
        if request.method == "PUT":
            if request.headers.get("x-goog-if-generation-match") == "0" and key in self.objects:
                return "412 Precondition Failed", {}, b""
            self.objects[key] = data, metadata
            return "200 OK", tag, b""
        if key not in self.objects:
            return "404 Not Found", {}, b"<Error><Code>NoSuchKey</Code></Error>"
        if request.method == "DELETE":
            del self.objects[key]
            return "204 No Content", {}, b""
        body, metadata = self.objects[key]
        return "200 OK", tag | metadata, body


def use_s3(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Point this process, and those it starts, at an S3 service on loopback."""
    clear(monkeypatch)
    given = {"ACCESS_KEY_ID": "ACCESSKEY", "SECRET_ACCESS_KEY": "SECRETKEY", "REGION": "us-east-1"}
    given |= {"ENDPOINT_URL": endpoint, "METADATA_ENDPOINT": "http://127.0.0.1:9"}
    for name, value in given.items():
        monkeypatch.setenv(f"AWS_{name}", value)


def use_google(monkeypatch: pytest.MonkeyPatch, endpoint: str, token: str = "right") -> None:
    """The same for Google's."""
    clear(monkeypatch)
    monkeypatch.setenv("GOOGLE_BASE_URL", endpoint)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", token)


def clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of whoever runs the tests, and no proxy."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


def exists(url: str) -> bool:
    """Whether a whole store lies at `url`."""
    return Bucket(url).seal is not None


def client(service: Service):
    return boto3.client(
        "s3",
        endpoint_url=service.url,
        aws_access_key_id="x",
        aws_secret_access_key="x",
        region_name="us-east-1",
    )


def objects(service: Service, url: str) -> dict[str, bytes]:
    """The objects under a URL, by key after its name."""
    found, prefix = client(service), url.split("/", 3)[3]
    listed = found.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
    return {
        entry["Key"].removeprefix(prefix): found.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read()
        for entry in listed
    }


def spoil(service: Service, url: str, name: str) -> None:
    """Flip a bit of an object and leave the checksum that it was put with."""
    found, key = client(service), f"{url.split('/', 3)[3]}/{name}"
    was = found.get_object(Bucket=BUCKET, Key=key)
    body = bytearray(was["Body"].read())
    body[len(body) // 2] ^= 1
    found.put_object(Bucket=BUCKET, Key=key, Body=bytes(body), Metadata=was["Metadata"])
