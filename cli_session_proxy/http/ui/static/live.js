// The turns that wait or run: what each does, since when, what it has said so far, and one button that ends it.

import { showAsked, tickAsked } from "./asking.js";
import { canceller, coarse, count, fill, h, whole } from "./dom.js";

export class Live {
  /** `place` holds a pane for each. */
  constructor(place, onFault) {
    Object.assign(this, { place, onFault });
    setInterval(() => this.tick(), 1000);
  }

  show(agentId, turns) {
    const panes = new Map([...this.place.children].map((one) => [one.dataset.turn, one]));
    for (const one of turns) {
      const pane = panes.get(one.turn_id) || this.place.appendChild(this.pane(agentId, one));
      panes.delete(one.turn_id);
      pane.dataset.doing = one.doing;
      fill(pane.querySelector(".doing"), one.says);
      const words = one.skipped + one.text.length;
      fill(pane.querySelector(".written"), words > 0 && ` · ${count(words, "character")}`,
        one.tokens_read > 0 && ` · ${count(one.tokens_read, "token")} read, ${whole(one.tokens_written)} written`);
      showAsked(pane.querySelector(".asks"), agentId, one.approvals || [], this.onFault);
      const said = pane.querySelector(".said-so-far");
      if (said.textContent === one.text) continue;
      const follows = said.scrollHeight - said.scrollTop - said.clientHeight < 24; // somebody who reads above stays there
      fill(said, one.text);
      if (follows) said.scrollTop = said.scrollHeight;
    }
    for (const pane of panes.values()) pane.remove();
    this.tick();
  }

  pane(agentId, { turn_id: id, at }) {
    const href = `#/${encodeURIComponent(agentId)}/${encodeURIComponent(id)}`;
    return h("div.pane", { "data-turn": id, "data-at": at },
      h("p.head", null, h("a.doing", { href }), h("span.quiet", null, h("span.elapsed"), h("span.written")), canceller(agentId, id, this.onFault)),
      h("div.asks"),
      h("p.said-so-far", { tabindex: "0", role: "group", "aria-label": "Its answer so far" }));
  }

  tick() {
    for (const pane of this.place.children) fill(pane.querySelector(".elapsed"), coarse(Date.now() / 1000 - pane.dataset.at));
    tickAsked(this.place);
  }
}
