# The commands of the project; .ci/run calls the same ones. `make serve` needs Python, `make test` also npm.

VENV := .venv
BIN := $(VENV)/bin
CLAUDE_1 := .tools/claude-1.0.120
CLAUDE_2 := .tools/claude-2.1.71
MERMAID := .tools/mermaid
AI_SDK := .tools/ai-sdk
VENDORS := .tools/vendors
AGENTS := .tools/agents
AGENTS_MORE := .tools/agents-more
AXE := .tools/axe
FRAMEWORKS := .tools/frameworks
EVALUATORS := .tools/evaluators
SUITES := .tools/suites
CCPROXY := .tools/ccproxy
CLAUDE_MAX := .tools/claude-max
CONTENDERS := .tools/contenders
UV := .tools/uv
# the first one that is new enough; another: make PYTHON=/path/to/python serve
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
# Errors only: a setting of the machine's own pip is nobody's business here.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

# With it every process of a test compiles the tests and the package anew.
unexport PYTHONDONTWRITEBYTECODE

# What builds the wheel, a line each.
BUILD_REQUIRES := $(BIN)/python -c 'import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")'

# How many tests `make test` runs at once. They wait for much, and with more of them a slow machine keeps some waiting too long.
WORKERS ?= 4

# Which chaos, by every wire: minutes (of each of the five kinds, 15; of each of the cluster's two, 10), and the seed of their first
# history (none: a random one).
MINUTES ?=
SEED ?=
CHAOS := $(BIN)/python -m tests.chaos --wide $(if $(SEED),--seed $(SEED))

.PHONY: serve login demo test bench bench-quick million peers trace check continuity drift versions full chaos agents conformance docs dist image lock tools chromium \
	bubblewrap postgresql redis haproxy shells continuity-hosts cluster mac-check clean

serve: $(VENV)/.serve  ## start the proxy on http://127.0.0.1:8787
	@$(BIN)/cli-session-proxy serve

login: $(VENV)/.serve  ## log the CLI in, by its own login
	@$(BIN)/cli-session-proxy login

mac-check: $(VENV)/.serve  ## on a Mac: print what to report of it (docs/macos.md says what else to try)
	@uname -srm; sw_vers 2>/dev/null || echo "no sw_vers: this is not macOS"; $(BIN)/python -VV; ulimit -n
	@launchctl limit maxfiles 2>/dev/null; echo "USER=$$USER LOGNAME=$$LOGNAME SSH=$${SSH_CONNECTION:+yes}"
	@$(BIN)/cli-session-proxy doctor; true

demo: $(VENV)/.serve  ## a conversation over the real CLI, offline
	@$(BIN)/cli-session-proxy demo

test: check tools  ## all that CI runs
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

continuity: $(VENV)/.test tools  ## every breakage on both CLIs and on the bare one; writes docs/continuity.md
	$(BIN)/python -m pytest tests/continuity -m 'full or not full' --table docs/continuity.md

continuity-hosts: $(VENV)/.test tools  ## the same breakages on PostgreSQL, every turn at another of three hosts; writes nothing
	$(BIN)/python -m pytest tests/continuity/test_matrix.py -n 2 -m 'full or not full' --hosts 3

full: $(VENV)/.test tools $(UV)/.installed  ## the costly tests, and the cases of matrices, that `make test` leaves out, but for those of `make continuity` and `make drift`
	$(BIN)/python -m pytest -n 2 --dist worksteal -m full --ignore tests/continuity --ignore tests/drift

drift: $(VENV)/.test tools  ## a CLI of tomorrow: one thing of the real one changed at a time; half an hour, writes docs/drift.md
	$(BIN)/python -m pytest tests/drift -n 2 --dist worksteal -m 'full or not full' --drift docs/drift.md

versions: $(VENV)/.test  ## one agent's life on every 20th CLI since 1.0.60 and on the last ten, by npm; an hour, writes docs/versions.md
	$(BIN)/python -m tests.versions --docs docs/versions.md

chaos: $(VENV)/.test tools  ## random histories of breakages, one proxy and three, with and without tools, and on chains of the release before; 75 minutes in all
	@chaos="$(CHAOS) --minutes $(or $(MINUTES),15)"; $$chaos --proxies 1; one=$$?; $$chaos --proxies 1 --tools; two=$$?; \
	$$chaos --proxies 3; three=$$?; $$chaos --proxies 3 --tools --wrapper; four=$$?; \
	$$chaos --proxies 2 --release; exit $$((one + two + three + four + $$?))

cluster: $(VENV)/.test tools  ## random histories of breakages on three hosts in network namespaces, with and without tools; needs root, 20 minutes
	@chaos="$(CHAOS) --hosts --proxies 3 --minutes $(or $(MINUTES),10)"; $$chaos; one=$$?; $$chaos --tools; exit $$((one + $$?))

agents: $(VENV)/.test tools $(AGENTS_MORE)/.programs $(FRAMEWORKS)/.installed $(EVALUATORS)/.installed  ## long conversations of agent programs, and of frameworks; a quarter of an hour
	$(BIN)/python -m pytest tests/agents -n 2 -m 'agents or not agents'

conformance: $(VENV)/.test $(SUITES)/.installed $(SUITES)/.sdks  ## other people's suites over the real CLI, a quarter of an hour; writes docs/conformance.md
	$(BIN)/python -m tests.conformance --json var/conformance.json --docs docs/conformance.md

bench: $(VENV)/.test $(CCPROXY)/.installed chromium postgresql  ## the proxy beside the bare CLI and ccproxy, 25 minutes; writes docs/bench.md
	$(BIN)/python -m bench --json var/bench.json --docs docs

bench-quick: $(VENV)/.test $(CCPROXY)/.installed chromium postgresql  ## the same in about six minutes; prints only
	$(BIN)/python -m bench --quick --json var/bench-quick.json

million: $(VENV)/.test postgresql  ## what a turn costs PostgreSQL over a million stored turns, beside ten thousand; ten minutes, 6 GB
	PYTHONPATH=store_conformance $(BIN)/python -m bench.million --json var/million.json

peers: $(VENV)/.test $(CONTENDERS)/.installed $(CCPROXY)/.installed $(CLAUDE_MAX)/.installed postgresql  ## turnfault on whoever keeps conversations, five runs each, hours; writes docs/peers.md
	$(BIN)/python -m bench.peers --docs docs

trace: $(VENV)/.bench  ## the functions that one warm chat turn runs through, from the socket to the acknowledgement
	@$(BIN)/python -m bench.trace

docs: $(VENV)/.test  ## the documents as a site in site/; a dead link fails
	$(BIN)/mkdocs build --strict

dist: $(VENV)/.test  ## the wheel and the sdist, as an index takes them
	rm -rf dist
	$(BIN)/python -m build --outdir dist benchmark
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

image: $(VENV)/.test  ## build the container image and try it: needs docker, podman or buildah
	$(BIN)/python -m pytest tests/packaging/test_image.py -m image

# uv, because its `--universal` locks for every processor and Python at once; pip-tools locks for the machine it runs on.
# It names no index in what it writes.
LOCK := UV_CUSTOM_COMPILE_COMMAND='make lock' $(UV)/bin/uv pip compile --quiet --upgrade --universal \
	--python-version 3.11 --generate-hashes --annotation-style line
lock: $(UV)/.installed  ## the packages of the image with their hashes: the newest that pyproject.toml allows
	$(LOCK) --no-emit-package turnfault --extra claude --extra postgresql --extra redis --output-file deploy/requirements.lock pyproject.toml
	$(BUILD_REQUIRES) | $(LOCK) --output-file deploy/build.lock -

check: $(VENV)/.test  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

tools: $(CLAUDE_1)/.installed $(CLAUDE_2)/.installed $(MERMAID)/.installed $(AI_SDK)/.installed $(VENDORS)/.installed $(AGENTS)/.programs $(AXE)/.installed chromium bubblewrap postgresql redis haproxy shells  ## two old CLIs and the npm packages that the tests use

# The tests of the page drive Debian's own chromium; nothing is downloaded past apt. Without its own windows and menus
# (chromium-headless-shell) it takes them two thirds of the processor time.
chromium:
	@command -v chromium >/dev/null && command -v chromium-headless-shell >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; \
	then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
		chromium chromium-headless-shell || command -v chromium >/dev/null; \
	elif command -v chromium >/dev/null; then exit 0; \
	else echo "chromium is needed for the tests of the page: sudo apt-get install chromium" >&2; exit 1; fi

# The boundary of confined profiles, Linux only; without it those tests are skipped.
bubblewrap:
	@command -v bwrap >/dev/null || [ "$$(uname)" != Linux ] && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; \
	then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bubblewrap; \
	else echo "bubblewrap is needed for the tests of confined profiles: sudo apt-get install bubblewrap" >&2; exit 1; fi

# Servers of the tests' own: no cluster of the machine is made for them, and none is started.
postgresql:
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null && command -v pgbouncer >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; \
	then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql-common \
		&& sed -i 's/^#\?create_main_cluster.*/create_main_cluster = false/' /etc/postgresql-common/createcluster.conf \
		&& DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends postgresql pgbouncer; \
	else echo "PostgreSQL is needed for the tests of its store: sudo apt-get install postgresql pgbouncer" >&2; exit 1; fi

# Its registry: an instance of each test's own, never the machine's.
redis:
	@command -v redis-server >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; \
	then apt-get update -qq && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends redis-server; \
	else echo "Redis is needed for the tests of the registry: sudo apt-get install redis-server" >&2; exit 1; fi

# The load balancer of the cluster of hosts: the machine's own is not started.
haproxy:
	@command -v haproxy >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; \
	then apt-get update -qq && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends haproxy; \
	else echo "HAProxy is needed for the tests of several hosts: sudo apt-get install haproxy" >&2; exit 1; fi

# In which completion is tried, beside bash.
shells:
	@command -v zsh >/dev/null && command -v fish >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; \
	then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends zsh fish; \
	else echo "zsh and fish are needed for the tests of completion: sudo apt-get install zsh fish" >&2; exit 1; fi

clean:  ## remove what make installed and built; var/ stays
	rm -rf $(VENV) .tools dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Stamps: a second run installs nothing unless pyproject.toml changed.
$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or say make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed, $(PYTHON) is older: say make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.serve: pyproject.toml benchmark/pyproject.toml $(VENV)/.made
	@echo "installing into $(VENV), about a minute, once"
	@$(PIP) --editable ./benchmark --editable '.[claude,models]'
	@touch $@

$(VENV)/.test: pyproject.toml benchmark/pyproject.toml $(VENV)/.made
	@echo "installing what the tests need into $(VENV), some minutes, once"
	@$(PIP) --editable ./benchmark --editable '.[claude,litellm,postgresql,redis,archive,otel,dev,clients,bench]'
	@touch $@ $(VENV)/.serve $(VENV)/.bench

$(VENV)/.bench: pyproject.toml benchmark/pyproject.toml $(VENV)/.made
	@echo "installing what the benchmark needs into $(VENV), about a minute, once"
	@$(PIP) --editable ./benchmark --editable '.[claude,bench]'
	@touch $@ $(VENV)/.serve

# The best warm peer, in a venv of its own: newer releases of the SDK break it.
$(CCPROXY)/.installed: $(VENV)/.made
	@echo "installing $(@D)"
	@$(BIN)/python -m venv $(CCPROXY)
	@$(CCPROXY)/bin/python -m pip install -qq --disable-pip-version-check ccproxy-api==0.2.10 claude-agent-sdk==0.1.4
	@touch $@

# The peer that npm has; it finds `claude` on PATH. Nothing of its own runs at the installation.
$(CLAUDE_MAX)/.installed:
	@echo "installing $(@D)"
	@mkdir -p $(CLAUDE_MAX)
	@npm install --prefix $(CLAUDE_MAX) --no-save --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error \
		claude-max-api-proxy@1.0.0
	@test -d $(CLAUDE_MAX)/node_modules/claude-max-api-proxy
	@touch $@

# What keeps conversations, from PyPI at its newest, each in an environment of its own.
$(CONTENDERS)/.installed: $(UV)/.installed
	@echo "installing $(@D)"
	@mkdir -p $(CONTENDERS)
	@for name in langgraph openai-agents agent-sdk google-adk llm; do \
		$(UV)/bin/uv venv --quiet --clear --python $(BIN)/python $(CONTENDERS)/$$name || exit 1; done
	@$(UV)/bin/uv pip install --quiet --upgrade --python $(CONTENDERS)/langgraph langgraph langgraph-checkpoint-sqlite \
		langgraph-checkpoint-postgres langchain-anthropic 'psycopg[binary,pool]'
	@$(UV)/bin/uv pip install --quiet --upgrade --python $(CONTENDERS)/openai-agents 'openai-agents[litellm]'
	@$(UV)/bin/uv pip install --quiet --upgrade --python $(CONTENDERS)/agent-sdk claude-agent-sdk
	@$(UV)/bin/uv pip install --quiet --upgrade --python $(CONTENDERS)/google-adk google-adk litellm 'sqlalchemy[asyncio]' aiosqlite
	@$(UV)/bin/uv pip install --quiet --upgrade --python $(CONTENDERS)/llm llm llm-anthropic
	@touch $@

$(UV)/.installed: $(VENV)/.made
	@echo "installing $(@D)"
	@$(BIN)/python -m venv $(UV)
	@$(UV)/bin/python -m pip install -qq --disable-pip-version-check 'uv>=0.13'
	@touch $@

# No lock file: it would hold the addresses of this machine's registry.
$(CLAUDE_1)/.installed:
	@command -v npm >/dev/null || { echo "npm is needed for the CLI 1.0.120 of the tests: install Node.js 18 or newer" >&2; exit 1; }
	@echo "installing $(@D)"
	@mkdir -p $(CLAUDE_1)
	@npm install --prefix $(CLAUDE_1) --no-save --no-package-lock --no-audit --no-fund --loglevel=error \
		@anthropic-ai/claude-code@1.0.120
	@test -x $(CLAUDE_1)/node_modules/.bin/claude
	@touch $@

$(CLAUDE_2)/.installed:
	@echo "installing $(@D)"
	@mkdir -p $(CLAUDE_2)
	@npm install --prefix $(CLAUDE_2) --no-save --no-package-lock --no-audit --no-fund --loglevel=error \
		@anthropic-ai/claude-code@2.1.71
	@test -x $(CLAUDE_2)/node_modules/.bin/claude
	@touch $@

$(MERMAID)/.installed:
	@echo "installing $(@D)"
	@mkdir -p $(MERMAID)
	@npm install --prefix $(MERMAID) --no-save --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error \
		mermaid@11
	@test -f $(MERMAID)/node_modules/mermaid/dist/mermaid.min.js
	@touch $@

# What finds barriers on the page.
$(AXE)/.installed:
	@echo "installing $(@D)"
	@mkdir -p $(AXE)
	@npm install --prefix $(AXE) --no-save --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error \
		axe-core@4.10
	@test -f $(AXE)/node_modules/axe-core/axe.min.js
	@touch $@

$(AI_SDK)/.installed:
	@echo "installing $(@D)"
	@mkdir -p $(AI_SDK)
	@npm install --prefix $(AI_SDK) --no-save --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error \
		ai@7 @ai-sdk/openai@4 @ai-sdk/anthropic@4 @ai-sdk/google@4
	@test -d $(AI_SDK)/node_modules/ai
	@touch $@

# The clients of the vendors themselves.
$(VENDORS)/.installed:
	@echo "installing $(@D)"
	@mkdir -p $(VENDORS)
	@npm install --prefix $(VENDORS) --no-save --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error \
		openai@7 @anthropic-ai/sdk@1 @google/genai@3 ollama@0.6
	@test -d $(VENDORS)/node_modules/openai
	@touch $@

# Agent programs as they come; nothing of theirs runs at the installation. Claude Code is the one of the venv.
$(AGENTS)/.programs:
	@echo "installing $(@D)"
	@mkdir -p $(AGENTS)
	@npm install --prefix $(AGENTS) --no-save --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error \
		@openai/codex@0.169.0 @google/gemini-cli@0.61.0 opencode-ai@1.18.33 @qwen-code/qwen-code@0.24.4
	@for name in codex gemini opencode qwen; do test -e $(AGENTS)/node_modules/.bin/$$name || exit 1; done
	@touch $@

# Those that `make agents` alone runs: pi and cline, aider and gptme each in an environment of its own.
$(AGENTS_MORE)/.programs: $(UV)/.installed
	@echo "installing $(@D)"
	@mkdir -p $(AGENTS_MORE)
	@npm install --prefix $(AGENTS_MORE) --no-save --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error \
		@mariozechner/pi-coding-agent@0.73.1 cline@3.0.65
	@$(UV)/bin/uv venv --quiet --clear --python $(BIN)/python $(AGENTS_MORE)/venv
	@$(UV)/bin/uv pip install --quiet --python $(AGENTS_MORE)/venv aider-chat==0.86.2
	@$(UV)/bin/uv venv --quiet --clear --python $(BIN)/python $(AGENTS_MORE)/gptme
	@$(UV)/bin/uv pip install --quiet --python $(AGENTS_MORE)/gptme gptme==0.35.1
	@touch $@

# Frameworks from PyPI, each with what it needs to talk to an address of its own; what they bring would change our venv.
# uv, because pip looks for versions that fit together for longer than anybody waits.
$(FRAMEWORKS)/.installed: $(UV)/.installed
	@echo "installing $(@D)"
	@$(UV)/bin/uv venv --quiet --clear --python $(BIN)/python $(FRAMEWORKS)/venv
	@$(UV)/bin/uv pip install --quiet --python $(FRAMEWORKS)/venv langgraph==1.2.22 \
		langchain-openai==1.7.3 crewai==1.15.30 'smolagents[openai]==1.26.0' dspy==3.4.1 autogen-agentchat==0.7.5 \
		'autogen-ext[openai]==0.7.5' llama-index-core==0.14.25 llama-index-llms-openai-like==0.8.1
	@$(UV)/bin/uv venv --quiet --clear --python $(BIN)/python $(FRAMEWORKS)/google
	@$(UV)/bin/uv pip install --quiet --python $(FRAMEWORKS)/google google-genai==2.34.0 google-adk==2.13.0 \
		instructor==1.17.0 goose-sdk==0.1.0a13
	@touch $@

# promptfoo: newer ones need Node.js 22. Of all the scripts of its packages only the one that builds its database is run.
$(EVALUATORS)/.installed: $(UV)/.installed
	@echo "installing $(@D)"
	@mkdir -p $(EVALUATORS)
	@npm install --prefix $(EVALUATORS) --no-save --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error \
		promptfoo@0.119.0
	@cd $(EVALUATORS)/node_modules/better-sqlite3 && npm run --silent build-release
	@$(UV)/bin/uv venv --quiet --clear --python $(BIN)/python $(EVALUATORS)/venv
	@$(UV)/bin/uv pip install --quiet --python $(EVALUATORS)/venv deepeval==4.3.1
	@touch $@

$(SUITES)/.installed: $(VENV)/.made
	@echo "installing $(@D)"
	@mkdir -p $(SUITES)
	@npm install --prefix $(SUITES) --no-save --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error \
		llmprobe@0.6.12 compatcanary@0.2.2
	@$(BIN)/python -m venv $(SUITES)/venv
	@$(SUITES)/venv/bin/python -m pip install -qq --disable-pip-version-check llm-comply==0.5.0 \
		langchain-tests==1.1.9 langchain-openai==1.7.3 langchain-anthropic==1.7.7 langchain-google-genai==4.4.0 \
		langchain-ollama==1.1.0
	@touch $@

# The tests of the SDKs' own repositories are in their sdists.
OPENAI_SDK := 2.54.0
ANTHROPIC_SDK := 2.12.0
$(SUITES)/.sdks: $(UV)/.installed
	@echo "installing $(@D)"
	@mkdir -p $(SUITES)
	@$(UV)/bin/uv venv --quiet --clear --python $(BIN)/python $(SUITES)/sdks
	@$(UV)/bin/uv pip install --quiet --python $(SUITES)/sdks 'openai[aiohttp]==$(OPENAI_SDK)' \
		'anthropic[aiohttp]==$(ANTHROPIC_SDK)' pytest==9.0.3 pytest-asyncio==1.3.0 respx==0.22.0 rich \
		'http-snapshot[httpx]==0.1.9' inline-snapshot==0.32.5
	@$(BIN)/python -m pip download -qq --disable-pip-version-check --no-deps --no-binary openai,anthropic \
		--dest $(SUITES) openai==$(OPENAI_SDK) anthropic==$(ANTHROPIC_SDK)
	@cd $(SUITES) && tar xzf openai-$(OPENAI_SDK).tar.gz && tar xzf anthropic-$(ANTHROPIC_SDK).tar.gz
	@touch $@
