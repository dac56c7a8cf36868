"""What `cli_session_proxy.provider` is made of. State lives here: LiteLLM may execute a copy of the handler's file."""
