// The proxy's own API. The key is kept in sessionStorage: this tab only, gone when it is closed.

const KEY = "cli-session-proxy-key";
let askForKey = () => {};

export class Fault extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function onKeyNeeded(ask) {
  askForKey = ask;
}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function request(path, options) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: { ...headers(), ...options.headers }, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Fault("The proxy does not answer. Is it running?", 0);
  }
  if (answer.ok) return answer;
  if (answer.status === 401) askForKey();
  let message = `${answer.status} for ${path}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // not an error of ours: the status has to do
  }
  throw new Fault(message, answer.status);
}

export async function get(path, signal) {
  return (await request(path, { signal })).json();
}

export async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  return (await request(path, { method: "POST", body: JSON.stringify(body), headers })).json();
}

export function chainPath(agentId) {
  return `/v1/chains/${encodeURIComponent(agentId)}`;
}

/** Follow an agent's events until `signal` aborts: `take(name, data)` for each. Ends when the proxy ends it. */
export async function follow(agentId, take, signal) {
  const answer = await request(`${chainPath(agentId)}/events`, { signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (kept + value).split(/\r?\n\r?\n/);
    kept = parts.pop();
    for (const part of parts) deliver(part, take);
  }
}

function deliver(part, take) {
  let name = "message";
  const data = [];
  for (const line of part.split(/\r?\n/)) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    if (line.startsWith("data:")) data.push(line.slice(5).trim());
  }
  if (data.length) take(name, JSON.parse(data.join("\n")));
}
