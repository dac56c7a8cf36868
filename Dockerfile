# The proxy with its CLI, not as root. `/data` keeps the chains, `/login` the CLI's own login and transcripts.
# docs/self-hosting.md says how to run it; `make image` builds and tries it.
FROM docker.io/library/python:3.12-slim

RUN useradd --create-home --uid 1000 csp \
 && install --directory --owner csp --group csp --mode 0700 /data /login

COPY pyproject.toml README.md LICENSE /src/
COPY cli_session_proxy /src/cli_session_proxy
# The [claude] extra carries the CLI's binary; its link on the PATH is for logging in by hand.
RUN pip install --no-cache-dir '/src[claude]' \
 && ln -s "$(python -c 'import claude_agent_sdk, pathlib; print(pathlib.Path(claude_agent_sdk.__file__).parent)')/_bundled/claude" \
    /usr/local/bin/claude \
 && rm -rf /src

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
