"""Ollama's own API: `/api/chat`, `/api/generate`, and the other addresses that its clients use."""
