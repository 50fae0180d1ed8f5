// What a page of Makeway does besides keeping fresh (live.js, parts.js): times, tooltips, forms, the heat map, a job's
// output.
// Without it every page still works; it only stands still.
"use strict";
(() => {
  const { live, prefix, xsrf } = window.Makeway;

  // -- times --------------------------------------------------------------------------------------------------
  const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const span = (seconds) => { // the two largest units, as the server writes durations: 1 min 30 s
    const whole = Math.max(0, Math.round(seconds));
    const at = UNITS.findIndex(([, length]) => whole >= length);
    if (at < 0 || at === UNITS.length - 1) return `${whole} s`;
    const [[unit, length], [smaller, part]] = [UNITS[at], UNITS[at + 1]];
    const rest = Math.floor((whole % length) / part);
    return `${Math.floor(whole / length)} ${unit}${rest ? ` ${rest} ${smaller}` : ""}`;
  };
  // The browser's clock may be wrong: by how much, the page's own time tells.
  const sent = Number(document.querySelector("meta[name=makeway-now]")?.content) * 1000;
  const ahead = sent ? Date.now() - sent : 0;
  const tell = (time) => {
    const now = Date.now() - ahead;
    const at = Date.parse(time.dateTime);
    const words = {
      ago: () => `${span((now - at) / 1000)} ago`,
      for: () => span((now - at) / 1000),
      in: () => `in ${span((at - now) / 1000)}`,
      clock: () => {
        const day = Math.abs(now - at) < 72e6 ? {} : { year: "numeric", month: "short", day: "numeric" };
        return new Date(at).toLocaleString([], { ...day, hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
      },
    }[time.dataset.style]?.();
    if (words && time.textContent !== words) time.textContent = words;
  };
  window.Makeway.tell = tell;
  const tick = () => document.querySelectorAll("time[data-style]").forEach(tell);
  tick();
  setInterval(tick, 1000);

  // -- tooltips -----------------------------------------------------------------------------------------------
  const tip = document.getElementById("mw-tip");
  let shownFor = null;
  const hide = () => {
    tip.hidden = true;
    shownFor = null;
    for (const cell of document.querySelectorAll(".mw-cell.same")) cell.classList.remove("same");
    live?.classList.remove("mw-picking");
  };
  const show = (element) => {
    if (shownFor === element) return;
    hide();
    shownFor = element;
    draw(element);
  };
  const draw = (element) => {
    tip.textContent = element.dataset.tip;
    tip.hidden = false;
    const box = element.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left + box.width / 2 - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 8);
    const above = box.top - tip.offsetHeight - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 4 ? above : box.bottom + 8}px`;
    const workload = element.dataset.w;
    if (workload) {
      live?.classList.add("mw-picking");
      for (const cell of document.querySelectorAll(`.mw-cell[data-w="${CSS.escape(workload)}"]`)) cell.classList.add("same");
    }
  };
  const tipped = (event) => {
    const cut = event.target.closest?.(".mw-two"); // a sentence that is longer than its two lines
    if (cut && cut.scrollHeight > cut.clientHeight + 2) cut.dataset.tip = cut.textContent.trim().replace(/\s+/g, " ");
    return event.target.closest?.("[data-tip]");
  };
  for (const kind of ["mouseover", "focusin"]) {
    document.addEventListener(kind, (event) => { const found = tipped(event); if (found) show(found); else hide(); });
  }
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  document.addEventListener("keydown", (event) => { // a question is answered with no
    const no = event.key === "Escape" && document.querySelector("a[data-escape]");
    if (!no) return;
    event.preventDefault(); // else the browser stops loading what is opened here
    no.click();
  });
  // A scroll takes away what the pointer showed; what has the focus keeps its tooltip, at its new place.
  addEventListener("scroll", () => {
    const focused = shownFor && shownFor === document.activeElement;
    if (focused && shownFor.dataset.tip) draw(shownFor);
    else if (!focused) hide();
  }, { passive: true });

  // -- forms: a double click does one thing, also where the answer to its first click has the next button at that place --
  const SENDS = 10000; // so long one form of a page is on its way at most; afterwards it may be sent again
  let sentAt = -SENDS;
  const isChange = (form) => form?.method === "post";
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("button[type=submit]");
    if (button && event.detail > 1 && isChange(button.form)) event.preventDefault();
  });
  document.addEventListener("submit", (event) => {
    if (event.defaultPrevented || !isChange(event.target)) return;
    if (performance.now() - sentAt < SENDS) event.preventDefault();
    else sentAt = performance.now();
  });
  addEventListener("pageshow", () => { sentAt = -SENDS; });

  // -- the heat map: which node is under the pointer, or chosen with the arrow keys --------------------------------
  const nodeAt = (map, event) => {
    const box = map.getBoundingClientRect();
    const scale = map.viewBox.baseVal.width / box.width;
    const { wide, tall, columns } = map.dataset;
    const column = Math.floor(((event.clientX - box.left) * scale) / wide);
    const row = Math.floor(((event.clientY - box.top) * scale) / tall);
    return column < columns ? row * columns + column : -1;
  };
  const lineOf = (map, at) => map.dataset.nodes.split("\n")[at];
  const openNode = (map, at) => {
    const line = lineOf(map, at);
    if (line) location.href = `${prefix}nodes/${encodeURIComponent(line.split(" ")[0])}`;
  };
  const pointAt = (map, at, left, top) => {
    const line = lineOf(map, at);
    if (!line) { hide(); return; }
    shownFor = map;
    pointed = { at, left, top };
    tip.textContent = line;
    tip.hidden = false;
    tip.style.left = `${Math.min(left + 12, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(top + 14, innerHeight - tip.offsetHeight - 8)}px`;
  };
  const heat = (event) => event.target.closest?.(".mw-heat");
  document.addEventListener("mousemove", (event) => {
    const map = heat(event);
    if (map) pointAt(map, nodeAt(map, event), event.clientX, event.clientY);
    else if (shownFor?.classList?.contains("mw-heat")) hide();
  });
  document.addEventListener("click", (event) => { const map = heat(event); if (map) openNode(map, nodeAt(map, event)); });
  let pointed = null; // what the pointer or the arrow keys chose of which map: shown again after a refresh
  const chosen = new Map(); // a map's position by its label: the element itself may be replaced by a refresh
  const mark = (map, at) => {
    map.querySelector(".cursor")?.remove();
    const { wide, tall, columns } = map.dataset;
    const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const [x, y] = [(at % columns) * wide - 2, Math.floor(at / columns) * tall - 2];
    for (const [name, value] of Object.entries({ class: "cursor", x, y, width: wide - 1, height: tall - 1 })) rect.setAttribute(name, value);
    map.append(rect);
    const box = map.getBoundingClientRect();
    const scale = box.width / map.viewBox.baseVal.width;
    pointAt(map, at, box.left + x * scale, box.top + (y + Number(tall)) * scale);
  };
  document.addEventListener("keydown", (event) => {
    const map = heat(event);
    if (!map) return;
    const columns = Number(map.dataset.columns);
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    const key = map.getAttribute("aria-label").split(":")[0];
    const at = chosen.get(key) ?? 0;
    if (event.key === "Enter") openNode(map, at);
    if (step === undefined) return;
    event.preventDefault();
    const next = chosen.has(key) ? at + step : 0;
    if (lineOf(map, next) === undefined || next < 0) return;
    chosen.set(key, next);
    mark(map, next);
  });

  // -- a new version keeps the tooltip and what it marks ------------------------------------------------------------
  const cells = () => [...live.querySelectorAll(".mw-cell")];
  let shownAt = -1; // the cell of the tooltip: a new version may use its element for another cell
  document.addEventListener("makeway:before", () => { shownAt = shownFor ? cells().indexOf(shownFor) : -1; });
  document.addEventListener("makeway:after", () => {
    if (shownFor && shownAt >= 0) shownFor = cells()[shownAt] ?? shownFor;
    const again = shownFor;
    if (again?.classList.contains("mw-heat")) {
      const map = again.isConnected ? again : null;
      if (!map) { hide(); return; }
      const at = chosen.get(map.getAttribute("aria-label").split(":")[0]);
      if (document.activeElement === map && at !== undefined) mark(map, at);
      else pointAt(map, pointed.at, pointed.left, pointed.top);
    } else if (again) {
      if (again.isConnected && again.dataset.tip) {
        for (const cell of live.querySelectorAll(".mw-cell.same")) cell.classList.remove("same");
        live.classList.remove("mw-picking");
        draw(again);
      } else hide();
    }
  });

  // -- a job's output -----------------------------------------------------------------------------------------
  const output = document.getElementById("mw-output");
  const follow = document.getElementById("mw-follow");
  const MAX_LENGTH = 2 ** 20;
  const append = (text) => {
    document.getElementById("mw-no-output")?.remove();
    output.append(text);
    if (output.textContent.length > MAX_LENGTH) output.textContent = output.textContent.slice(-MAX_LENGTH / 2);
    if (follow?.checked) output.scrollTop = output.scrollHeight;
  };
  const read = async () => {
    const { url } = output.dataset;
    let attempt = Number(output.dataset.attempt);
    let offset = Number(output.dataset.offset);
    let ended = output.dataset.eof === "1";
    let pause = 0;
    for (;;) {
      if (pause) await new Promise((done) => setTimeout(done, pause));
      if (document.hidden) { pause = 1000; continue; }
      try {
        const ask = ended ? `attempt=${attempt + 1}&offset=0` : `attempt=${attempt}&offset=${offset}`;
        const answer = await fetch(`${url}?${ask}&wait=20`, { headers: { "X-XSRFToken": xsrf } });
        if (!answer.ok) { pause = 5000; continue; }
        const chunk = await answer.json();
        if (ended && chunk.text) {
          attempt = chunk.attempt;
          append(`\n── attempt ${attempt} ──\n`);
          ended = false;
        }
        if (chunk.text) append(chunk.text);
        if (!ended) { offset = chunk.next_offset; ended = chunk.eof; }
        pause = chunk.text ? 100 : 1000;
        if (ended && !chunk.text) pause = 5000;
      } catch {
        pause = 5000;
      }
    }
  };
  if (output?.dataset.url) {
    output.scrollTop = output.scrollHeight;
    read();
  }

  // -- the policy editor: a mistake's line --------------------------------------------------------------------
  document.addEventListener("click", (event) => {
    const line = Number(event.target.dataset?.line);
    const editor = document.getElementById("document");
    if (!line || !editor) return;
    event.preventDefault();
    const lines = editor.value.split("\n");
    const start = lines.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
    editor.blur();
    editor.setSelectionRange(start, start + (lines[line - 1]?.length ?? 0));
    editor.focus(); // after the selection, so that the browser scrolls to it
  });
})();
