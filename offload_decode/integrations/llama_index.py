"""A LlamaIndex retriever of the passages that a question attends to (extra `llama-index`)."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload_decode.common.errors import ConfigError
from offload_decode.integrations.passages import DOCUMENTS, PASSAGES, PassageSearch

try:
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
except ModuleNotFoundError as error:
    raise ConfigError(
        "this retriever needs llama-index-core: pip install 'offload-decode[llama-index]'"
    ) from error


class OffloadDecodeRetriever(BaseRetriever):
    """Up to `k` passages of stores and collections as nodes with scores; their metadata name the source
    (`store`, `document`, and `start` and `end` in tokens). Arguments and errors are those of `PassageSearch`.
    """

    def __init__(
        self,
        stores: str | Path | Sequence[str | Path],
        k: int = PASSAGES,
        documents: int = DOCUMENTS,
        settings: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self._search = PassageSearch(stores, k, documents, settings)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [
            NodeWithScore(
                node=TextNode(text=one.passage.text, metadata=one.metadata), score=one.passage.score
            )
            for one in self._search.search(query_bundle.query_str)
        ]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)
