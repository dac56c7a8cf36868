"""Any model that LiteLLM reaches, as a backend: each turn sends the path as messages, and nothing else is kept."""
