"""ASGI: the only imports of starlette and fastapi. From the socket inwards: edge, auth, app, ops."""
