// Tools that wait for a person's word: what each of them is to do, how it is answered, and that one waits at all.

import { chainPath, get, post } from "./api.js";
import { coarse, count, fill, h } from "./dom.js";

const PATH = "/v1/approvals";
const EVERY = 3000;

/** The cards of one pane: those that are there stay as they are, with what is typed in them. */
export function showAsked(place, agentId, asked, onFault) {
  const cards = new Map([...place.children].map((one) => [one.dataset.id, one]));
  for (const one of asked) {
    if (!cards.delete(one.id)) place.append(card(agentId, one, onFault));
  }
  for (const gone of cards.values()) gone.remove();
}

export function tickAsked(place) {
  for (const one of place.querySelectorAll(".ask")) fill(one.querySelector(".left"), coarse(one.dataset.until - Date.now() / 1000));
}

function card(agentId, one, onFault) {
  const button = (words, kind) => h("button", { type: kind }, words);
  const once = button("Allow once", "button");
  const turn = button(`Allow ${one.tool} for this turn`, "button");
  const no = button("Deny", "submit");
  const word = h("input", { name: "word", autocomplete: "off", maxlength: "2000", "aria-label": "What the model is told", placeholder: "Say why, or what to do instead" });
  const wish = h("pre.wish", { tabindex: "0", role: "group", "aria-label": `What ${one.tool} is to do` });
  const form = h("form.ask", { "data-id": one.id, "data-until": one.until, "aria-label": `${one.tool} waits for your approval` },
    h("p", null, h("strong", null, one.tool), one.sub_agent ? " of a sub-agent" : "", " waits for your approval", h("span.quiet", null, ", ", h("span.left"), " left")),
    one.before && h("p.before", null, "The same call was allowed in an earlier attempt of this turn: it may have run already."),
    wish, h("p.answers", null, once, turn, word, no));
  const draw = (text) => fill(wish, ...text.split("\n").map((line) => h("span", { "data-line": one.kind === "diff" && line[0] }, `${line}\n`)));
  const answer = async (decision) => {
    once.disabled = turn.disabled = no.disabled = true;
    try {
      await post(`${chainPath(agentId)}/approve`, { approval: one.id, decision, word: decision === "deny" && word.value ? word.value : null });
      onFault(null);
    } catch (fault) {
      onFault(fault);
      once.disabled = turn.disabled = no.disabled = false;
    }
  };
  once.addEventListener("click", () => answer("allow"));
  turn.addEventListener("click", () => answer("allow_for_turn"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    answer("deny");
  });
  draw(one.text);
  if (one.left_out) { // nobody allows what they have not been shown
    once.disabled = turn.disabled = true;
    const all = button(`Show ${count(one.left_out, "more character")}`, "button");
    all.addEventListener("click", async () => {
      try {
        const whole = (await get(PATH)).data.find((other) => other.id === one.id);
        if (!whole || whole.text === null) return;
        draw(whole.text);
        all.remove();
        once.disabled = turn.disabled = false;
      } catch (fault) {
        onFault(fault);
      }
    });
    wish.after(h("p", null, all));
  }
  return form;
}

/** Says on every view that something waits. Asks nothing more where no profile has `approve`. */
export class Asked {
  constructor(place, { onCount, onFault }) {
    Object.assign(this, { place, onCount, onFault });
    this.known = new Set();
  }

  async start() {
    try {
      const told = await get(PATH);
      if (!told.enabled) return;
      this.show(told.data);
      this.onFault(null);
    } catch (fault) {
      this.onFault(fault);
    }
    setTimeout(() => this.start(), EVERY);
  }

  show(asked) {
    const ids = JSON.stringify(asked.map((one) => one.id));
    if (this.shown === ids) return;
    this.shown = ids;
    const fresh = asked.filter((one) => !this.known.has(one.id));
    this.known = new Set(asked.map((one) => one.id));
    this.place.hidden = !asked.length;
    fill(this.place, `${count(asked.length, "tool")} ${asked.length === 1 ? "waits" : "wait"} for your approval: `,
      ...asked.flatMap((one) => [h("a", { href: `#/${encodeURIComponent(one.agent_id)}` }, h("span", null, one.tool), " in ", h("span", null, one.agent_id)), " "]), notifier());
    this.onCount(asked.length);
    if (document.hidden && fresh.length && "Notification" in window && Notification.permission === "granted") {
      new Notification(`${fresh[0].tool} waits for your approval`, { body: `in ${fresh[0].agent_id}`, tag: "cli-session-proxy-approval" });
    }
  }
}

/** A button that asks the browser whether it may tell. */
function notifier() {
  if (!("Notification" in window) || Notification.permission !== "default") return false;
  const ask = h("button", { type: "button" }, "Notify me");
  ask.addEventListener("click", async () => {
    await Notification.requestPermission();
    ask.remove();
  });
  return ask;
}
