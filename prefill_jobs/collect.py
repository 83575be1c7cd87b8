"""A folder of texts, and JSONL metadata, to a collection: a store for each new or changed document."""

import hashlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from offload_decode.collections.collection import Changing, Header, store_name
from offload_decode.collections.journal import Entry, Value, check_metadata
from offload_decode.collections.words import WORDS, Words
from offload_decode.common import files
from offload_decode.common.errors import (
    ConfigError,
    CorpusError,
    DoesNotFit,
    StoreDamaged,
    StoreError,
    StoreMismatch,
    VectorIndexError,
)
from offload_decode.kv.indexes import kind_folders, saved_kinds
from offload_decode.prefill_jobs.buckets.transfer import Watch
from offload_decode.prefill_jobs.continuing import opened
from offload_decode.prefill_jobs.corpus import Note, TextDocument, notes_on, nothing_in
from offload_decode.prefill_jobs.destinations import Place
from offload_decode.prefill_jobs.documents.files import read_plain
from offload_decode.prefill_jobs.documents.reading import read_document
from offload_decode.prefill_jobs.folders import EVERYTHING, Rules, Skipped, Walk, check_corpus, clean
from offload_decode.prefill_jobs.indexing import publish_indexes
from offload_decode.prefill_jobs.job import Maker, Settings, make, prepare, settled
from offload_decode.store.layout import ROOT
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import Committed, partial_path

Metadata = Mapping[str, Mapping[str, Value]]
"""Metadata of documents, by their names."""

_LIKE = 'each line is like {"name": "2020/report.txt", "author": "…"}'


@dataclass
class CollectReport:
    """What a run did: documents `made` (new or changed) and `kept`; names of those that are `gone` from the
    folder and were dropped; `failed` ones, which keep the store they had, if any; `skipped` files; `notes` on
    documents that were made; `copies`: names with that of the first document of the same bytes, one of which
    --together asks; `lost`: changed documents with a kind of index that their earlier store had, and the new
    one has not. `documents` and `tokens` are those of the whole collection now; `unknown`: names in the
    metadata that the folder does not have; `prefilled` tokens and `seconds` are of this run.
    """

    made: int = 0
    kept: int = 0
    gone: list[str] = field(default_factory=list)
    failed: list[Skipped] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    copies: list[tuple[str, str]] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    prefilled: int = 0
    seconds: float = 0.0


def _header(maker: Maker) -> Header:
    own = maker.loaded
    hashes = own.config_hash, own.weights_hash, own.tokenizer_hash
    return Header(own.model_id, *hashes, own.dtype, own.weights, _stated(maker.settings))


def _stated(settings: Settings) -> dict[str, object]:
    """What a collection says of its settings: no documents of one begin as another store."""
    return {name: value for name, value in asdict(settings).items() if name != "base"}


def collect(
    folder: str,
    out: Path,
    maker: Maker,
    *,
    rules: Rules = EVERYTHING,
    metadata: Metadata | None = None,
    drop: bool = False,
    progress: Watch = lambda stage, done, total, about: None,
) -> CollectReport:
    """Make the collection `out` hold the documents of `folder`, selected by `rules`. `metadata`: of all
    documents; None leaves it as it is. Most of the documents are dropped only with `drop`: the folder or the
    rules may be wrong.

    Documents are compared by the SHA-256 of their bytes. An interrupted call is resumed by the same one.
    Documents that cannot be read or made do not stop the others. Raises `CorpusError` where there are none at
    all, `StoreBusy` while another process changes the collection, `StoreMismatch` for another model or other
    settings, `ModelError`, `ConfigError`.
    """
    began = time.perf_counter()
    check_corpus(folder)
    if not os.path.isdir(folder):
        raise CorpusError(f"{folder} is a file: a collection is made of a folder of documents")
    walk = Walk(Path(folder), rules)
    files = sorted(walk.files())
    report = CollectReport()
    with Changing.at(out) as changing, Words(out / WORDS) as words:
        if (stated := changing.header) is not None:
            dtype = stated.dtype if maker.dtype == "auto" else maker.dtype
            own = maker.model, maker.weights, _stated(maker.settings), dtype
            # An adapter is in the hash of the weights alone.
            if maker.adapter or own != (stated.model_id, stated.weights, stated.settings, stated.dtype):
                changing.state(_header(maker))  # else its name is enough until it is loaded
        collecting = _Collecting(changing, words, maker, metadata, report, progress)
        unread = [one for one in walk.skipped if one.unread]
        if files and not drop:
            gone = collecting.gone({clean(name) for name, _ in files}, unread)
            if 2 * len(gone) > (there := len(changing.journal.entries)):
                raise ConfigError(
                    f"{len(gone):,} of the {there:,} documents of {out} are not among those to read now, "
                    f"such as {gone[0]}, and would be dropped: read what you read before, or give --drop"
                )
        for number, (name, path) in enumerate(files):
            changing.journal.make_room()
            progress("collect", number, len(files), clean(name))
            collecting.take(name, path, number, len(files), rules.follow_links)
        report.failed += sorted(unread)
        report.skipped = sorted(one for one in walk.skipped if not one.unread)
        if not collecting.seen:
            raise CorpusError(nothing_in(Path(folder), [*report.failed, *report.skipped]))
        # A document that could not be read is not gone: it may be there tomorrow.
        report.gone = collecting.gone(collecting.seen, report.failed)
        changing.journal.drop(report.gone)
        changing.journal.compact()
        entries = changing.journal.entries
        wanted = {entry.store for entry in entries.values()}
        changing.sweep({*collecting.seen.values(), *wanted})
        words.keep(wanted)
        report.documents = len(entries)
        report.copies = list(_copies(entries.values()))
        report.tokens = sum(entry.tokens for entry in entries.values())
        report.unknown = sorted(set(metadata or ()) - set(entries))
    report.seconds = time.perf_counter() - began
    return report


def _copies(entries: Iterable[Entry]) -> Iterator[tuple[str, str]]:
    first = dict[str, str]()
    for entry in sorted(entries):
        if (name := first.setdefault(entry.sha256, entry.name)) != entry.name:
            yield entry.name, name


@dataclass
class _Collecting:
    """One call of `collect`. `seen`: the names that were found, each with the name of its store."""

    changing: Changing
    words: Words
    maker: Maker
    metadata: Metadata | None
    report: CollectReport
    progress: Watch
    seen: dict[str, str] = field(default_factory=dict)

    def take(self, file: str, path: str, number: int, total: int, follow: bool) -> None:
        name = clean(file)
        try:
            if name in self.seen:
                raise CorpusError("another document has that name")
            data = read_plain(path, follow)
            sha256 = hashlib.sha256(data).hexdigest()
            store, entry = store_name(name, sha256), self.changing.journal.entries.get(name)
            if entry and (entry.store != store or not (self.changing.store(store) / ROOT).exists()):
                entry = None
            known = entry is not None and store in self.words
            document = TextDocument(name, "") if known else TextDocument(name, *read_document(file, data))
            self.seen[name] = store
            if entry is None:
                entry = self._made(document, sha256, number, total)
                self.report.made += 1
                self.report.notes += notes_on([document])
            else:
                self.report.kept += 1
            if store not in self.words:
                self.words.put(store, f"{name}\n{document.text}")  # questions name documents
            self._put(entry)
        except StoreMismatch:  # of the collection as a whole
            raise
        except (CorpusError, StoreError, DoesNotFit, VectorIndexError) as error:
            reason = str(error)
            if "no text" in reason and name in self.changing.journal.entries:
                reason += ": its earlier text stays; delete the file, or leave it out (--exclude)"
            self.report.failed.append(Skipped(name, reason))
        except OSError as error:
            self.report.failed.append(Skipped(name, error.strerror or str(error)))

    def gone(self, found: Collection[str], unread: Iterable[Skipped]) -> list[str]:
        unreadable = {one.name for one in unread}
        missing = [name for name in self.changing.journal.entries if name not in found]
        return sorted(
            name for name in missing if unreadable.isdisjoint([name, *map(str, PurePosixPath(name).parents)])
        )

    def _made(self, document: TextDocument, sha256: str, number: int, total: int) -> Entry:
        self.changing.state(_header(self.maker))
        name = store_name(document.name, sha256)
        loaded, place = self.maker.loaded, Place(self.changing.store(name))

        def shown(stage: str, done: int, tokens: int) -> None:
            about = f"{document.name}, {done:,} of {tokens:,} tokens" if stage == "prefill" else document.name
            self.progress("collect", number, total, about)

        earlier = self._earlier(document.name, place.path)
        opening = earlier.manifest.opening if earlier else None
        try:
            work = prepare(loaded, [document], self.maker.settings, place, (), opening)
        except ConfigError as error:  # of this document, such as one longer than the model's positions
            raise CorpusError(str(error)) from error
        if (report := settled(work, place)) is None:
            try:
                report = make(loaded, work, place, shown, earlier)
            except StoreDamaged:
                if earlier is None:
                    raise
                report = make(loaded, work, place, shown)  # without what is damaged
            self.report.prefilled += report.n_tokens - report.resumed_from
        if earlier:
            self._tell_lost(document.name, earlier, place.path)
        return Entry(document.name, sha256, name, report.n_tokens, {})

    def _tell_lost(self, name: str, earlier: KVStore, path: Path) -> None:
        """Note the kinds of index that the earlier store of a document has, and the new one at `path` not."""
        publish_indexes(KVStore.open(path))  # a kill may have left them unpublished
        built = [folder.name for folder in kind_folders(path)]
        self.report.lost += [(name, kind) for kind in saved_kinds(earlier) if kind not in built]

    def _earlier(self, name: str, path: Path) -> KVStore | None:
        """The store of what the document was before, if it can be continued. What was begun at `path` without
        one, as where that is damaged, goes on so: to begin as one would discard it.
        """
        known = self.changing.journal.entries.get(name)
        with suppress(FileNotFoundError, StoreDamaged):  # nothing was begun; who goes on is told
            if not Committed.load(partial_path(path)).base:
                return None
        try:
            return None if known is None else opened(self.changing.store(known.store))
        except StoreError:
            return None

    def _put(self, entry: Entry) -> None:
        """Note a document and its metadata where they are new or changed."""
        known = self.changing.journal.entries.get(entry.name)
        if self.metadata is not None:
            entry = entry._replace(metadata=self.metadata.get(entry.name, {}))
        elif known is not None:
            entry = entry._replace(metadata=known.metadata)
        if entry != known:
            try:
                self.changing.journal.put(entry)
            except ConfigError as error:  # its metadata is too large
                raise CorpusError(str(error)) from error


def read_metadata(path: Path) -> Metadata:
    """The JSONL file of metadata; names are below the folder of texts. Raises `ConfigError` with the line."""
    try:
        lines = read_plain(os.fspath(path), follow=True).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the metadata {path} are not UTF-8 text: give a JSONL file") from error
    except (OSError, CorpusError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"the metadata {path} cannot be read, because {why}: give a JSONL file") from error
    found: dict[str, dict[str, Value]] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            name, fields = _of_line(f"line {number} of {path}", line)
            if name in found:
                raise ConfigError(
                    f"line {number} of {path} names {name} a second time: keep one of the lines"
                )
            found[name] = fields
    return found


def _of_line(where: str, line: str) -> tuple[str, dict[str, Value]]:
    try:
        fields = files.parse(line)
    except ValueError as error:
        raise ConfigError(f"{where} cannot be read ({error}): {_LIKE}") from error
    name = fields.pop("name", None) if isinstance(fields, dict) else None
    if not isinstance(name, str):
        raise ConfigError(f"{where} names no document: {_LIKE}")
    try:
        check_metadata(fields)
    except ValueError as error:
        raise ConfigError(f"{where} cannot be used, because {error}: {_LIKE}") from error
    return name, fields
