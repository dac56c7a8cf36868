"""Stores attempts at a fix in the commits of a repository, and tells later attempts about them.

records    converts an attempt to the text of a commit or note, and back; the text that the model is shown. No I/O
git        runs git without hooks or fetches, and bounds all its output
attempts   reads the attempts at one fix, from commits reachable from HEAD and their notes; what a new attempt is told;
           writes an attempt into a commit, or into a note on one

The repository outlives sandboxes, stores and models. Attempts are stored nowhere else.
"""
