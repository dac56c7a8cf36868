"""OpenAI Conversations."""
