"""The wire: FastAPI, and nothing else of this project imports it.

`app` puts the routers together: `chat`, `completions`, `responses`, `anthropic`, `stores` (stores, jobs and
models), `errors` (health and metrics too), `page/`. `security`, `streaming`, `answers`, `blocks` and `tools`
serve them; `front` is for several servers.
"""
