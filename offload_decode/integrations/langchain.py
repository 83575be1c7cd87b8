"""A LangChain retriever of the passages that a question attends to (extra `langchain`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr

from offload_decode.common.errors import ConfigError
from offload_decode.integrations.passages import DOCUMENTS, PASSAGES, PassageSearch

try:
    from langchain_core.callbacks import CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever
except ModuleNotFoundError as error:
    raise ConfigError(
        "this retriever needs langchain-core: pip install 'offload-decode[langchain]'"
    ) from error


class OffloadDecodeRetriever(BaseRetriever):
    """Up to `k` passages of stores and collections as documents; their metadata have the score and the source
    (`store`, `document`, and `start` and `end` in tokens). Fields and errors are those of `PassageSearch`.
    """

    stores: str | Path | Sequence[str | Path]
    k: int = PASSAGES
    documents: int = DOCUMENTS
    settings: dict[str, Any] = Field(default_factory=dict)
    _search: PassageSearch = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        self._search = PassageSearch(self.stores, self.k, self.documents, self.settings)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        return [Document(one.passage.text, metadata=one.metadata) for one in self._search.search(query)]
