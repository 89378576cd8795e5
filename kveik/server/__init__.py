"""OpenAI-compatible HTTP server: protocol (shapes), translate (pure), routes, sse, auth, app.

It sees the engine only through `engine.stream`.
"""
