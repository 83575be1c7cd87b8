"""LangChain's and LlamaIndex' own ways to call a retriever give the passages of `PassageSearch`."""

import asyncio

import pytest
from llama_index.core.schema import QueryBundle

from offload_decode.common.errors import ConfigError
from offload_decode.integrations.langchain import OffloadDecodeRetriever as OfLangChain
from offload_decode.integrations.llama_index import OffloadDecodeRetriever as OfLlamaIndex
from offload_decode.integrations.passages import PassageSearch
from tests.processes import apart

QUESTION = "What is the colour of thing 3?"


@pytest.fixture
def sources(shelf):
    found = PassageSearch([shelf / "book.kv", shelf / "notes.kv"], 3).search(QUESTION)
    assert found
    return found


def test_langchain_s_documents(shelf, sources):
    retriever = OfLangChain(stores=[shelf / "book.kv", str(shelf / "notes.kv")], k=3)
    documents = retriever.invoke(QUESTION)
    assert [(one.page_content, one.metadata) for one in documents] == [
        (one.passage.text, one.metadata) for one in sources
    ]
    assert asyncio.run(retriever.ainvoke(QUESTION)) == documents
    assert retriever.batch([QUESTION, QUESTION]) == [documents, documents]
    assert (retriever | len).invoke(QUESTION) == len(documents)


def test_llama_index_s_nodes(shelf, sources):
    retriever = OfLlamaIndex([shelf / "book.kv", str(shelf / "notes.kv")], k=3)
    nodes = retriever.retrieve(QUESTION)
    assert [(one.node.get_content(), one.score, one.metadata) for one in nodes] == [
        (one.passage.text, one.passage.score, one.metadata) for one in sources
    ]
    again = asyncio.run(retriever.aretrieve(QueryBundle(QUESTION)))
    assert [one.score for one in again] == [one.score for one in nodes]


def test_what_cannot_be_is_refused_as_it_is_made(shelf):
    for kind in (OfLangChain, OfLlamaIndex):
        with pytest.raises(ConfigError, match="name a store"):
            kind(stores=[])
        with pytest.raises(ConfigError, match="at least 1"):
            kind(stores=shelf / "book.kv", k=0)


@pytest.mark.parametrize(
    ("package", "module"), [("langchain", "langchain_core"), ("llama_index", "llama_index")]
)
def test_without_the_package_its_extra_is_named(package, module):
    program = f"import sys\nsys.modules[{module!r}] = None\nimport offload_decode.integrations.{package}"
    told = apart(program).stderr
    assert f"offload-decode[{package.replace('_', '-')}]" in told
