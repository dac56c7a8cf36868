// Elements and texts. Every text of a conversation goes through textContent: nothing is ever parsed as HTML.

import { chainPath, post } from "./api.js";

/** h("p.note", {title: "…"}, "text", child, …): an element; false and null children are left out. */
export function h(kind, attributes, ...children) {
  const [name, ...classes] = kind.split(".");
  const element = document.createElement(name || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(key, value === true && !key.startsWith("data-") ? "" : String(value));
  }
  add(element, children);
  return element;
}

export function add(element, children) {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function fill(element, ...children) {
  element.textContent = "";
  add(element, children);
}

/** The same hue for the same session wherever it is shown. */
export function hueOf(id) {
  let hash = 2166136261;
  for (const char of id || "") hash = Math.imul(hash ^ char.charCodeAt(0), 16777619);
  // the golden angle spreads near hashes from teal to violet: red and amber mean something
  return 170 + (Math.round(((hash >>> 0) % 1000) * 137.508) % 140);
}

export function coloured(element, sessionId) {
  if (sessionId) {
    element.style.setProperty("--hue", hueOf(sessionId)); // through the CSSOM, which the CSP allows
    element.classList.add("coloured");
  }
  return element;
}

export function session(id) {
  if (!id) return h("span.quiet", null, "none");
  return coloured(h("span.session", { title: id }, id.slice(0, 8)), id);
}

/** A button that copies this text, and says so. */
export function copier(text, words) {
  const button = h("button.copy", { type: "button", title: text }, words);
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    fill(button, "copied");
    setTimeout(() => fill(button, words), 1500);
  });
  return button;
}

export function money(dollars) {
  if (!dollars) return "";
  return `$${dollars.toFixed(dollars < 0.1 ? 4 : 2)}`;
}

export function bytes(count) {
  for (const unit of ["B", "KB", "MB"]) {
    if (count < 1024) return `${count.toFixed(0)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} GB`;
}

export function millis(value) {
  if (value >= 60000) return `${(value / 60000).toFixed(1)} min`;
  return value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${Math.round(value)} ms`;
}

export function count(number, one, many = `${one}s`) {
  return `${whole(number)} ${number === 1 ? one : many}`;
}

// Numbers and times are written without the browser's own words for them: the first one of those takes it 15 ms, and much
// more on a busy machine.

/** 1234567 as 1,234,567. */
export function whole(number) {
  return String(number).replace(/\B(?=(\d{3})+$)/g, ",");
}

/** 1234567 as 1.2M. */
export function brief(number) {
  for (const unit of ["", "K", "M"]) {
    if (number < 999.5) return `${number < 100 ? Math.round(number * 10) / 10 : Math.round(number)}${unit}`;
    number /= 1000;
  }
  return `${Math.round(number * 10) / 10}B`;
}

const clock = (at) => at.toTimeString().slice(0, 8);
const inUtc = document.documentElement.dataset.times === "utc"; // the setting `timezone`
/** Its fields are those of the zone in which times are shown. */
const shown = (at) => (inUtc ? new Date(at.getTime() + at.getTimezoneOffset() * 60000) : at);
const exactly = (at) => `${at.toDateString()} ${clock(at)} ${inUtc ? "UTC" : at.toTimeString().slice(9, 17)}`;

/** A time for a row: the clock today, the day before that; the whole of it as the title. */
export function time(seconds) {
  if (!seconds) return h("time");
  const moment = new Date(seconds * 1000);
  const at = shown(moment);
  const today = at.toDateString() === shown(new Date()).toDateString();
  const text = today ? clock(at) : `${at.toDateString().slice(4, 10)} ${clock(at).slice(0, 5)}`;
  return h("time", { datetime: moment.toISOString(), title: exactly(at) }, text);
}

/** How long ago that was; the time itself as the title. */
export function ago(seconds) {
  if (!seconds) return h("time");
  const at = new Date(seconds * 1000);
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  const [one] = [[86400, "d"], [3600, "h"], [60, "min"]].filter(([length]) => passed >= length);
  const text = one ? `${Math.floor(passed / one[0])} ${one[1]} ago` : "just now";
  return h("time", { datetime: at.toISOString(), title: exactly(shown(at)) }, text);
}

/** A duration as somebody reads a clock: 8 s, 1:05, 2:03:40. */
export function coarse(seconds) {
  const all = Math.max(0, Math.round(seconds));
  if (all < 60) return `${all} s`;
  const two = (number) => String(number).padStart(2, "0");
  const rest = `${two(Math.floor(all / 60) % 60)}:${two(all % 60)}`;
  return all < 3600 ? rest.replace(/^0/, "") : `${Math.floor(all / 3600)}:${rest}`;
}

/** A button that does this when it is confirmed. `sure` says what it will do. */
export function confirmed(words, sure, yes, no, act) {
  const place = h("span.confirm");
  const ask = h("button", { type: "button" }, words);
  const agree = h("button", { type: "button" }, yes);
  const keep = h("button", { type: "button" }, no);
  ask.addEventListener("click", () => {
    fill(place, sure, " ", agree, " ", keep);
    keep.focus();
  });
  keep.addEventListener("click", () => {
    fill(place, ask);
    ask.focus();
  });
  agree.addEventListener("click", async () => {
    agree.disabled = keep.disabled = true;
    await act();
    agree.disabled = keep.disabled = false;
  });
  fill(place, ask);
  return place;
}

/** Ends a turn that waits or runs. */
export function canceller(agentId, turnId, onFault) {
  const place = confirmed("Cancel", "End this turn now? Its answer is not kept.", "Cancel the turn", "Let it run", async () => {
    try {
      await post(`${chainPath(agentId)}/cancel`, { turn: turnId });
      onFault(null);
    } catch (fault) {
      onFault(fault);
    }
  });
  place.classList.add("cancel");
  return place;
}

const STATES = { completed: "", new: "", requires_action: "waits for results" };

/** A turn's status in words; none where all is well. */
export function stateWords(status) {
  return STATES[status] ?? status;
}

export function badge(status) {
  const words = stateWords(status);
  return words && h("span.badge", { "data-state": status }, words);
}

/** What happened to a turn, in a few words. */
export function drawTold({ kind, says }) {
  return h("p.told", { "data-kind": kind }, h("strong", null, kind), " ", says);
}

export function short(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}
