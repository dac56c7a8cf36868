"""Stores attempts at a fix in the commits of a repository, and tells later attempts about them.

records    converts an attempt to the text of a commit or note, and back. Pure
prompt     the block that the model is shown. Pure
git        runs git: no hooks, nothing fetched, all output bounded
reading    the attempts at one fix, from commits reachable from HEAD and their notes, and what a new one is told
writing    a commit, or a note on one

The repository outlives sandboxes, stores and models. Attempts are stored nowhere else.
"""
