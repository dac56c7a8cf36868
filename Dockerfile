# The proxy with its CLI, not as root. `/data` keeps the chains, `/login` the CLI's own login and transcripts.
# docs/self-hosting.md says how to run it and how to raise what is pinned here; `make image` builds and tries it.

# 3.13.15-slim-bookworm, for all its architectures. A digest names its bytes: a registry can answer with these or not at all.
ARG BASE=docker.io/library/python@sha256:2325bb286ec344af3e5898cc224b5844e2707ac6e26b1632516fd3edc84a5e26

FROM ${BASE} AS build
COPY deploy/build.lock /src/
RUN pip install --no-cache-dir --only-binary :all: --require-hashes --requirement /src/build.lock
COPY pyproject.toml README.md LICENSE /src/
COPY cli_session_proxy /src/cli_session_proxy
COPY benchmark /src/benchmark
RUN pip wheel --no-cache-dir --no-index --no-deps --no-build-isolation --wheel-dir /wheel /src/benchmark /src

FROM ${BASE}
RUN useradd --create-home --uid 1000 csp \
 && install --directory --owner csp --group csp --mode 0700 /data /login

# Wheels with their hashes only: what an sdist would fetch to be built is in no lock. The CLI's binary is in one of them;
# its link on the PATH is for logging in by hand.
COPY deploy/requirements.lock /lock/
RUN pip install --no-cache-dir --only-binary :all: --require-hashes --requirement /lock/requirements.lock \
 && ln -s "$(python -c 'import claude_agent_sdk, pathlib; print(pathlib.Path(claude_agent_sdk.__file__).parent)')/_bundled/claude" \
    /usr/local/bin/claude
COPY --from=build /wheel /wheel
RUN pip install --no-cache-dir --no-index --no-deps /wheel/*.whl && rm -rf /wheel /lock

USER csp
WORKDIR /data
# Every address of the container: `serve` refuses that without a key (CLI_SESSION_PROXY_KEYS__<NAME>).
ENV CLI_SESSION_PROXY_HOST=0.0.0.0 \
    CLI_SESSION_PROXY_VAR=/data \
    CLI_SESSION_PROXY_CLAUDE_CONFIG_DIR=/login \
    CLAUDE_CONFIG_DIR=/login \
    PYTHONUNBUFFERED=1
VOLUME ["/data", "/login"]
EXPOSE 8787
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8787/healthz', timeout=4)"]
ENTRYPOINT ["cli-session-proxy"]
CMD ["serve"]
