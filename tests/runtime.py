"""Settings of the real CLI's runtime, which the programs that tests put around it need too."""

# A CLI lives for a few turns here: it never gets back what compiling costs it, by the first of its compilers. Nor what
# its collector of garbage does: a fifth of what a life of two turns takes of a processor, for 25 MB.
SHORT_LIVED = {"BUN_JSC_useBaselineJIT": "0", "BUN_JSC_useGC": "0"}
