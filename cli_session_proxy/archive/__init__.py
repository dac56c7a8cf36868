"""Chains that are put away elsewhere, encrypted, and come back by `import`."""
