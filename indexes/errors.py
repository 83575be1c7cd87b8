"""What can go wrong in vector search.

Every message is one sentence and the way out.

    OffloadDecodeError, the root of every error here and in `offload_decode.errors`
    ├── ExtensionError          what another distribution brings cannot be used; the message names it
    └── VectorIndexError
        ├── InvalidIndexInput   a wrong shape or dtype, a value that is not finite, an option out of range
        ├── UnknownIndex        no index kind of that name; the message lists the known ones
        ├── UnusableKind        an ExtensionError too: a kind that another distribution brings
        ├── MissingBackend      the library behind a kind is not installed; the message names the extra
        ├── NotCompiled         compilation is switched off in the environment
        ├── IndexNotFound       nothing was saved at that path
        ├── IndexMismatch       a saved index of other keys, of another kind or of another format version
        ├── IndexDamaged        a saved index whose bytes are not those that were written
        └── IndexNotWritten     the file system did not take it: a full disk, a folder for reading only
"""

from __future__ import annotations


class OffloadDecodeError(Exception):
    """Base of every error that a user can cause and mend, in all rooms: this one is at the bottom."""


class ExtensionError(OffloadDecodeError):
    """An extension that cannot be used."""


class VectorIndexError(OffloadDecodeError):
    """Base of every error that `indexes` raises on purpose."""


class InvalidIndexInput(VectorIndexError):
    """Keys, queries or an option that no index can work with."""


class UnknownIndex(VectorIndexError):
    """A kind that the registry does not hold."""


class UnusableKind(ExtensionError, VectorIndexError):
    """A kind that an extension brings, and that cannot be used."""


class MissingBackend(VectorIndexError):
    """A kind whose library cannot be imported."""


class NotCompiled(VectorIndexError):
    """An environment in which the loops over rows would be interpreted."""


class IndexNotFound(VectorIndexError):
    """A path without a saved index."""


class IndexMismatch(VectorIndexError):
    """A saved index that belongs to other keys, or is of another kind or format version."""


class IndexDamaged(VectorIndexError):
    """A saved index that is truncated, incomplete or changed."""


class IndexNotWritten(VectorIndexError):
    """An index that could not be saved."""
