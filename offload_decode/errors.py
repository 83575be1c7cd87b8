"""The error tree: one sentence that says what is wrong, and the way out.

    OffloadDecodeError            (from `offload_decode.indexes.errors`, which stands below this room)
    ├── VectorIndexError          anything about an index: `offload_decode.indexes.errors` draws that branch
    ├── ExtensionError            what another distribution brings cannot be used (from `indexes.errors` too)
    ├── BucketError               a bucket that cannot be reached, read or written
    ├── ConfigError               an option, budget or name that cannot be used
    ├── DoesNotFit                more memory or disk than there is, or than may be used
    ├── CorpusError               a document that cannot be read or is empty
    ├── ModelError                a model or tokenizer that cannot be loaded or used
    │   └── UnsupportedModel      an architecture that cannot be served exactly, by name
    └── StoreError                anything about a KV store on disk
        ├── StoreNotFound         nothing there
        ├── StoreExists           something is there already
        ├── StoreIncomplete       a prefill has not finished
        ├── StoreForeign          not a store, or of a format version this release cannot read
        ├── StoreDamaged          truncated, changed or missing bytes
        ├── StoreBusy             another process writes it
        └── StoreMismatch         of another model, tokenizer or configuration

`OffloadDecodeWarning` is no error.
"""

from __future__ import annotations

from offload_decode.indexes.errors import ExtensionError as ExtensionError
from offload_decode.indexes.errors import OffloadDecodeError as OffloadDecodeError


class OffloadDecodeWarning(UserWarning):
    """What a user should know though the answer is right; the command line shows it as a note."""


class BucketError(OffloadDecodeError):
    """A bucket that cannot be reached, read or written."""


class ConfigError(OffloadDecodeError):
    """An option, budget or name that cannot be used."""


class DoesNotFit(OffloadDecodeError):
    """More memory or disk than there is, or than may be used."""


class CorpusError(OffloadDecodeError):
    """A document that cannot be read or is empty."""


class ModelError(OffloadDecodeError):
    """A model or tokenizer that cannot be loaded or used."""


class UnsupportedModel(ModelError):
    """An architecture that cannot be served exactly."""


class StoreError(OffloadDecodeError):
    """Anything about a KV store on disk."""


class StoreNotFound(StoreError):
    """There is no store at the path."""


class StoreExists(StoreError):
    """The path is taken."""


class StoreIncomplete(StoreError):
    """A prefill has not finished."""


class StoreForeign(StoreError):
    """Not a store, or of a format version this release cannot read."""


class StoreDamaged(StoreError):
    """Bytes are truncated, changed or missing."""


class StoreBusy(StoreError):
    """Another process writes this store."""


class StoreMismatch(StoreError):
    """The store belongs to another model, tokenizer or configuration."""
