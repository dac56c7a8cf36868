"""What of a conversation survives when something breaks: measured for this proxy, the bare CLI and others alike.

    score     what reached the model, judged against what was acknowledged. Pure
    talk      one conversation that is told facts, whoever answers it
    files     ways to break a transcript
    targets   who answers: a server behind a URL on one of four wires, or the CLI itself
    rows      what is broken, by what it needs of a target
    running   the rows, one after another
    report    the table, JSON, a badge and a picture

The strict upstream is `provider.upstream`. The project's own matrix (tests/continuity) judges and talks with this code.
"""
