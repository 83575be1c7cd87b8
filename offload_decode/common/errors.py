"""The error tree, from `OffloadDecodeError`: a message is one sentence on what is wrong, and the way out."""


class OffloadDecodeError(Exception):
    """Base of every error that a user can cause and mend."""


class ExtensionError(OffloadDecodeError):
    """What another distribution brings cannot be used; the message names it."""


class VectorIndexError(OffloadDecodeError):
    """Base of every error that `indexes` raises on purpose."""


class InvalidIndexInput(VectorIndexError):
    """A wrong shape or dtype, a value that is not finite, an option out of range."""


class UnknownIndex(VectorIndexError):
    """No index kind of that name; the message lists the known ones."""


class UnusableKind(ExtensionError, VectorIndexError):
    """An extension's index kind that cannot be used."""


class MissingBackend(VectorIndexError):
    """The library behind a kind is not installed; the message names the extra."""


class NotCompiled(VectorIndexError):
    """Compilation is switched off: loops over stored rows would be interpreted."""


class IndexNotFound(VectorIndexError):
    """A path without a saved index."""


class IndexMismatch(VectorIndexError):
    """A saved index that belongs to other keys, or is of another kind or format version."""


class IndexDamaged(VectorIndexError):
    """A saved index that is truncated, incomplete or changed."""


class IndexNotWritten(VectorIndexError):
    """An index that could not be saved: a full disk, a folder for reading only."""


class OffloadDecodeWarning(UserWarning):
    """Something a user should know about a correct answer; the command line shows it as a note."""


class BucketError(OffloadDecodeError):
    """A bucket that cannot be reached, read or written."""


class ConfigError(OffloadDecodeError):
    """An option, budget or name that cannot be used."""


class ContextEnds(ConfigError):
    """A question for which, with an answer, the context of the model has no room."""


class DoesNotFit(OffloadDecodeError):
    """More memory or disk than there is, or than may be used."""


class CorpusError(OffloadDecodeError):
    """A document that cannot be read or is empty."""


class ModelError(OffloadDecodeError):
    """A model or tokenizer that cannot be loaded or used."""


class TextRefused(ModelError):
    """A text that the tokenizer fails on."""


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
