"""What earlier attempts at the same fix tried, kept in the commits of a repository.

    records    an attempt as the text of a commit or of a note, and back. Pure
    telling    the block that a model is told. Pure
    git        the git program: no hook runs, nothing is fetched, all that comes is bounded
    reading    the attempts of one fix, from the commits reachable from HEAD and their notes
    writing    a commit, or a note on one

The repository survives sandboxes, stores and models. Nothing of an attempt is kept anywhere else.
"""
