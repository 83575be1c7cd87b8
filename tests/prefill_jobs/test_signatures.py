"""Whoever pulls with a key gets what its owner pushed under that name, or nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from offload_decode.errors import ConfigError, StoreDamaged, StoreExists, StoreUntrusted
from offload_decode.store.checksums import SEAL, SUMS, render, seal_of
from prefill_jobs import buckets
from prefill_jobs.buckets import signatures
from prefill_jobs.buckets.bucket import Bucket
from prefill_jobs.buckets.pull import pulling_path
from tests.prefill_jobs.services import clear
from tests.store.jobs import make_job, tree


def pem(key, encryption: KeySerializationEncryption | None = None) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """`a.kv` with an index beside it, `b.kv`, and the keys `own`, `own.pub`, `other` and `other.pub`."""
    clear(monkeypatch)
    for seed, name in enumerate(("a.kv", "b.kv")):
        make_job(60, seed=seed).write(tmp_path / name)
    add_index(tmp_path / "a.kv", "clusters", b"index")
    for name in ("own", "other"):
        key = Ed25519PrivateKey.generate()
        (tmp_path / name).write_bytes(pem(key))
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / f"{name}.pub").write_bytes(public)
    return tmp_path


def add_index(store: Path, kind: str, data: bytes) -> None:
    folder = store.with_name(f"{store.name}.indexes") / kind
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "layer-000-head-000.json").write_bytes(data)


def push(home: Path, store: str = "a.kv", to: str = "there/a.kv", key: str | None = "own") -> None:
    signer = signatures.signer(home / key) if key else None
    buckets.push(home / store, f"file://{home}/{to}", signer=signer)


def pull(home: Path, key: str = "own.pub", name: str = "there/a.kv") -> None:
    buckets.pull(f"file://{home}/{name}", home / "back.kv", verifier=signatures.verifier(home / key))


def refused(home: Path, match: str, **how: str) -> None:
    """Nothing is fetched, and nothing is where it could be taken for the store."""
    before = sorted(home.iterdir())
    with pytest.raises(StoreUntrusted, match=match):
        pull(home, **how)
    assert sorted(home.iterdir()) == before


def test_what_was_signed_comes_back(home: Path) -> None:
    push(home)
    pull(home)
    assert tree(home / "back.kv") == tree(home / "a.kv")
    assert tree(home / "back.kv.indexes") == tree(home / "a.kv.indexes")
    push(home)
    buckets.pull(f"file://{home}/there/a.kv", home / "unasked.kv")


def test_unsigned_or_by_another_key(home: Path) -> None:
    push(home, key=None)
    refused(home, "is not signed")
    push(home, key="other")
    refused(home, "not by this key")
    push(home)
    refused(home, "not by this key", key="other.pub")
    pull(home)


@pytest.mark.parametrize("end", [signatures.STATEMENT, signatures.SIGNATURE])
def test_a_signature_that_is_removed_cut_or_changed(home: Path, end: str) -> None:
    push(home)
    file = home / f"there/a.kv{end}"
    data = file.read_bytes()
    for other in (data[:-1], b"", bytes([data[0] ^ 1]) + data[1:], data + b"\n"):
        file.write_bytes(other)
        refused(home, "not by this key")
    file.unlink()
    refused(home, "is not signed")


def test_a_changed_file_with_checksums_that_fit(home: Path) -> None:
    push(home)
    place = home / "there/a.kv"
    file = place / "tokens/c.0"
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    sums = dict(reversed(line.split("  ")) for line in (place / SUMS).read_text().splitlines())
    sums["tokens/c.0"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (place / SUMS).write_bytes(render(sums))
    (place / SEAL).write_bytes(seal_of((place / SUMS).read_bytes()))
    refused(home, "not what was signed")


def test_a_changed_file_alone_is_met_as_it_is_fetched(home: Path) -> None:
    push(home)
    file = home / "there/a.kv/tokens/c.0"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(StoreDamaged, match="tokens/c"):
        pull(home)
    assert not (home / "back.kv").exists()


@pytest.mark.parametrize("end", ["", ".indexes"])
def test_another_store_of_the_signer_does_not_pass_for_this_one(home: Path, end: str) -> None:
    """With its own signature or with that of the store in whose place it is put."""
    push(home)
    add_index(home / "b.kv", "clusters", b"other")
    push(home, "b.kv", "there/b.kv")
    shutil.rmtree(home / f"there/a.kv{end}")
    shutil.copytree(home / f"there/b.kv{end}", home / f"there/a.kv{end}")
    refused(home, "not what was signed")
    if not end:
        shutil.rmtree(home / "there/a.kv.indexes")
        shutil.copytree(home / "there/b.kv.indexes", home / "there/a.kv.indexes")
    for signed in (signatures.STATEMENT, signatures.SIGNATURE):
        shutil.copy(home / f"there/b.kv{signed}", home / f"there/a.kv{signed}")
    refused(home, "not what was signed")


def test_indexes_that_are_taken_away_or_put_there(home: Path) -> None:
    push(home)
    (home / "there/a.kv.indexes" / SUMS).unlink()
    refused(home, "not what was signed")
    push(home, "b.kv", "there/b.kv")
    shutil.copytree(home / "a.kv.indexes", home / "there/b.kv.indexes")
    (home / "there/b.kv.indexes" / SUMS).write_bytes(
        render({"clusters/layer-000-head-000.json": hashlib.sha256(b"index").hexdigest()})
    )
    refused(home, "not what was signed", name="there/b.kv")


def test_nobody_signs_indexes_that_were_never_here(home: Path) -> None:
    push(home, key=None)
    shutil.rmtree(home / "a.kv.indexes")
    for with_others in (False, True):
        if with_others:
            add_index(home / "a.kv", "flat", b"flat")
        with pytest.raises(StoreUntrusted, match="is not signed"):
            push(home)
    assert not (home / "there/a.kv.signed").exists()
    add_index(home / "a.kv", "clusters", b"index")
    push(home)
    shutil.rmtree(home / "a.kv.indexes")
    add_index(home / "a.kv", "faiss-ivf", b"ivf")
    push(home)  # the others have this key's signature
    pull(home)
    assert {path.name for path in (home / "back.kv.indexes").iterdir()} == {"clusters", "flat", "faiss-ivf"}


@pytest.mark.parametrize("at", range(3))
def test_a_signed_push_that_was_cut_off_goes_on(home: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Of another machine, with other indexes: before, between and behind what it signs."""
    push(home)
    shutil.rmtree(home / "a.kv.indexes")
    add_index(home / "a.kv", "flat", b"flat")
    puts = iter(range(100))
    put = Bucket.put

    def cut(self: Bucket, key: str, *rest: object) -> None:
        if (".signed" in key or key.endswith(SUMS)) and next(puts) == at:
            raise KeyboardInterrupt
        put(self, key, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "put", cut)
        with pytest.raises(KeyboardInterrupt):
            push(home)
    push(home)
    pull(home)
    assert {path.name for path in (home / "back.kv.indexes").iterdir()} == {"clusters", "flat"}


def test_unsigned_indexes_of_an_unfinished_pull_do_not_stay(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(home, to="elsewhere/a.kv", key=None)
    shutil.rmtree(home / "a.kv.indexes")
    push(home)

    def cut(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["prefill_jobs.buckets.pull"], "_publish", cut)
        with pytest.raises(KeyboardInterrupt):
            buckets.pull(f"file://{home}/elsewhere/a.kv", home / "back.kv")
    assert list((home / "back.kv.indexes").rglob("*.json"))
    pull(home)
    assert not list((home / "back.kv.indexes").rglob("*.json"))


def test_a_signed_store_gets_no_unsigned_indexes(home: Path) -> None:
    push(home)
    push(home, key=None)  # nothing is new
    add_index(home / "a.kv", "flat", b"flat")
    with pytest.raises(StoreExists, match="give --sign"):
        push(home, key=None)
    pull(home)


def test_openssl_and_sha256sum_agree(home: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    push(home)
    signed = home / "there/a.kv.signed"
    check = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", home / "own.pub", "-rawin"]
    subprocess.run([*check, "-in", signed, "-sigfile", f"{signed}.sig"], check=True, capture_output=True)
    subprocess.run(["sha256sum", "-c", signed], cwd=home / "there", check=True, capture_output=True)


def test_keys_that_are_none(home: Path) -> None:
    wrong = home / "wrong"
    wrong.write_bytes(pem(Ed25519PrivateKey.generate(), BestAvailableEncryption(b"secret")))
    with pytest.raises(ConfigError, match="is encrypted"):
        signatures.signer(wrong)
    contents = [b"", b"x", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", bytes(1 << 15)]
    for content in [*contents, pem(generate_private_key(SECP256R1()))]:
        wrong.write_bytes(content)
        for read in (signatures.signer, signatures.verifier):
            with pytest.raises(ConfigError, match=r"no (private|public) Ed25519 key|too large"):
                read(wrong)
    with pytest.raises(ConfigError, match="no public Ed25519 key"):
        signatures.verifier(home / "own")
    with pytest.raises(ConfigError, match="no private Ed25519 key"):
        signatures.signer(home / "own.pub")
    os.mkfifo(home / "pipe")
    for none in (home / "pipe", home, home / "missing"):
        with pytest.raises(ConfigError, match="cannot be read"):
            signatures.verifier(none)


def test_a_signature_without_end_is_not_read(home: Path) -> None:
    push(home)
    os.truncate(home / "there/a.kv.signed", 1 << 34)
    with pytest.raises(StoreDamaged, match="more bytes"):
        pull(home)
    assert not pulling_path(home / "back.kv").exists()
