"""ZIP archives of XML parts, which most office formats are: bounded before they are unpacked, and parsed
without what XML may pull in or multiply (external files, entities).
"""

from __future__ import annotations

import io
import posixpath
import zipfile
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents import base

if TYPE_CHECKING:
    from lxml.etree import _Element

MAX_PARTS = 100_000
MAX_XML = 64 << 20
"""Bytes of a part that is XML: parsed, it takes up to thirty times as much."""


class Link(NamedTuple):
    """A relationship of Office Open XML: the last word of its type, and the part that it leads to."""

    kind: str
    part: str


class Archive:
    """The parts of a document. Raises `CorpusError` where they unpack to more than `base.MAX_SIZE`, and what
    zipfile and lxml raise for damaged ones.
    """

    def __init__(self, data: bytes) -> None:
        self._file = zipfile.ZipFile(io.BytesIO(data))
        parts = self._file.infolist()
        if len(parts) > MAX_PARTS:
            raise CorpusError(f"it is an archive of more than {MAX_PARTS:,} files")
        if sum(part.file_size for part in parts) > base.MAX_SIZE:
            raise CorpusError(f"it unpacks to more than {base.MAX_SIZE >> 20} MiB")

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self._file.namelist())

    def read(self, name: str) -> bytes:
        """A part; zipfile stops at the size that the archive states."""
        return self._file.read(name)

    def xml(self, name: str) -> _Element:
        """The root of a part that is XML. Raises `CorpusError` beyond `MAX_XML`, and as `parse`."""
        if self._file.getinfo(name).file_size > MAX_XML:
            raise CorpusError(f"it holds a part of more than {MAX_XML >> 20} MiB of XML")
        return parse(self.read(name))

    def links(self, part: str) -> dict[str, Link]:
        """The relationships of a part (of the archive itself: of `""`) by their ids; those that lead out of
        the archive, or to nothing in it, are left out.
        """
        folder, name = posixpath.split(part)
        listed = posixpath.join(folder, "_rels", f"{name}.rels")
        found = {}
        for one in self.xml(listed).iter("{*}Relationship") if listed in self.names else ():
            target = posixpath.normpath(posixpath.join("/", folder, unquote(one.get("Target", ""))))[1:]
            if target in self.names:
                found[one.get("Id", "")] = Link(posixpath.basename(one.get("Type", "")), target)
        return found


def parse(data: bytes) -> _Element:
    """The root of an XML document. Raises `CorpusError` for one with entities of its own."""
    from lxml import etree

    root = etree.fromstring(data, etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False))
    declared = root.getroottree().docinfo.internalDTD
    if declared is not None and any(True for _ in declared.iterentities()):
        raise CorpusError("it is XML that declares entities")
    return root
