"""The wire protocols: one folder each, over what they share."""
