"""The page at /docs: Swagger UI, whose code a browser loads from a public server; without it, a plain list of routes.

Many servers of models run where browsers have no way out, and a blank page would help nobody there. `openapi.py`
installs it.
"""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse

NO_ICON = "data:,"
FALLBACK = """
<script>
if (!window.SwaggerUIBundle) fetch("openapi.json").then(reply => reply.json()).then(api => {
  const add = (parent, tag, text) => {
    const made = parent.appendChild(document.createElement(tag));
    made.textContent = text;
    return made;
  };
  const named = part => (part?.content?.["application/json"]?.schema?.$ref ?? "").split("/").pop();
  const page = document.getElementById("swagger-ui");
  add(page, "h1", api.info.title + " " + api.info.version);
  add(page, "p", api.info.description);
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, route] of Object.entries(methods)) {
      const shown = add(page, "details", "");
      add(shown, "summary", method.toUpperCase() + " " + path + " \\u2013 " + (route.description ?? ""));
      for (const name of [named(route.requestBody), named(route.responses["200"])])
        if (name) add(shown, "pre", name + " " + JSON.stringify(api.components.schemas[name], null, 1));
    }
});
</script>
</body>"""


def install_docs_page(app: FastAPI) -> None:
    """Its address of the OpenAPI text is relative, so that it works behind a proxy's prefix."""
    swagger = bytes(get_swagger_ui_html(openapi_url="openapi.json", title=app.title, swagger_favicon_url=NO_ICON).body)
    page = swagger.decode().replace("</body>", FALLBACK)

    async def docs() -> HTMLResponse:
        return HTMLResponse(page)

    app.add_api_route("/docs", docs, include_in_schema=False)
