// Keeps a page of Makeway fresh: listens to the event stream, asks htmx for the part that changes, follows a job's
// output, shows tooltips. Without it every page still works; it only stands still.
"use strict";
(() => {
  const meta = (name) => document.querySelector(`meta[name="makeway-${name}"]`)?.content ?? "";
  const prefix = meta("prefix");
  const xsrf = meta("xsrf");
  const live = document.getElementById("live");
  const pill = document.getElementById("mw-live");

  // -- events -------------------------------------------------------------------------------------------------
  const QUIET = 1000; // at most one refresh a second, however much happens
  let due = null;
  let last = 0;
  const refresh = () => {
    if (due !== null || document.hidden) return;
    due = setTimeout(() => {
      due = null;
      last = Date.now();
      if (live && window.htmx) window.htmx.trigger(live, "makeway:changed");
    }, Math.max(0, QUIET - (Date.now() - last)));
  };

  const say = (state, words) => {
    if (!pill) return;
    pill.dataset.state = state;
    if (pill.textContent !== words) pill.textContent = words;
  };

  if (live && prefix) {
    const SHORTEST = 2000; // a stream that is refused (503, 429) stays closed: it is opened again, later each time
    const LONGEST = 30000;
    let stream = null;
    let opened = false;
    let failures = 0;
    let again = null;
    let seen = document.getElementById("mw-current")?.dataset.after ?? ""; // the page shows what happened up to here
    const heard = (event) => {
      seen = event.lastEventId || seen;
      refresh();
    };
    const listen = () => {
      again = null;
      const shown = document.getElementById("mw-current")?.dataset.after;
      if (shown) seen = Math.max(seen, shown); // the page was refreshed since
      stream = new EventSource(`${prefix}api/v1/events?_xsrf=${encodeURIComponent(xsrf)}&after=${seen}`);
      stream.onopen = () => {
        say("on", "live");
        if (opened) refresh();
        opened = true;
        failures = 0;
      };
      stream.onerror = () => {
        say("off", "reconnecting");
        if (stream.readyState !== EventSource.CLOSED || again !== null) return;
        const wait = Math.min(LONGEST, SHORTEST * 2 ** Math.min(failures++, 10));
        again = setTimeout(listen, Math.max(SHORTEST, wait * (0.5 + Math.random() / 2)));
      };
      for (const kind of ["job", "session", "usage", "decision", "policy", "reset"]) stream.addEventListener(kind, heard);
    };
    listen();
    addEventListener("pageshow", (event) => { if (event.persisted) listen(); }); // back from the browser's own cache
    document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
    setInterval(refresh, 30000);
    addEventListener("pagehide", () => {
      clearTimeout(again);
      stream.close();
    });
  }

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
  const tick = () => {
    const now = Date.now();
    for (const time of document.querySelectorAll("time[data-style]")) {
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
    }
  };
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
  const tipped = (event) => event.target.closest?.("[data-tip]");
  for (const kind of ["mouseover", "focusin"]) {
    document.addEventListener(kind, (event) => { const found = tipped(event); if (found) show(found); else hide(); });
  }
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  // A scroll takes away what the pointer showed; what has the focus keeps its tooltip, at its new place.
  addEventListener("scroll", () => {
    const focused = shownFor && shownFor === document.activeElement;
    if (focused && shownFor.dataset.tip) draw(shownFor);
    else if (!focused) hide();
  }, { passive: true });

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

  // -- a refresh keeps the focus, the tooltip and what it marks ---------------------------------------------------
  const FOCUSABLE = ".mw-cell, .mw-heat, a, button, summary, [tabindex]";
  const places = () => [...live.querySelectorAll(FOCUSABLE)];
  const cells = () => [...live.querySelectorAll(".mw-cell")];
  let focused = null;
  let shownAt = -1; // the cell of the tooltip: a refresh may use its element for another cell
  document.addEventListener("htmx:before:swap", () => {
    const active = document.activeElement;
    focused = live?.contains(active) ? { active, cell: cells().indexOf(active), href: active.getAttribute("href"), at: places().indexOf(active) } : null;
    shownAt = live && shownFor ? cells().indexOf(shownFor) : -1;
  });
  const sameAs = ({ active, cell, href, at }) => {
    if (cell >= 0) return cells()[cell];
    if (active.isConnected && active.getAttribute("href") === href) return active;
    return (href && places().find((place) => place.getAttribute("href") === href)) || places()[at];
  };
  document.addEventListener("htmx:after:swap", () => {
    tick();
    if (!live) return;
    if (shownFor && shownAt >= 0) shownFor = cells()[shownAt] ?? shownFor;
    const again = shownFor;
    if (focused && [focused.active, document.body].includes(document.activeElement)) {
      const same = sameAs(focused);
      if (same !== document.activeElement) same?.focus({ preventScroll: true });
    }
    if (again?.classList.contains("mw-heat")) {
      const map = again.isConnected ? again : null;
      if (!map) { hide(); return; }
      const at = chosen.get(map.getAttribute("aria-label").split(":")[0]);
      if (document.activeElement === map && at !== undefined) mark(map, at);
      else pointAt(map, pointed.at, pointed.left, pointed.top);
    } else if (again && shownFor === again) {
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
  const MOST = 2 ** 20;
  const append = (text) => {
    document.getElementById("mw-no-output")?.remove();
    output.append(text);
    if (output.textContent.length > MOST) output.textContent = output.textContent.slice(-MOST / 2);
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
