// Draws the charts of a page with uPlot, in the colours of the theme, and applies filters as they are chosen.
"use strict";

(() => {
  const HEIGHT = 220;
  const plots = [];

  const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  const units = {
    money: (value) => (value >= 1 ? value.toFixed(2) : Number(value.toPrecision(3)).toFixed(9).replace(/\.?0+$/, "")),
    share: (value) => `${Math.round(value * 1000) / 10}%`,
    ms: (value) => (value >= 1000 ? `${(value / 1000).toFixed(1)} s` : `${Math.round(value)} ms`),
    speed: (value) => value.toFixed(value < 10 ? 1 : 0),
  };

  const DAY_S = 86400;

  const days = (_plot, ticks) => {
    const isFine = ticks.length > 1 && ticks[1] - ticks[0] < DAY_S;
    return ticks.map((tick) => {
      const date = new Date(tick * 1000);
      if (isFine && tick % DAY_S) return date.toISOString().slice(11, 16);
      return date.toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });
    });
  };

  const faded = (colour, opacity) => `color-mix(in srgb, ${colour} ${opacity}%, transparent)`;

  const resolved = (colour) => {
    const probe = document.createElement("span");
    probe.style.color = colour;
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  };

  const seriesOf = (each, format) => {
    const colour = resolved(theme(each.colour));
    const shared = {
      label: each.label,
      value: (_plot, value) => (value == null ? "–" : format(value)),
      points: { show: each.values.filter((value) => value != null).length < 40, size: 5 },
      spanGaps: true,
    };
    if (each.kind === "bars") {
      return {
        ...shared,
        stroke: colour,
        fill: each.colour === "ghost" ? resolved(faded(theme("ghost"), 55)) : colour,
        width: 0,
        paths: uPlot.paths.bars({ size: [0.72, 44, 3], radius: 0.12 }),
        points: { show: false },
      };
    }
    return {
      ...shared,
      stroke: colour,
      width: 2,
      fill: each.kind === "area" ? resolved(faded(theme(each.colour), 18)) : undefined,
    };
  };

  // Room for the longest label of an axis, so that small sums are not cut.
  const widthOf = (_plot, labels) => Math.max(50, ...(labels ?? []).map((label) => 20 + 7 * label.length));

  const draw = (place) => {
    const data = JSON.parse(document.getElementById(`data-${place.dataset.chart}`).textContent);
    const symbol = data.unit === "money" ? place.dataset.symbol : "";
    const format = (value) => symbol + units[data.unit](value);
    const axis = {
      stroke: resolved(theme("muted")),
      grid: { stroke: resolved(theme("line")), width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
    };
    const step = data.x.length > 1 ? data.x[1] - data.x[0] : 3600;
    const options = {
      width: place.clientWidth,
      height: HEIGHT,
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "UTC"),
      scales: {
        x: { range: [data.x[0] - step * 0.6, data.x[data.x.length - 1] + step * 0.6] },
        y: { range: (_plot, _low, high) => [0, data.unit === "share" ? 1 : (high || 1) * 1.08] },
      },
      axes: [
        { ...axis, space: 64, values: days },
        { ...axis, size: widthOf, values: (_plot, ticks) => ticks.map(format) },
      ],
      cursor: { points: { size: 7 }, drag: { x: false, y: false } },
      legend: { live: true },
      series: [
        { label: "From", value: (_plot, value) => (value == null ? "" : new Date(value * 1000).toISOString().slice(0, 16).replace("T", " ")) },
        ...data.series.map((each) => seriesOf(each, format)),
      ],
    };
    place.replaceChildren();
    plots.push([place, new uPlot(options, [data.x, ...data.series.map((each) => each.values)], place)]);
  };

  const drawAll = () => {
    plots.splice(0).forEach(([, plot]) => plot.destroy());
    document.querySelectorAll("[data-chart]").forEach(draw);
    document.documentElement.dataset.charts = "drawn";
  };

  if (window.uPlot) {
    drawAll();
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
    new ResizeObserver(() => {
      plots.forEach(([place, plot]) => {
        if (Math.abs(plot.width - place.clientWidth) > 1) plot.setSize({ width: place.clientWidth, height: HEIGHT });
      });
    }).observe(document.getElementById("content"));
  }

  document.querySelectorAll("form[data-auto]").forEach((form) => {
    form.querySelectorAll("select").forEach((select) => select.addEventListener("change", () => form.requestSubmit()));
  });
})();
