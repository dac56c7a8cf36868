"""The proxy from Python: `ask`, the shared runtime, and the LiteLLM provider."""
