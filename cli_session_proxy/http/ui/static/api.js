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

/** Keep this key for the tab if the proxy takes it. Raises a `Fault` with status 401 where it does not. */
export async function useKey(key) {
  const answer = await fetch("/v1/chains?limit=1", { headers: { Authorization: `Bearer ${key}` }, cache: "no-store" }).catch(() => {
    throw new Fault("The proxy does not answer. Is it running?", 0);
  });
  if (!answer.ok) throw new Fault(await wordsOf(answer), answer.status);
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
  throw new Fault(await wordsOf(answer), answer.status);
}

async function wordsOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `${answer.status} ${answer.statusText}`; // not an error of ours: the status has to do
  }
}

const asked = new Map(); // path -> its answer to come

/** Ask for this now: who wants it first has the answer. */
export function ahead(path) {
  const answer = get(path);
  answer.catch(() => {}); // whoever takes it is told
  asked.set(path, answer);
}

export async function get(path, signal) {
  const answer = asked.get(path);
  asked.delete(path);
  return answer || (await request(path, { signal })).json();
}

/** A file as an address of this page's own, for an <img>. */
export async function blob(path, signal) {
  return URL.createObjectURL(await (await request(path, { signal })).blob());
}

export async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  return (await request(path, { method: "POST", body: JSON.stringify(body), headers })).json();
}

export function chainPath(agentId) {
  return `/v1/chains/${encodeURIComponent(agentId)}`;
}

/** Follow an agent's events until `signal` aborts, with what its running turns say: `take(name, data)` for each. */
export async function follow(agentId, take, signal) {
  const answer = await request(`${chainPath(agentId)}/events?live=1`, { signal });
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
