"""The operator's page: plain files that are read once at start and served as they are (docs/page.md)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from guardd.server.front import NotHttp

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def routes(check: Callable[[Request], None]) -> list[Route]:
    """`/` and `/page/FILE`. check: raises for who may not even see the page; it holds no data."""
    folder = resources.files("guardd.server") / "page"
    files = {
        each.name: (each.read_bytes(), _TYPES[each.name.rpartition(".")[2]])
        for each in folder.iterdir()
        if each.name.rpartition(".")[2] in _TYPES
    }

    async def serve(request: Request) -> Response:
        check(request)
        name = request.path_params.get("name", "index.html")
        if name not in files:
            raise NotHttp(404, "nothing is served there", field="path", value=name)
        content, kind = files[name]
        return Response(content, media_type=kind)

    return [Route("/", serve, methods=["GET"]), Route("/page/{name}", serve, methods=["GET"])]
