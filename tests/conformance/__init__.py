"""Other people's conformance suites over the real CLI with a small obedient model: `make conformance`."""
