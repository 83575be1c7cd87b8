"""The error tree: one sentence that says what is wrong, and the way out.

    OffloadDecodeError
    ├── ExtensionError            what another distribution brings cannot be used; the message names it
    ├── VectorIndexError          anything about an index
    │   ├── InvalidIndexInput     a wrong shape or dtype, a value that is not finite, an option out of range
    │   ├── UnknownIndex          no index kind of that name; the message lists the known ones
    │   ├── UnusableKind          an ExtensionError too: a kind that another distribution brings
    │   ├── MissingBackend        the library behind a kind is not installed; the message names the extra
    │   ├── NotCompiled           compilation is switched off in the environment
    │   ├── IndexNotFound         nothing was saved at that path
    │   ├── IndexMismatch         a saved index of other keys, of another kind or of another format version
    │   ├── IndexDamaged          a saved index whose bytes are not those that were written
    │   └── IndexNotWritten       the file system did not take it: a full disk, a folder for reading only
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


class OffloadDecodeError(Exception):
    """Base of every error that a user can cause and mend."""


class ExtensionError(OffloadDecodeError):
    """An extension that cannot be used."""


class VectorIndexError(OffloadDecodeError):
    """Base of every error that `indexes` raises on purpose."""


class InvalidIndexInput(VectorIndexError):
    """Keys, queries or an option that no index can work with."""


class UnknownIndex(VectorIndexError):
    """No index kind of that name."""


class UnusableKind(ExtensionError, VectorIndexError):
    """An extension's index kind that cannot be used."""


class MissingBackend(VectorIndexError):
    """A kind whose library cannot be imported."""


class NotCompiled(VectorIndexError):
    """Compilation is switched off: loops over stored rows would be interpreted."""


class IndexNotFound(VectorIndexError):
    """A path without a saved index."""


class IndexMismatch(VectorIndexError):
    """A saved index that belongs to other keys, or is of another kind or format version."""


class IndexDamaged(VectorIndexError):
    """A saved index that is truncated, incomplete or changed."""


class IndexNotWritten(VectorIndexError):
    """An index that could not be saved."""


class OffloadDecodeWarning(UserWarning):
    """Something a user should know about a correct answer; the command line shows it as a note."""


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
