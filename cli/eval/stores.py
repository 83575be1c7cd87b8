"""The stores that evaluations ask: prefilled by the project's own jobs, for a while or to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from offload_decode.models.loading import LoadedModel
from offload_decode.store.reader import KVStore
from prefill_jobs.corpus import TextDocument
from prefill_jobs.job import Settings, prefill_texts
from prefill_jobs.kept import kept, kept_name


class PrefilledStores:
    """Called with a text, gives its store (`evals.runs.Stores`), with the indexes of `kinds`.

    In `keep`, where a folder is given, stores stay and are found again by the text, the model and how it was
    prefilled; a prefill that was interrupted goes on, and one that another process is at is waited for.
    Otherwise they are gone when they were asked.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        name: str,
        settings: Settings,
        kinds: Iterable[str] = (),
        keep: Path | None = None,
    ) -> None:
        self._loaded, self._name, self._settings = loaded, name, settings
        self._kinds, self._keep = tuple(sorted(set(kinds))), keep

    @contextmanager
    def __call__(self, text: str, report: Callable[[int], None]) -> Iterator[KVStore]:
        """The store of a text; `report` is told the tokens that are prefilled."""
        if self._keep is not None:
            self._keep.mkdir(parents=True, exist_ok=True)
            path = self._keep / kept_name(self._loaded, self._settings, text, self._name)
            yield self._made(text, path, report)
            return
        with TemporaryDirectory(prefix="offload-decode-eval-") as folder:
            yield self._made(text, Path(folder) / "store.kv", report)

    def _made(self, text: str, path: Path, report: Callable[[int], None]) -> KVStore:
        def progress(stage: str, done: int, total: int) -> None:
            if stage == "prefill":
                report(done)

        def make() -> None:
            document = TextDocument(self._name, text)
            prefill_texts(self._loaded, [document], path, self._settings, progress=progress)

        return kept(path, make, self._kinds)
