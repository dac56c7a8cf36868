// Where we are (the address's hash), the keys, and what every view shares.

import { onKeyNeeded, useKey } from "./api.js";
import { ChainView } from "./chain.js";
import { Chains } from "./chains.js";
import { fill } from "./dom.js";
import { TurnView } from "./turn.js";

const at = (id) => document.getElementById(id);
const search = at("search");
const help = at("help");
const askKey = at("ask-key");

function onFault(fault) {
  const place = at("fault");
  place.hidden = !fault || fault.status === 401;
  fill(place, fault ? fault.message : "");
}

function onLive(state) {
  at("live").dataset.state = state;
  fill(at("live"), state);
}

const turn = new TurnView(at("turn"), {
  numberOf: (id) => chain.numberOf(id), onFault,
  onRewound: (agentId, id) => {
    chain.changed(chain.stop.signal);
    turn.open(agentId, id);
  },
});
const chains = new Chains(at("chains"), search, { onFault });
const chain = new ChainView(at("chain"), { onFault, onLive, onTurn: (id) => turn.open(chain.agentId, id) });

// --- where we are: #/AGENT/TURN

let here = { agent: null, turn: null };

function parts() {
  const [agent, turnId] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  return { agent: agent || null, turn: turnId || null };
}

async function go() {
  const before = here;
  here = parts();
  document.body.dataset.view = here.turn ? "turn" : here.agent ? "chain" : "chains";
  document.title = `${here.agent || "chains"} · cli_session_proxy`;
  chains.mark(here.agent);
  if (here.turn) turn.open(here.agent, here.turn);
  else turn.close();
  if (here.agent) await chain.open(here.agent);
  else chain.close();
  if (here.agent) chain.mark(here.turn);
  if (!here.agent && before.agent) focusRow(rowOf("agent", before.agent));
  else if (here.agent && !here.turn) focusRow(rowOf("turn", before.turn) || rows()[0]);
}

const rowOf = (name, value) => rows().find((row) => row.dataset[name] === value);

function back() {
  if (here.turn) location.hash = `#/${encodeURIComponent(here.agent)}`;
  else if (here.agent) location.hash = "#/";
}

// --- keys

function rows() {
  return [...at(here.agent ? "chain" : "chains").querySelectorAll(".list > .row")];
}

function focusRow(row) {
  if (!row) return;
  const old = row.parentElement.querySelector('[tabindex="0"]');
  if (old) old.tabIndex = -1;
  row.tabIndex = 0;
  row.focus();
  row.scrollIntoView({ block: "nearest" });
}

async function step(by) {
  const all = rows();
  const now = all.indexOf(document.activeElement);
  const base = now >= 0 ? now : all.findIndex((row) => row.tabIndex === 0 && document.activeElement !== document.body);
  if (base + by >= all.length && here.agent && chain.next) {
    await chain.older();
    return focusRow(rows()[base + by]);
  }
  return focusRow(all[base < 0 ? 0 : Math.max(0, Math.min(all.length - 1, base + by))]);
}

async function nextRepair() {
  if (!here.agent) return;
  for (;;) {
    const all = rows();
    const from = all.indexOf(document.activeElement) + 1;
    const found = all.slice(from).find((row) => row.classList.contains("repaired"));
    if (found || !chain.next) return focusRow(found);
    await chain.older(1000);
  }
}

async function oldest() {
  if (here.agent) await chain.all();
  const all = rows();
  focusRow(all[all.length - 1]);
}

const KEYS = {
  j: () => step(1), ArrowDown: () => step(1), k: () => step(-1), ArrowUp: () => step(-1),
  r: nextRepair, g: () => focusRow(rows()[0]), G: oldest,
  "/": () => search.focus(), "?": () => help.showModal(), Escape: back,
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.target.matches("input")) {
    if (event.target === search && (event.key === "Escape" || event.key === "Enter")) {
      if (here.agent) location.hash = "#/";
      focusRow(document.querySelector("#chains .list > .row"));
      event.preventDefault();
    }
    return;
  }
  // In an opened turn the arrows scroll; j and k go on to the next one in the list.
  if (event.key.startsWith("Arrow") && at("turn").contains(document.activeElement)) return;
  const act = KEYS[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});

at("help-button").addEventListener("click", () => help.showModal());
search.addEventListener("focus", () => here.agent && (location.hash = "#/"));

// --- the key

onKeyNeeded(() => {
  if (askKey.hidden) {
    askKey.hidden = false;
    at("key").focus();
  }
});
askKey.addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key").value.trim());
  at("key").value = "";
  askKey.hidden = true;
  chains.refresh();
  chain.close();
  go();
});

addEventListener("hashchange", go);
go();
chains.start();
