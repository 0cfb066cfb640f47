"use strict";
// All of it only adds to a page that is complete without: values under the pointer, one scrubber for many samples,
// videos in step, and, while a run is watched, blocks that are exchanged as they change.

// ---- charts: the nearest value of each line, by pointer or arrow keys --------------------------------------------

function readyChart(figure) {
  const chart = JSON.parse(figure.dataset.chart);
  const plot = figure.querySelector(".plot");
  const svg = plot.querySelector("svg");
  const cursor = svg.querySelector(".cursor");
  const tip = plot.querySelector(".tip");
  const marks = [...new Set(chart.lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
  let chosen = marks.length - 1;

  function show(number) {
    chosen = Math.max(0, Math.min(marks.length - 1, number));
    const at = marks[chosen];
    const near = chart.lines.map((line) => [line.name, nearest(line.points, at)]);
    const [, first] = near.find(([, point]) => point[0] === at) || near[0];
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.setAttribute("visibility", "visible");
    tip.textContent = `${chart.x} ${first[2]}\n` + near.map(([name, point]) => `${name}: ${point[3]}`).join("\n");
    tip.hidden = false;
    const share = at / svg.viewBox.baseVal.width;
    tip.style.left = share < 0.5 ? `${100 * share + 3}%` : "auto";
    tip.style.right = share < 0.5 ? "auto" : `${100 * (1 - share) + 3}%`;
  }

  function hide() {
    tip.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  }

  plot.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    show(marks.indexOf(nearest(marks.map((mark) => [mark]), at)[0]));
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: marks.length - 1 };
    if (event.key === "Escape") hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(tip.hidden && event.key.startsWith("Arrow") ? chosen : moves[event.key]);
  });
}

function nearest(points, at) {
  let best = points[0];
  for (const point of points) if (Math.abs(point[0] - at) < Math.abs(best[0] - at)) best = point;
  return best;
}

// ---- samples: one at a time, chosen by step ----------------------------------------------------------------------

function readyScrubber(article) {
  const figures = [...article.querySelectorAll("figure")];
  const range = article.querySelector("input");
  const output = article.querySelector("output");
  const button = article.querySelector("button");
  let shown = null;

  function show() {
    const next = figures[Number(range.value)];
    const before = shown && shown.querySelector("video");
    const video = next.querySelector("video");
    if (video) video.preload = "auto"; // else its first picture is not drawn
    for (const figure of figures) figure.hidden = figure !== next;
    output.textContent = next.dataset.words;
    range.setAttribute("aria-valuetext", next.dataset.words);
    if (before && before !== video) {
      if (video) {
        video.currentTime = before.currentTime;
        if (!before.paused) start(video);
      }
      before.pause();
    }
    shown = next;
  }

  for (const video of article.querySelectorAll("video")) {
    video.controls = false;
    video.addEventListener("play", () => (button.textContent = "Pause"));
    video.addEventListener("pause", () => {
      const now = shown.querySelector("video");
      if (!now || now.paused) button.textContent = "Play";
    });
  }
  range.addEventListener("input", show);
  button.addEventListener("click", () => {
    const video = shown.querySelector("video");
    if (video.paused) start(video);
    else video.pause();
  });
  article.querySelector(".controls").hidden = false;
  show();
}

function start(video) {
  // A pause that comes before the first frame ends the promise; that is no fault.
  video.play().catch(() => {});
}

// ---- videos of one prompt: one play, pause and time for all ------------------------------------------------------

const APART_S = 0.05;

function readyTogether(article) {
  const videos = [...article.querySelectorAll("video")];
  if (!videos.length) return;
  const range = article.querySelector("input");
  const output = article.querySelector("output");
  const button = article.querySelector("button");
  const [first] = videos;

  function tell() {
    range.value = Math.round(1000 * first.currentTime);
    output.textContent = `${first.currentTime.toFixed(2)} s`;
    range.setAttribute("aria-valuetext", output.textContent);
  }

  function keepInStep() {
    for (const video of videos.slice(1)) {
      if (Math.abs(video.currentTime - first.currentTime) > APART_S) video.currentTime = first.currentTime;
    }
    tell();
    if (!first.paused) requestAnimationFrame(keepInStep);
  }

  function seek(time) {
    for (const video of videos) video.currentTime = Math.min(time, video.duration || time);
    tell();
  }

  function measure() {
    const ends = videos.map((video) => video.duration).filter(Number.isFinite);
    if (ends.length) range.max = Math.floor(1000 * Math.max(...ends));
  }

  for (const video of videos) {
    video.controls = false;
    video.preload = "auto";
    video.addEventListener("loadedmetadata", measure);
  }
  measure();
  range.addEventListener("input", () => seek(Number(range.value) / 1000));
  first.addEventListener("play", () => {
    button.textContent = "Pause";
    keepInStep();
  });
  first.addEventListener("pause", () => (button.textContent = "Play"));
  button.addEventListener("click", () => {
    if (first.paused) {
      seek(first.currentTime);
      videos.forEach(start);
    } else {
      for (const video of videos) video.pause();
      seek(first.currentTime);
    }
  });
  article.querySelector(".controls").hidden = false;
  tell();
}

// ---- live: exchange the blocks that changed ----------------------------------------------------------------------

function ready(root) {
  root.querySelectorAll("figure.chart").forEach(readyChart);
  root.querySelectorAll("article.scrubber").forEach(readyScrubber);
  root.querySelectorAll("article.together").forEach(readyTogether);
}

function isBusy(block) {
  // What plays or is used stays; it is exchanged at a later poll.
  const playing = [...block.querySelectorAll("video")].some((video) => !video.paused);
  return playing || (block.contains(document.activeElement) && document.activeElement !== document.body);
}

function exchange(block, told) {
  const open = [...block.querySelectorAll("details[open]")].map((part) => part.dataset.keep);
  const old = block.querySelector("article.scrubber input");
  const atEnd = !old || old.value === old.max;
  const value = old && old.value;
  block.innerHTML = told.html;
  block.dataset.digest = told.digest;
  for (const part of block.querySelectorAll("details")) part.open = open.includes(part.dataset.keep);
  const range = block.querySelector("article.scrubber input");
  if (range && !atEnd) range.value = value;
  ready(block);
}

function update(section) {
  const place = document.querySelector(`[data-section="${section.key}"]`);
  let before = null;
  for (const told of section.blocks) {
    let block = document.getElementById(told.key);
    if (!block) {
      block = document.createElement("div");
      block.className = "block";
      block.id = told.key;
      if (before) before.after(block);
      else place.prepend(block);
      exchange(block, told);
    } else if (block.dataset.digest !== told.digest && !isBusy(block)) {
      exchange(block, told);
    }
    before = block;
  }
  const known = new Set(section.blocks.map((told) => told.key));
  for (const block of [...place.children]) if (!known.has(block.id) && !isBusy(block)) block.remove();
}

function say(word, text) {
  const status = document.getElementById("status");
  if (status.textContent !== text) status.textContent = text;
  status.className = `status ${word}`;
}

function follow(everyS) {
  let mark = "";
  async function poll() {
    try {
      const answer = await fetch("state", { headers: mark ? { "If-None-Match": mark } : {}, cache: "no-store" });
      if (answer.status === 200) {
        const told = await answer.json();
        if (told.sections.some((section) => !document.querySelector(`[data-section="${section.key}"]`))) {
          location.reload(); // a whole section is new
          return;
        }
        told.sections.forEach(update);
        say(told.status.word, told.status.text);
        const waits = told.sections.some((section) =>
          section.blocks.some((one) => document.getElementById(one.key).dataset.digest !== one.digest));
        mark = waits ? "" : answer.headers.get("ETag");
      } else if (answer.status !== 304) {
        say("stopped", "wangen watch no longer knows this address: start it again and open the new one.");
      }
    } catch {
      say("stopped", "wangen watch has ended. What is shown is the last that it told.");
      mark = "";
    }
    setTimeout(poll, 1000 * everyS);
  }
  setTimeout(poll, 1000 * everyS);
}

ready(document);
if (document.body.dataset.poll) follow(Number(document.body.dataset.poll));
