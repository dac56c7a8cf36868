// Where we are (the address's hash), the keys, and what every view shares.

import { AT_ONCE, where } from "./where.js"; // first: it asks the proxy, and the rest is set up meanwhile
import { onKeyNeeded, useKey } from "./api.js";
import { Asked } from "./asking.js";
import { ChainView } from "./chain.js";
import { Chains } from "./chains.js";
import { fill, h } from "./dom.js";
import { Overview } from "./overview.js";
import { SearchView } from "./search.js";
import { TurnView } from "./turn.js";

const at = (id) => document.getElementById(id);
const search = at("search");
const help = at("help");
const askKey = at("ask-key");

// What each view could not do, until it can: one that works does not hide what another one says.
const faults = new Map();

function faultOf(view) {
  return (fault) => {
    if (fault && fault.status !== 401) faults.set(view, fault.message);
    else faults.delete(view);
    drawFaults();
  };
}

function drawFaults() {
  const said = faults.size > 0 && overview.says; // on the first page the status line says it
  const words = [...new Set(faults.values())].filter((one) => one !== said).join(" ");
  at("fault").hidden = !words;
  if (at("fault").textContent !== words) fill(at("fault"), words);
}

function onLive(state) {
  at("live").dataset.state = state;
  fill(at("live"), state);
}

let title = "agents";
let asks = 0; // tools that wait for a person

function drawTitle() {
  document.title = `${asks ? `(${asks}) ` : ""}${title} · cli_session_proxy`;
}

const asked = new Asked(at("asks"), {
  onCount: (number) => {
    asks = number;
    drawTitle();
  },
  onFault: faultOf("asked"),
});
const turn = new TurnView(at("turn"), {
  onFault: faultOf("turn"),
  onPlace: async (place, again) => {
    opened = place;
    if (chain.running) turn.progress(chain.running);
    if (!again) await chain.reveal(place);
  },
  onRewound: (agentId, id) => {
    chain.changed(chain.stop.signal);
    turn.open(agentId, id);
  },
});
const chains = new Chains(at("chains"), search, { onFault: faultOf("chains") });
const chain = new ChainView(at("chain"), {
  onFault: faultOf("chain"), onLive, onTurn: (id) => turn.open(chain.agentId, id), onProgress: (turns) => turn.progress(turns),
});
const overview = new Overview(at("overview"), { onFault: faultOf("overview"), onLive });
let opened = null; // the place of the opened turn

const found = new SearchView(at("found"), search, {
  onFault: faultOf("search"),
  onAsk: (query) => {
    const wanted = String(query) ? `#/?${query}` : before;
    if (here.query) location.replace(wanted); // one step back leads to where the search began
    else if (String(query)) location.hash = wanted;
  },
});

// --- where we are

let here = { agent: null, turn: null, query: null };
let before = "#/"; // where somebody was when they began to search

async function go() {
  const last = here;
  here = where();
  if (!here.query) before = location.hash || "#/";
  document.body.dataset.view = here.query ? "search" : here.turn ? "turn" : here.agent ? "chain" : "chains";
  title = here.query ? "search" : here.agent || "agents";
  drawFaults();
  drawTitle();
  drawCrumbs();
  if (here.query) found.open(here.query);
  else if (last.query || !at("found").hidden) found.close();
  chains.mark(here.agent);
  if (!here.agent && !here.query && last.agent) overview.refresh();
  const left = opened;
  if (here.turn !== last.turn) opened = null;
  const listed = here.agent ? chain.open(here.agent, here.turn) : chain.close(); // asks first: the list is the slower one
  if (here.turn) turn.open(here.agent, here.turn);
  else turn.close();
  await listed;
  if (here.agent) chain.mark(here.turn);
  drawCrumbs();
  if (here.query) return;
  if (!here.agent && last.agent) chains.rows.focus(chains.shown.findIndex((row) => row.agent_id === last.agent));
  else if (here.agent && !here.turn) chain.rows.focus(Math.max(0, here.agent === last.agent && left ? chain.order.indexOf(left) : chain.rows.activePlace()));
}

/** The way back, where one view fills the screen. */
function drawCrumbs() {
  const of = (href, words, last) => h("a", { href, "aria-current": last && "page" }, words);
  fill(at("crumbs"), of("#/", "Agents", !here.agent),
    here.agent && ["›", of(`#/${encodeURIComponent(here.agent)}`, chain.about?.title || here.agent, !here.turn)], here.turn && "› turn");
}

function back() {
  if (here.query) location.hash = before;
  else if (here.turn) location.hash = `#/${encodeURIComponent(here.agent)}`;
  else if (here.agent) location.hash = "#/";
}

// --- keys

/** The lists of this view, one behind the other. */
function lists() {
  if (here.query) return [chains.rows, found];
  return [here.agent ? chain.rows : chains.rows];
}

function focusAt(list, place) {
  if (place >= 0 && place < list.count) list.focus(place);
}

function step(by) {
  const all = lists();
  const list = all.find((one) => one.hasFocus) || all.find((one) => one.activePlace() >= 0 && one.count) || all[0];
  const now = list.activePlace();
  if (now < 0) return focusAt(all.find((one) => one.count) || list, 0);
  const next = now + by;
  const other = all[all.indexOf(list) + by];
  if ((next < 0 || next >= list.count) && other && other.count) return focusAt(other, by < 0 ? other.count - 1 : 0);
  return focusAt(list, Math.max(0, Math.min(list.count - 1, next)));
}

const KEYS = {
  j: () => step(1), ArrowDown: () => step(1), k: () => step(-1), ArrowUp: () => step(-1),
  r: () => here.agent && focusAt(chain.rows, chain.repairAfter(chain.rows.hasFocus ? chain.rows.activePlace() : -1)),
  g: () => focusAt(lists()[0], 0), G: () => focusAt(lists().at(-1), lists().at(-1).count - 1),
  "/": () => search.focus(), "?": () => help.showModal(), Escape: back,
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.target.matches("input, select")) {
    if (event.key === "Escape" && (here.query || event.target === search)) {
      event.target.blur();
      if (here.query) location.hash = before;
      event.preventDefault();
    } else if (event.key === "Enter" && event.target === search) {
      focusAt(lists().find((one) => one.count) || lists()[0], 0);
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

// --- the key

onKeyNeeded(() => {
  if (askKey.hidden) {
    askKey.hidden = false;
    at("key").focus();
  }
});
askKey.addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = at("key");
  const refused = at("key-refused");
  refused.hidden = true;
  try {
    await useKey(field.value.trim());
  } catch (fault) {
    refused.hidden = false;
    fill(refused, fault.status === 401 ? "The proxy refused this key." : fault.message);
    field.select();
    field.focus();
    return;
  }
  field.value = "";
  askKey.hidden = true;
  chains.refresh();
  overview.refresh();
  chain.close();
  go();
});

addEventListener("hashchange", go);
await go();
if (document.body.dataset.view === "chains") await overview.refresh(AT_ONCE); // whether it works is said before anything else
await chains.start(); // beside an agent's turns the other agents come second
overview.start();
asked.start();
