"""Ollama's own API: `/api/chat`, `/api/generate` and what its clients ask beside them."""
