"""`offload-decode mcp`: what it refuses, and a client that starts it over standard input and output."""

import asyncio
import os

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from tests.cli.conftest import PROGRAM, refused


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["none.kv"], "none.kv"),
        (["s3://bucket/store.kv"], "pull it first"),
        (["STORE", "--transport", "http", "--api-key", " "], "an empty key"),
        (["STORE", "--transport", "http", "--host", "no.such.host.invalid"], "no.such.host"),
    ],
)
def test_wrong_use_of_mcp_is_refused(store, args, told):
    assert told in refused(2, "mcp", *(str(store) if arg == "STORE" else arg for arg in args))


@pytest.mark.slow
def test_a_client_asks_over_stdio(store, tmp_path):
    program, *arguments = PROGRAM
    command = StdioServerParameters(
        command=program, args=[*arguments, "mcp", str(store)], env=dict(os.environ)
    )

    async def asked(log):
        async with Client(stdio_client(command, errlog=log)) as client:
            tools = [tool.name for tool in (await client.list_tools()).tools]
            question = "What is the colour of thing 3?"
            answer = await client.call_tool("ask", {"question": question, "max_tokens": 4})
            return tools, answer, await client.call_tool("search_passages", {"query": question})

    with open(tmp_path / "log", "w") as log:
        tools, answer, passages = asyncio.run(asked(log))
    assert tools == ["ask", "search_passages", "list_corpora"]
    assert not answer.is_error
    assert answer.structured_content["finish"] == "length"
    assert passages.structured_content["result"]
    assert "loaded the model" in (tmp_path / "log").read_text(), "what it does goes to stderr"
