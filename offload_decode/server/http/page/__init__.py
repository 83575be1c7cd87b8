"""The page: pick a corpus, ask, and see what the answer attended to. Plain files, served as they are."""

from importlib.resources import files

from fastapi import APIRouter, HTTPException, Response

KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def router() -> APIRouter:
    """The page at `/`, and what it is made of under `/page/`."""
    routes = APIRouter(include_in_schema=False)
    parts = {
        file.name: (file.read_bytes(), kind)
        for file in files(__name__).iterdir()
        if (kind := KINDS.get("." + file.name.rpartition(".")[2]))
    }

    @routes.get("/page/{name}")
    def part(name: str) -> Response:
        if name not in parts:
            raise HTTPException(404, "the page has no such part")
        content, kind = parts[name]
        return Response(content, media_type=kind, headers=_HEADERS)

    @routes.get("/")
    def page() -> Response:
        return part("index.html")

    return routes
