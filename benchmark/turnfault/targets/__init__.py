"""Who answers: a server behind a URL, a command for each turn, a Python class, or the bare CLI.

base      what a target offers, and the environment in which it runs
program   a program that lives between turns: started, ended, killed with all that it started
server    a server, on one of five wires
command   a command for each turn; the bare CLI
library   a Python class in a process of its own, started by `host`
"""
