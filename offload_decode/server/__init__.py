"""Stores behind the OpenAI API: a scheduler that knows nothing of HTTP, and an app that speaks it.

`service` (requests to answers), `scheduler`, `catalog` and `jobs` (stores, and prefills of them),
`loaded_models`, `prefix_cache`, `chat_prompt`; `http/` is the wire, and `http/mcp` the tools of MCP. It may
import `evals` and what lies below it.
"""
