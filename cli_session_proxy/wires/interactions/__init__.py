"""Google Interactions."""
