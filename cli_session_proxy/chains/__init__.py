"""Work on whole chains: adopt, verify, export, follow."""
