"""Keeps a CLI session equal to one path of the chain: prepare, verify, repair, capture, adopt, watch."""
