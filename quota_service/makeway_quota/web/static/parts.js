// Draws a new version of the changing part of a page: what stays keeps its element, its place and the focus. New lines of
// a list wait behind "12 new" where they would move what is being read.
"use strict";
(() => {
  const { live, onDraw } = window.Makeway;
  if (!live || !window.htmx) return;
  const IDLE = 120000; // a page that was not touched for so long shows the new lines by itself
  let morph = null;
  window.htmx.registerExtension("makeway", { init: (api) => { morph = api.morph; } });

  let touched = Date.now();
  for (const kind of ["pointermove", "pointerdown", "keydown", "wheel", "scroll", "touchstart"]) {
    addEventListener(kind, () => { touched = Date.now(); }, { passive: true, capture: true });
  }

  // -- lists ------------------------------------------------------------------------------------------------------
  const released = new Set(); // lists whose new lines were asked for
  const inside = (list) => {
    const selection = getSelection();
    return list.contains(document.activeElement) || list.matches(":hover")
      || (selection && !selection.isCollapsed && list.contains(selection.anchorNode));
  };
  const visible = (element) => {
    const box = element.getBoundingClientRect();
    return box.bottom > 0 && box.top < innerHeight && box.height > 0;
  };
  const whole = (list) => list.dataset.whole === "1";
  const mayMove = (shown, fresh) => {
    if (released.has(shown.id) || !shown.children.length) return true;
    if (inside(shown)) return false;
    if (!visible(shown)) return true;
    return whole(shown) && whole(fresh) && shown.dataset.list !== "log";
  };
  const keepLines = (content) => {
    for (const fresh of content.querySelectorAll("[data-list]")) {
      const shown = document.getElementById(fresh.id);
      if (!shown) continue;
      const lines = new Map([...fresh.children].map((line) => [line.id, line]));
      const before = [...shown.children];
      const known = new Set(before.map((line) => line.id));
      const waiting = [...lines.keys()].filter((id) => !known.has(id)).length;
      if (mayMove(shown, fresh)) continue;
      if (waiting && Date.now() - touched > IDLE) {
        touched = Date.now();
        shown.replaceChildren();
        continue;
      }
      fresh.replaceChildren(...before.map((line) => lines.get(line.id) ?? leftOver(line, fresh.dataset.list)));
      const button = content.getElementById(`new-${fresh.id}`);
      if (button && waiting) {
        button.hidden = false;
        button.textContent = `${waiting}${waiting === lines.size ? "+" : ""} new`;
      }
    }
  };
  const leftOver = (line, kind) => {
    const copy = line.cloneNode(true);
    if (kind !== "log") copy.classList.add("mw-gone");
    return copy;
  };

  // -- focus ------------------------------------------------------------------------------------------------------
  const device = (element) => element.dataset?.tip?.match(/^GPU \S+ on [^:\n]+/)?.[0] ?? "";
  const cells = () => [...live.querySelectorAll(".mw-cell")];
  const meaning = (element) =>
    [element.tagName, element.getAttribute("href"), element.form?.getAttribute("action"), element.tagName === "BUTTON" && !element.classList.contains("mw-new") ? element.textContent.trim() : ""].join("\n");
  const heading = (element) => element.closest("[aria-labelledby]")?.getAttribute("aria-labelledby");
  const focusOn = (element) => {
    if (!element) return;
    if (!element.matches("a, button, summary, [tabindex]")) element.tabIndex = -1;
    element.focus({ preventScroll: true });
  };
  const noted = () => {
    const active = document.activeElement;
    if (!active || active === live || !live.contains(active)) return null;
    return { active, meant: meaning(active), at: heading(active), device: device(active), label: active.getAttribute("aria-label") };
  };
  const refocus = ({ active, meant, at, device: key }) => {
    if (key) { // a GPU stays what it is, with another job or none; Enter never opens a job that was not there
      const cell = cells().find((each) => device(each) === key);
      const was = meant.split("\n")[1];
      const opens = cell?.getAttribute("href");
      if (cell && (!opens || opens === was)) { if (cell !== document.activeElement) focusOn(cell); return; }
    } else if (active.isConnected && live.contains(active) && meaning(active) === meant) {
      if (active !== document.activeElement) focusOn(active);
      return;
    }
    focusOn(document.getElementById(at) ?? document.querySelector("h1"));
  };

  // -- drawing ------------------------------------------------------------------------------------------------------
  let text = "";
  const draw = (body) => {
    text = body;
    const template = document.createElement("template");
    template.innerHTML = body;
    keepLines(template.content);
    released.clear();
    for (const time of template.content.querySelectorAll("time")) window.Makeway.tell?.(time);
    const focused = noted();
    live.dispatchEvent(new CustomEvent("makeway:before", { bubbles: true }));
    morph(live, template.content, true);
    if (focused) refocus(focused);
    live.dispatchEvent(new CustomEvent("makeway:after", { bubbles: true }));
  };
  onDraw(draw);

  document.addEventListener("click", (event) => {
    const button = event.target.closest?.(".mw-new");
    if (!button || !text) return;
    const list = button.id.slice("new-".length);
    released.add(list);
    draw(text);
    focusOn(document.getElementById(list)?.closest("section")?.querySelector("h2"));
    document.getElementById(list)?.scrollTo?.({ top: 0 });
  });
})();
