#!/bin/sh
# The `llm` command line with its log as memory: a log for each conversation, of which `-c` continues the newest.
#   llm.sh PROGRAM MODEL, in the conversation's own folder; the words on stdin
export LLM_USER_PATH="$PWD"
[ -f logs.db ] && set -- "$@" -c
program=$1 model=$2; shift 2
exec "$program" prompt --no-stream -m "claude-$model-4.5" "$@"
