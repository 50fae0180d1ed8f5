// Draws the lines of a deployment: its machines by state, as the server has them from the log, and waiting work, as
// this page has seen them. The arrow keys move along the lines, and what they were at that time is said below them.
"use strict";
(() => {
  const HOUR = 3600;
  const STEP = 5000; // without an event, the lines go on as often
  const HEIGHTS = { machines: 170, waiting: 120 };
  const LINES = ["ready", "starting", "ending", "lost"];
  const chart = () => document.getElementById("mw-chart");
  if (!chart() || !window.uPlot) return;
  const ahead = Date.now() / 1000 - Number(document.querySelector("meta[name=makeway-now]")?.content || Date.now() / 1000);
  const now = () => Date.now() / 1000 - ahead; // as the service's clock has it
  const clock = (at) => new Date((at + ahead) * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
  const exact = (at) => new Date((at + ahead) * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

  // -- what is drawn --------------------------------------------------------------------------------------------
  const seen = [[], []]; // when, and how many jobs and notebooks waited then
  let machines = [];
  const note = (at, waiting) => {
    if (seen[1].at(-1) === waiting) return;
    seen[0].push(at);
    seen[1].push(waiting);
    while (seen[0][1] < at - HOUR) seen.forEach((values) => values.shift());
  };
  const until = (at, data) => data.map((values, n) => [...values, n ? values.at(-1) : Math.max(at, values.at(-1))]);
  const read = () => {
    const { lines, waiting } = chart().dataset;
    const known = JSON.parse(lines);
    machines = [known.at, ...LINES.map((name) => known[name])];
    note(now(), Number(waiting));
  };

  // -- the two charts -------------------------------------------------------------------------------------------
  const style = (name) => getComputedStyle(document.querySelector(`.mw-swatch.mw-line-${name}`));
  const stepped = window.uPlot.paths.stepped({ align: 1 });
  const series = (name) => ({
    label: name,
    stroke: style(name).getPropertyValue("--line").trim(),
    dash: style(name).getPropertyValue("--dash").trim().split(" ").filter(Boolean).map(Number),
    width: 2,
    paths: stepped,
    points: { show: false },
  });
  const whole = (splits) => splits.map((value) => (Number.isInteger(value) ? value : ""));
  const options = (kind, names, width) => {
    const body = getComputedStyle(document.body);
    const axis = { stroke: body.color, grid: { stroke: "rgb(128 128 128 / 25%)", width: 1 }, ticks: { show: false }, font: `12px ${body.fontFamily}` };
    return {
      width,
      height: HEIGHTS[kind],
      legend: { show: false },
      cursor: { sync: { key: "mw-lines" }, drag: { x: false, y: false }, points: { show: false } },
      scales: { x: { range: () => [now() - HOUR, now()] }, y: { range: (_, __, max) => [0, Math.max(1, max) * 1.15] } },
      axes: [{ ...axis, values: (_, splits) => splits.map(clock) }, { ...axis, size: 40, values: (_, splits) => whole(splits) }],
      series: [{}, ...names.map(series)],
      hooks: { setCursor: [(plot) => { if (plot.cursor.left >= 0) tell(plot.posToVal(plot.cursor.left, "x")); }] },
    };
  };
  const valueAt = ([times, ...lines], at) => {
    const index = times.findLastIndex((time) => time <= at);
    return lines.map((values) => (index < 0 ? null : values[index]));
  };
  const sentence = (at) => {
    const counts = valueAt(machines, at);
    const parts = LINES.flatMap((name, n) => (counts[n] ? [`${counts[n]} ${name}`] : []));
    const [waiting] = valueAt(seen, at);
    const work = waiting === null ? "" : `; ${waiting} ${waiting === 1 ? "job or notebook waits" : "jobs and notebooks wait"}`;
    return `${counts[0] === null ? "not known" : parts.join(", ") || "no machines"}${work}`;
  };
  let status = null;
  const tell = (at) => {
    const words = `${exact(at)}: ${sentence(at)}`;
    if (status && status.textContent !== words) status.textContent = words;
  };
  let plots = [];
  const label = () => {
    const most = Math.max(...machines[0].map((_, n) => LINES.reduce((sum, __, line) => sum + machines[line + 1][n], 0)));
    const names = [`Machines by state: ${sentence(now())} now, ${most} at most in the last hour`, `Waiting jobs and notebooks: ${seen[1].at(-1)} now`];
    plots.forEach(({ frame }, n) => frame.setAttribute("aria-label", `${names[n]}. Arrow keys move along the lines.`));
  };
  const draw = () => {
    const at = now();
    [machines, seen].forEach((data, n) => plots[n].plot.setData(until(at, data)));
    label();
  };
  const build = () => {
    const root = chart();
    const kept = status?.textContent ?? "";
    plots.forEach(({ plot }) => plot.destroy());
    root.replaceChildren();
    plots = [["machines", LINES, machines], ["waiting", ["waiting"], seen]].map(([kind, names, data]) => {
      const frame = document.createElement("div");
      frame.tabIndex = 0;
      frame.setAttribute("role", "img");
      root.append(frame);
      return { frame, plot: new window.uPlot(options(kind, names, root.clientWidth), until(now(), data), frame) };
    });
    status = document.createElement("p");
    status.setAttribute("role", "status");
    status.textContent = kept;
    root.append(status);
    label();
  };
  read();
  build();

  // -- what changes ---------------------------------------------------------------------------------------------
  document.addEventListener("makeway:after", () => { if (chart()) { read(); draw(); } });
  setInterval(() => { if (!document.hidden && chart()) draw(); }, STEP);
  let width = chart().clientWidth;
  new ResizeObserver(() => {
    const wide = chart()?.clientWidth;
    if (!wide || wide === width) return;
    width = wide;
    for (const { plot } of plots) plot.setSize({ width, height: plot.height });
  }).observe(chart());
  new MutationObserver(() => { if (chart()) build(); }).observe(document.documentElement, { attributeFilter: ["data-bs-theme"] });

  // -- the keyboard -----------------------------------------------------------------------------------------------
  document.addEventListener("keydown", (event) => {
    const found = plots.find(({ frame }) => frame === event.target);
    const step = { ArrowLeft: -10, ArrowRight: 10, Home: -Infinity, End: Infinity }[event.key];
    if (!found || step === undefined) return;
    event.preventDefault();
    const { plot } = found;
    const most = plot.over.clientWidth;
    const from = plot.cursor.left >= 0 ? plot.cursor.left : most;
    plot.setCursor({ left: Math.min(most, Math.max(0, from + step)), top: plot.over.clientHeight / 2 });
  });
})();
