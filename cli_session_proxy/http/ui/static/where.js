// Where we are (the address's hash), and what that asks of the proxy: asked before anything else of the page is set up.

import { ahead, chainPath } from "./api.js";

export const PAGE = 100; // turns that are asked for at once
export const FIRST = 100; // agents that are listed at once
export const AGENTS = `/v1/chains?limit=${FIRST}`;
export const AT_ONCE = "/v1/overview?wait=0"; // what is known now: how the CLI is logged in may come later

/** #/AGENT/TURN, or #/?q=WORDS&status=… */
export function where() {
  const hash = location.hash.replace(/^#\/?/, "");
  if (hash.startsWith("?")) return { agent: null, turn: null, query: new URLSearchParams(hash) };
  const [agent, turnId] = hash.split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part; // an address that somebody cut: nothing is of this name, and the page says so
    }
  });
  return { agent: agent || null, turn: turnId || null, query: null };
}

/** The newest turns, or those around one. */
export function turnsPath(agentId, turnId) {
  return `${chainPath(agentId)}/turns?limit=${PAGE}${turnId ? `&with=${encodeURIComponent(turnId)}` : ""}`;
}

export function turnPath(agentId, turnId) {
  return `${chainPath(agentId)}/turns/${encodeURIComponent(turnId)}`;
}

const { agent, turn, query } = where();
if (turn) ahead(turnPath(agent, turn));
if (agent) ahead(turnsPath(agent, turn));
else if (!query) [AT_ONCE, AGENTS].forEach(ahead);
