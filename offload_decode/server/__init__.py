"""Stores behind the OpenAI API: a scheduler that knows nothing of HTTP, and an app that speaks it."""
