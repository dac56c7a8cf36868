"""What Redis keeps: a registry, which may vanish at any time."""
