// A list of any length, of which only what is near the window is drawn. Rows may differ in height: each is measured when it
// is drawn, and what is seen stays where it is while others are.

import { h } from "./dom.js";

const AROUND = 60; // rows that are drawn before and behind those that are seen
const NEAR = 20; // with fewer left, others are drawn
const BEFORE = 3; // rows before a linked one that are drawn with those that fill the window; others follow once it is painted
const LOWEST = 50; // px of a row, at least

export class Rows {
  /**
   * `scroller` is what scrolls, `list` the <ul> in it. Of each place in the list: `keyAt(place)` names its row for as long as
   * it lives, `stateAt(place)` is what it shows (drawn anew when it changes), `draw(a, place)` draws it. `onDrawn(from, to)`
   * is told which places are drawn.
   */
  constructor(scroller, list, { keyAt, stateAt, draw, onDrawn = () => {} }) {
    Object.assign(this, { scroller, list, keyAt, stateAt, draw, onDrawn });
    this.count = 0;
    this.clear();
    scroller.addEventListener("scroll", () => this.soon(), { passive: true });
    list.addEventListener("focusin", (event) => {
      const found = [...this.drawn].find(([, one]) => one.row === event.target);
      if (found) this.active = found[0];
    });
    let width = 0;
    new ResizeObserver(() => {
      if (list.clientWidth !== width) {
        width = list.clientWidth;
        this.widened = true;
      }
      this.dirty = true;
      this.soon();
    }).observe(scroller);
  }

  clear() {
    this.drawn = new Map(); // key -> {item, row, state, place}
    this.heights = new Map(); // key -> px, where it is not the usual
    this.usual = 0; // px
    this.from = this.to = 0; // the places that are drawn: from, and up to before
    this.active = null; // the key of the row that the keyboard is at
    this.widened = false; // the list has another width: no row is known to be as high as it was
    this.dirty = true;
    this.list.textContent = "";
  }

  /** There are so many; what is drawn is drawn as it is now. */
  update(count) {
    this.count = count;
    this.dirty = true;
    this.render();
  }

  /** There are so many, of which none is drawn: begin with those around this place, and bring it into sight. */
  begin(count, place) {
    this.count = count;
    this.from = Math.max(0, place - BEFORE);
    this.to = Math.min(count, place + Math.ceil(innerHeight / LOWEST));
    this.place();
    this.measure();
    this.scroller.scrollTop += this.list.getBoundingClientRect().top - this.scroller.getBoundingClientRect().top + this.topOf(place) - this.stickyHeight();
    this.dirty = true;
    this.soon((then) => requestAnimationFrame(() => setTimeout(then))); // once these are painted
  }

  soon(later = requestAnimationFrame) {
    if (this.waiting) return;
    this.waiting = true;
    later(() => {
      this.waiting = false;
      this.render();
    });
  }

  heightAt(place) {
    return this.heights.get(this.keyAt(place)) ?? (this.usual || 60);
  }

  /** px from the list's top to this place. */
  topOf(place) {
    const usual = this.usual || 60;
    if (!this.heights.size) return place * usual;
    let top = 0;
    for (let at = 0; at < place; at += 1) top += this.heightAt(at);
    return top;
  }

  placeAt(px) {
    const usual = this.usual || 60;
    if (!this.heights.size) return Math.min(this.count, Math.max(0, Math.floor(px / usual)));
    let top = 0;
    let place = 0;
    while (place < this.count && top + this.heightAt(place) <= px) {
      top += this.heightAt(place);
      place += 1;
    }
    return place;
  }

  render() {
    if (!this.count && !this.drawn.size) return; // nothing to be measured
    if (!this.scroller.offsetParent && !this.dirty) return;
    const seen = this.scroller.getBoundingClientRect();
    const top = this.list.getBoundingClientRect().top;
    const held = this.scroller.scrollTop > 0 && [...this.drawn.values()].find((one) => one.item.getBoundingClientRect().bottom > seen.top);
    let first = this.placeAt(Math.max(0, seen.top - top));
    let last = Math.min(this.count, this.placeAt(Math.max(0, seen.bottom - top)) + 1);
    if (this.widened && held) { // heights say nothing of where we are
      first = Math.min(held.place, this.count);
      last = Math.min(this.count, first + AROUND);
    }
    const near = first - NEAR >= this.from || this.from === 0;
    if (!this.dirty && near && (last + NEAR <= this.to || this.to === this.count)) return;
    this.dirty = false;
    this.from = Math.max(0, first - AROUND);
    this.to = Math.min(this.count, last + AROUND);
    // what is seen first stays where it is
    const was = held && held.item.getBoundingClientRect().top;
    const focused = document.activeElement;
    this.place();
    this.measure();
    if (held && held.item.isConnected) {
      const moved = held.item.getBoundingClientRect().top - was;
      if (Math.abs(moved) > 0.5) this.scroller.scrollTop += moved;
    }
    if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
    this.onDrawn(this.from, this.to);
  }

  /** The elements of all drawn places, in order; those that stay are not touched. */
  place() {
    const kept = new Map();
    let at = this.list.firstChild;
    for (let place = this.from; place < this.to; place += 1) {
      const key = this.keyAt(place);
      let one = this.drawn.get(key);
      if (!one) {
        const row = h("a.row", { tabindex: "-1" });
        one = { row, item: h("li", null, row), state: null };
      }
      const state = this.stateAt(place);
      if (one.state !== state) {
        this.draw(one.row, place);
        one.state = state;
      }
      one.place = place;
      one.item.setAttribute("aria-setsize", this.count);
      one.item.setAttribute("aria-posinset", place + 1);
      one.row.tabIndex = key === this.active || (this.active === null && place === 0) ? 0 : -1;
      kept.set(key, one);
      if (one.item === at) at = at.nextSibling;
      else this.list.insertBefore(one.item, at);
    }
    for (const [key, one] of this.drawn) if (!kept.has(key)) one.item.remove();
    this.drawn = kept;
    this.list.style.paddingTop = `${this.topOf(this.from)}px`;
    this.list.style.paddingBottom = `${this.below()}px`;
  }

  below() {
    if (!this.heights.size) return (this.count - this.to) * (this.usual || 60);
    let px = 0;
    for (let place = this.to; place < this.count; place += 1) px += this.heightAt(place);
    return px;
  }

  measure() {
    const sizes = [...this.drawn].map(([key, one]) => [key, one.item.getBoundingClientRect().height]);
    if (!sizes.length || !sizes[0][1]) return; // hidden
    if (!this.usual || this.widened) {
      this.widened = false;
      this.heights.clear();
      this.usual = sizes.map(([, px]) => px).sort((a, b) => a - b)[Math.floor(sizes.length / 2)];
      this.list.style.paddingTop = `${this.topOf(this.from)}px`;
      this.list.style.paddingBottom = `${this.below()}px`;
    }
    for (const [key, px] of sizes) {
      if (Math.abs(px - this.usual) > 0.5) this.heights.set(key, px);
      else this.heights.delete(key);
    }
  }

  // the keyboard

  /** The place of the row that has the keyboard, or had it last; -1 where none did. */
  activePlace() {
    const one = this.active === null ? null : this.drawn.get(this.active);
    if (one) return one.place;
    for (let place = 0; this.active !== null && place < this.count; place += 1) if (this.keyAt(place) === this.active) return place;
    return -1;
  }

  get hasFocus() {
    return this.list.contains(document.activeElement);
  }

  /** Bring this place into sight and draw it. */
  reveal(place, block = "nearest") {
    if (place < 0 || place >= this.count) return null;
    for (let tries = 0; tries < 3; tries += 1) { // what is drawn on the way may be higher than it was taken for
      const seen = this.scroller.getBoundingClientRect();
      const top = this.list.getBoundingClientRect().top + this.topOf(place) - seen.top;
      const bottom = top + this.heightAt(place);
      const head = this.stickyHeight();
      if (block === "nearest" && top >= head && bottom <= seen.height) break;
      const by = top < head || block === "start" ? top - head : bottom - seen.height;
      if (Math.abs(by) < 1) break;
      this.scroller.scrollTop += by;
      this.dirty = true;
      this.render();
    }
    if (place < this.from || place >= this.to) this.render();
    const one = this.drawn.get(this.keyAt(place));
    return one ? one.row : null;
  }

  /** What stands over the list while it scrolls (px). */
  stickyHeight() {
    const head = this.scroller.querySelector(".summary");
    return head && getComputedStyle(head).position === "sticky" ? head.offsetHeight : 0;
  }

  focus(place) {
    const row = this.reveal(place);
    if (!row) return;
    for (const one of this.drawn.values()) one.row.tabIndex = -1;
    this.active = this.keyAt(place);
    row.tabIndex = 0;
    row.focus({ preventScroll: true });
  }
}
