"""The judge of the matrix is the benchmark's."""

from cli_session_proxy.continuity.score import Fact, Score, messages_of, score

__all__ = ["Fact", "Score", "messages_of", "score"]
