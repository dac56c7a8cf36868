"""Any model that LiteLLM reaches, as a backend: the path is rendered to messages at each turn, nothing else is kept."""
