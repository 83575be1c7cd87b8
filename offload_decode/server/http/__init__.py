"""The wire: FastAPI, and nothing else of this project imports it.

`app` puts the routers together: `chat`, `completions`, `responses`, `stores` (stores, jobs and models),
`errors` (health and metrics too), `page/`. `security`, `streaming` and `answers` serve them; `front` is for
several servers.
"""
