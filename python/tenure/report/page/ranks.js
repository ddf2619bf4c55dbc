// The table of ranks: the worst first, and no more than a person reads.
"use strict";
{
  const most = 200, worst = ["leak", "growth", "too-short", "flat"];
  const ranks = data.ranks.slice().sort((a, b) =>
    worst.indexOf(a.verdict) - worst.indexOf(b.verdict) || b.grows - a.grows || a.rank - b.rank);
  const place = (rank) => Object.entries(rank.coordinates).map(([name, at]) => `${name} ${at}`).join(", ") || "–";
  const head = ["rank", "verdict", "grows", "peak", "in", "steps", "host", "place", "level"];
  byId("ranks-table").tHead.append(element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text))));
  byId("ranks-table").tBodies[0].append(...ranks.slice(0, most).map((rank) => row([rank.rank, "number"],
    [rank.verdict], [`${bytesText(rank.grows)}/${data.unit}`, "number"], [bytesText(rank.peak), "number"],
    [`${data.unit} ${rank.peak_step}`, "number"], [rank.steps.toLocaleString("en"), "number"], [rank.gpu === "" ? rank.host : `${rank.host}, GPU ${rank.gpu}`, "code"],
    [place(rank)], [rank.level])));
  if (ranks.length > most) {
    byId("ranks-text").textContent = `and ${(ranks.length - most).toLocaleString("en")} more`;
  }
}
