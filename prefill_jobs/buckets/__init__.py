"""Stores, and collections of them, in buckets: the same tree of objects under a URL as of files in a folder.

URL/…                     the files of the store; SHA256SUMS, then SHA256SUMS.sha256 are put last
URL/PUSHING               while a push is at work: the seal of the store that is pushed
URL.indexes/KIND/…        the indexes beside the store
URL.indexes/SHA256SUMS    their checksums, put when all of them are there
"""

from offload_decode.prefill_jobs.buckets.bucket import is_url
from offload_decode.prefill_jobs.buckets.stores import check_writable, pull, push
from offload_decode.prefill_jobs.buckets.transfer import Transfer

__all__ = ["Transfer", "check_writable", "is_url", "pull", "push"]
