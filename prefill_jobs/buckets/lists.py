"""The lists of checksums in a bucket, which are not trusted to name only files of a store."""

from __future__ import annotations

import re

from offload_decode.common.errors import StoreDamaged, StoreIncomplete, StoreNotFound
from offload_decode.prefill_jobs.buckets.bucket import CLAIM, Bucket, is_plain
from offload_decode.store.files import SEAL, SUMS, seal_of


def store_sums(bucket: Bucket) -> tuple[dict[str, str], bytes]:
    """Checksums of the store in a bucket by path, and the list as it is; an error where it is not whole."""
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
    """SHA-256 by path; StoreDamaged where a line is none, or leads out of the store's folder."""
    lines = data.decode(errors="replace").splitlines()
    found = [re.fullmatch(r"([0-9a-f]{64})  (.+)", line) for line in lines]
    sums = {match[2]: match[1] for match in found if match and is_plain(match[2])}
    if len(sums) != len(lines) or not sums:
        raise StoreDamaged(f"{SUMS} in {bucket.url} is not the list of a store: remove it and push again.")
    return sums
