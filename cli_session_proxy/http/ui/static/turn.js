// One turn, whole: what was said, why it ran where it ran, what it took, and whether the transcript agrees.

import { blob, chainPath, get, post } from "./api.js";
import { badge, bytes, coloured, confirmed, copier, count, drawTold, fill, h, millis, money, session, short, time, whole } from "./dom.js";
import { Live } from "./live.js";
import { markdown } from "./markdown.js";
import { turnPath } from "./where.js";

// The way of a turn, in order; each part of the bar ends at its step.
const STEPS = ["queued", "session_ready", "first_block", "result", "committed"];
const STEP_NAMES = {
  queued: "queued", session_ready: "session made ready", first_block: "until the first word",
  result: "answering", committed: "committed",
};
const FOUND = {
  equal: "the session's transcript is the chain's path, record for record",
  busy: "a turn is writing this session",
  different: "the next turn repairs it from the chain",
  none: "no session holds this turn: it was imported, or it failed",
};
// How a turn came to the chain, where it was not simply asked for.
const ORIGIN = {
  imported: "the history that a client sent", adopted: "a person who used the session by hand",
};
const SLOW = 400; // ms after which an empty pane says why
const HIDDEN = "[redacted]"; // as redact.py puts it
const LONG = 4000; // characters of one text that are shown at once
const MORE = 200000; // and when somebody asks for more of it
const LONGEST_FORMATTED = 50000; // characters of an answer that are shown as Markdown

export class TurnView {
  constructor(section, { onFault, onRewound, onPlace }) {
    this.section = section;
    Object.assign(this, { onFault, onRewound, onPlace });
    this.now = h("div.now");
    this.live = new Live(this.now, onFault);
    this.addresses = []; // of images, to be given up with the turn
    this.asked = 0;
  }

  close() {
    this.asked += 1;
    this.shown = null;
    this.agentId = null;
    this.onFault(null);
    this.section.hidden = true;
  }

  /** `bare`: with the secrets that were said, for this once. A turn that changes while it is open keeps how it is. */
  async open(agentId, turnId, bare = this.shown === turnId && this.bare) {
    const asked = ++this.asked;
    if (this.agentId !== agentId) fill(this.section); // nothing of one agent stays under the name of another
    this.agentId = agentId;
    const path = turnPath(agentId, turnId);
    const slow = setTimeout(() => { // megabytes, or a busy machine
      if (asked !== this.asked || this.shown === turnId) return;
      this.section.hidden = false;
      fill(this.section, h("p.quiet", { role: "status" }, "Loading this turn…"));
    }, SLOW);
    try {
      const found = await get(bare ? `${path}?redact=0` : path);
      if (asked !== this.asked) return;
      const again = this.shown === turnId;
      this.bare = bare;
      const top = again ? this.section.scrollTop : 0;
      const unfolded = again ? [...this.section.querySelectorAll("details[data-part]")].filter((one) => one.open).map((one) => one.dataset.part) : [];
      for (const address of this.addresses.splice(0)) URL.revokeObjectURL(address);
      this.draw(agentId, found);
      for (const one of this.section.querySelectorAll("details[data-part]")) one.open = unfolded.includes(one.dataset.part);
      this.section.hidden = false;
      if (this.used) this.section.scrollTop = top; // else it is at its top: to be told so, it would be laid out now
      this.used = true;
      this.shown = turnId;
      this.onFault(null);
      await this.onPlace(found.number, again); // what follows reads the whole path: the list comes first
      if (asked !== this.asked || !answered(found.turn)) return;
      if (found.turn.session_id) {
        const seen = await get(`${path}/seen`);
        if (asked === this.asked && seen.verdict) this.drawSeen(agentId, seen);
      }
    } catch (fault) {
      if (asked !== this.asked) return;
      if (fault.status === 404) this.drawMissing(agentId, fault);
      else this.onFault(fault);
    } finally {
      clearTimeout(slow);
    }
  }

  drawMissing(agentId, fault) {
    this.shown = null;
    this.section.hidden = false;
    fill(this.section, h("h2", null, "No such turn"), h("p", null, fault.message), h("p", null,
      h("a", { href: `#/${encodeURIComponent(agentId)}` }, "The turns of this agent"), " · ", h("a", { href: "#/" }, "All agents")));
  }

  draw(agentId, { turn, links, told, number, numbers, children, is_head: isHead, placed, waterfall: fell }) {
    const to = (id) => h("a", { href: `#/${encodeURIComponent(agentId)}/${encodeURIComponent(id)}`, title: id },
      numbers[id] ? `#${numbers[id]}` : id.slice(0, 13));
    const image = (one) => this.thumbnail(agentId, turn.id, one);
    const others = children.length > 1 ? ` (${children.length} branches)` : "";
    const took = turn.finished_at && turn.started_at && millis(1000 * (turn.finished_at - turn.started_at));
    const compare = h("details.transcript", { "data-part": "transcript" }, h("summary", null, "Chain and session file"), h("div"));
    compare.addEventListener("toggle", () => this.compare(agentId, turn.id, compare), { once: true });
    const json = folded("JSON"); // megabytes, if the turn has them: only for who looks
    json.addEventListener("toggle", () => json.append(h("pre", null, JSON.stringify(turn, null, 1))), { once: true });
    fill(
      this.section,
      h("h2", null, `Turn ${number} `, badge(turn.status), " ", isHead && h("span.badge.head", null, "head"), h("span.verdict")),
      h("p.facts", null, [turn.answered_by || turn.model, time(turn.created_at), took, money(turn.cost_usd)].flatMap((one) => (one ? [h("span", null, one)] : []))),
      ...told.map(drawTold),
      part("Input", ...turn.input.map((message) => said(message.role, message.content, image))),
      ["queued", "running"].includes(turn.status) && this.now,
      turn.tools.length > 0 && part("Tools of the CLI", ...turn.tools.map((one) => tool(one, image))),
      turn.output.length > 0 && part("Output", said("assistant", turn.output, image)),
      turn.error && h("div.error", null, turn.error.message || short(turn.error)),
      h("p.acts", null, this.switchOf(agentId, turn), answered(turn) && !isHead && this.rewindTo(agentId, turn)),
      turn.system && folded("System", text(turn.system)),
      folded("Details",
        facts([
          ["id", h("code", null, turn.id)],
          ["model", [turn.model, turn.effort && `, effort ${turn.effort}`, turn.profile && `, profile ${turn.profile}`,
            turn.backend && turn.backend !== "claude" && `, answered by ${turn.answered_by} (${turn.backend})`]],
          ...Object.entries(turn.metadata || {}).map(([name, value]) => [name, short(value)]),
          ["session", turn.session_id && coloured(h("code.session", null, turn.session_id), turn.session_id)],
          ["accepted", time(turn.created_at)],
          ["continues", turn.parent_id ? to(turn.parent_id) : neverBegan(turn) ? "undecided: it never began" : "nothing: a new start"],
          ["continued by", children.length ? [...children.flatMap((id) => [to(id), " "]), others] : "nothing yet"],
          ["came from", ORIGIN[turn.origin] || `a request (${turn.origin})`],
          ["answer", turn.output.length || !turn.error ? turn.delivery : "none"],
        ]),
        ...links.map((link) => h("div.evidence", { "data-reason": link.reason }, h("p", null, link.says),
          h("p.quiet", null, session(link.from_session), " → ", session(link.to_session), " ", time(link.at)),
          facts(Object.entries(link.detail).map(([name, value]) => [name.replaceAll("_", " "), short(value)])))),
        ...turn.says.map((one) => h("p.evidence", null, one)),
        ...placed.map((one) => h("p.placed", null, one)),
        facts(Object.entries(turn.reason).map(([name, value]) => [name.replaceAll("_", " "), reason(value)])),
        ...(turn.attempts.length > 1 ? turn.attempts : []).map((one) => h("pre", null, JSON.stringify(one)))),
      folded("Time and tokens", timings(turn), fell.some((one) => one.kind !== "step") && waterfall(fell), tokens(turn)),
      answered(turn) && [h("details.seen", { hidden: true }), compare],
      json,
    );
  }

  /** An image that was said, small; it opens whole. It is asked for with the key, and is gone with the turn. */
  thumbnail(agentId, turnId, { sha256, media_type: kind, bytes: size }) {
    const words = `${kind}, ${bytes(size)}`;
    const place = h("figure.thumbnail", null, h("figcaption.quiet", { title: `sha256 ${sha256}` }, words));
    blob(`${turnPath(agentId, turnId)}/images/${sha256}`).then((address) => {
      this.addresses.push(address);
      const picture = h("img", { src: address, alt: `image, ${words}` });
      const link = h("a", { href: address, target: "_blank", rel: "noopener" }, picture);
      picture.addEventListener("error", () => link.remove()); // what no browser can draw stays words
      place.prepend(link);
    }, (fault) => fault.status !== 404 && this.onFault(fault));
    return place;
  }

  /** Hides and shows what was said of secrets, where there are some. */
  switchOf(agentId, turn) {
    const hides = JSON.stringify([turn.system, turn.input, turn.output, turn.tools]).includes(HIDDEN);
    if (!hides && !this.bare) return null;
    const button = h("button.secrets", { type: "button" }, this.bare ? "Hide secrets" : "Show hidden secrets");
    button.addEventListener("click", () => this.open(agentId, turn.id, !this.bare));
    return button;
  }

  /** Takes what follows this turn off the path, when it is confirmed. */
  rewindTo(agentId, turn) {
    const sure = "Take all turns after this one off the path? They stay in the chain, and the next turn continues this one.";
    return h("span.rewind", null, confirmed("Rewind to this turn", sure, "Rewind", "Keep", async () => {
      try {
        await post(`${chainPath(agentId)}/rewind`, { to: turn.id });
        this.onRewound(agentId, turn.id);
      } catch (fault) {
        this.onFault(fault);
      }
    }));
  }

  /** What the opened turn does just now, and what it has said so far. */
  progress(turns) {
    this.live.show(this.agentId, turns.filter((one) => one.turn_id === this.shown));
  }

  /** What the model was sent, and in one line whether all of the path was in it. */
  drawSeen(agentId, seen) {
    const to = (id) => h("a", { href: `#/${encodeURIComponent(agentId)}/${encodeURIComponent(id)}` }, id);
    const left = seen.total - seen.messages.length;
    const verdict = this.section.querySelector(".verdict");
    verdict.dataset.forgotten = seen.forgotten;
    const [kept, ...more] = seen.verdict.split("; ");
    fill(verdict, kept);
    const place = this.section.querySelector(".seen");
    place.hidden = false;
    place.open = seen.forgotten;
    fill(place, h("summary", null, `What the model saw: ${count(seen.total, "block")}`),
      more.length > 0 && h("p.quiet", null, more.join("; ")),
      seen.missing.length > 0 && h("p", null, "not sent: ", ...seen.missing.slice(0, 20).flatMap((id) => [to(id), " "])),
      left > 0 && h("p.quiet", null, `${count(left, "earlier block")} not shown here`),
      ...seen.messages.map((one) => h("div.said", { "data-role": one.role }, h("span.role", null, one.role), text(one.text))));
  }

  /** The session's file beside the chain: asked for when somebody wants to know, as it reads the whole path. */
  async compare(agentId, turnId, place) {
    try {
      const compared = await get(`${turnPath(agentId, turnId)}/transcript`);
      if (place.isConnected) drawTranscript(place.querySelector("div"), compared);
    } catch (fault) {
      this.onFault(fault);
    }
  }
}

function drawTranscript(place, compared) {
  const { found } = compared;
  const rows = compared.records.map((row) => h("tr", { "data-state": row.state },
    h("td", { title: row.uuid }, row.kind),
    h("td", null, row.state),
    h("td", null, row.chain !== null && h("pre", { title: "in the chain" }, row.chain),
      row.file !== null && h("pre.file", { title: "in the session's file" }, row.file))));
  fill(
    place,
    h("p", null, h("span.badge", null, found), " ", FOUND[found]),
    ...compared.differences.map((one) => h("p.evidence", null, h("strong", null, one.kind), " ", one.text)),
    compared.transcript && h("p.quiet", null, h("code", null, compared.transcript)),
    compared.by_hand && h("p.by-hand", null, h("span.quiet", null, "continue by hand: "), h("code", null, compared.by_hand), " ", copier(compared.by_hand, "Copy")),
    rows.length > 0 && h("details", found === "different" ? { open: true } : null,
      h("summary", null, `${count(compared.total, "record")} of this turn${compared.total > rows.length ? `, ${rows.length} shown` : ""}`), h("table.records", null, h("tbody", null, ...rows))),
  );
}

function answered(turn) {
  return ["completed", "requires_action"].includes(turn.status);
}

/** It was to continue the head, and ended or waits before it was known which turn that is. */
function neverBegan(turn) {
  return !turn.started_at && turn.reason.rule === "head";
}

function part(title, ...children) {
  return h("section", { "aria-label": title }, ...children);
}

function folded(title, ...children) {
  return h("details.part", { "data-part": title }, h("summary", null, title), ...children);
}

function facts(rows) {
  return h("dl.facts", null, ...rows.flatMap(([name, value]) => [h("dt", null, name), h("dd", null, ...[value].flat())]));
}

function reason(value) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return short(value);
  return facts(Object.entries(value).map(([name, inner]) => [name.replaceAll("_", " "), short(inner)]));
}

/** A message with a button that copies its words; what a model wrote is shown as it means it, or as it is written. */
function said(role, blocks, image) {
  const words = blocks.filter((one) => one.type === "text").map((one) => one.text).join("\n\n");
  const formatted = role === "assistant" && words && words.length <= LONGEST_FORMATTED;
  const body = h("div", null);
  const show = (plain) => fill(body, ...blocks.map((one) => (formatted && !plain && one.type === "text"
    ? h("div.text.markdown", null, ...markdown(one.text)) : block(one, image))));
  const asWritten = formatted && h("button.copy", { type: "button", "aria-pressed": "false" }, "As written");
  if (asWritten) {
    asWritten.addEventListener("click", () => {
      const plain = asWritten.getAttribute("aria-pressed") === "false";
      asWritten.setAttribute("aria-pressed", String(plain));
      show(plain);
    });
  }
  show(false);
  return h("div.said", { "data-role": role }, h("p.head", null, h("span.role", null, role), " ", words && copier(words, "Copy"), " ", asWritten), body);
}

function block(one, image) {
  if (one.type === "text") return text(one.text);
  if (one.type === "thinking") return h("details", null, h("summary", null, "thinking"), text(one.thinking || ""));
  if (one.type === "image" && one.sha256) return image(one);
  if (one.type === "tool_use" || one.type === "tool_result") return tool(one, image);
  return h("pre", null, JSON.stringify(one, null, 1));
}

function text(words, most = LONG) {
  if (words.length <= most) return h("div.text", null, words);
  const space = words.lastIndexOf(" ", most);
  const end = space > most / 2 ? space + 1 : most; // not in the middle of a word, where there are any
  const rest = h("details", null, h("summary", null, `${whole(words.length - end)} more characters`));
  rest.addEventListener("toggle", () => rest.append(text(words.slice(end), MORE)), { once: true }); // megabytes at once take seconds
  return h("div", null, h("div.text", null, words.slice(0, end)), rest);
}

/** A call or its result, the client's or the CLI's own; what is neither, as JSON. */
function tool(entry, image) {
  const id = entry.id || entry.tool_use_id;
  const named = entry.type === "tool_use" ? `calls ${entry.name}` : entry.type === "tool_result" ? "result" : entry.name || entry.type;
  return h("details.tool", { open: true, "data-type": entry.type }, h("summary", null, h("strong", null, named || "tool"), " ",
    entry.is_error && h("span.badge", { "data-state": "failed" }, "error"), " ", id && h("code.quiet", null, id)), toolBody(entry, image));
}

function toolBody(entry, image) {
  if (entry.type === "tool_use") return h("pre", null, JSON.stringify(entry.input, null, 1));
  if (entry.type !== "tool_result") return h("pre", null, JSON.stringify(entry, null, 1));
  if (Array.isArray(entry.content)) return h("div", null, ...entry.content.map((one) => block(one, image)));
  return text(typeof entry.content === "string" ? entry.content : JSON.stringify(entry.content ?? ""));
}

function timings(turn) {
  const known = STEPS.filter((step) => typeof turn.timings[step] === "number");
  if (!known.length) return h("p.quiet", null, "not measured");
  const total = Math.max(turn.timings[known[known.length - 1]], 1);
  let before = 0;
  const parts = known.map((step) => {
    const took = Math.max(0, turn.timings[step] - before);
    before = turn.timings[step];
    return { step, took };
  });
  const bar = h("div.bar", { role: "img", "aria-label": `${millis(total)} in all` });
  for (const { step, took } of parts) {
    const piece = h("span", { "data-step": step, title: `${STEP_NAMES[step]}: ${millis(took)}` });
    piece.style.flexGrow = took / total;
    bar.append(piece);
  }
  const legend = parts.map(({ step, took }) => h("span.step", { "data-step": step }, `${STEP_NAMES[step]} ${millis(took)}`));
  const retries = (turn.reason.retries || []).length;
  return h("div", null, bar, h("p.legend", null, ...legend, h("span", null, `${millis(total)} in all`),
    retries > 0 && h("span", null, `${count(retries, "retry", "retries")} of the provider's API`)));
}

/** What happened within a turn, each below the one before it, as long as it took. */
function waterfall(fell) {
  const end = Math.max(1, ...fell.map((one) => one.to ?? one.from));
  const kinds = { step: (one) => STEP_NAMES[one.name] || one.name, attempt: (one) => `attempt ${one.name}`, tool: (one) => one.name, retry: (one) => one.name };
  const rows = [...fell].sort((a, b) => a.from - b.from).map((one) => {
    const bar = h("span.fall", { "data-kind": one.kind, "data-failed": one.failed });
    bar.style.marginLeft = `${(100 * one.from) / end}%`;
    bar.style.width = `${Math.max(0.5, (100 * ((one.to ?? one.from) - one.from)) / end)}%`;
    const took = one.to === null ? `at ${millis(one.from)}` : millis(one.to - one.from);
    return h("li", null, h("span.what", { title: one.why || null }, kinds[one.kind](one), one.failed && one.kind !== "retry" && " (failed)"),
      h("span.track", { "aria-hidden": "true" }, bar), h("span.took", null, took));
  });
  return h("ol.waterfall", null, ...rows);
}

function tokens(turn) {
  const { usage } = turn;
  return facts([
    ["new", whole(usage.input_tokens)],
    ["read from the cache", whole(usage.cache_read_tokens)],
    ["written to the cache", whole(usage.cache_write_tokens)],
    ["share of the prompt read from the cache", usage.cache_share === null ? "–" : `${Math.floor(100 * usage.cache_share)} %`],
    ["answer", [whole(usage.output_tokens), usage.thinking_tokens ? ` (thinking ${usage.thinking_tokens})` : ""]],
    ["cost", money(turn.cost_usd)],
  ]);
}
