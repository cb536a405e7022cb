// Puts the parts together: one persistent view, one drawing for each screen frame at most.

const REPORT_WAIT = 150; // ms of quiet before the kernel hears what is on the screen
const PATIENCE = 5000; // ms after which a kernel that does not answer is mentioned
const HELP =
  "Map: click a pair to explain it, drag to pan, wheel to zoom once clicked (or with Ctrl). Keys on " +
  "the map: arrows move the pair, Shift + arrows pan, + and − zoom, 0 shows the whole mask.";

class Viewer {
  constructor(model, host) {
    this.model = model;
    this.facts = model.get("facts");
    this.times = []; // what each drawing cost in ms, newest last: { why, work, total, tau }
    this.readConstants();
    this.controls = new Controls(this);
    this.map = new MapView(this);
    this.curve = new CurveView(this);
    this.index = new IndexView(this);
    this.frames = new FramesView(this);
    this.zoomRow = zoomButtons(this);
    this.arrange(host);
    this.listen();
    this.want("start");
  }

  // -- what is where -----------------------------------------------------------------------------

  arrange(host) {
    const [title, summary, pair, selection] = Array.from({ length: 4 }, () =>
      element("div", { className: "rv-line" }),
    );
    this.problem = element("div", { className: "rv-problem", role: "alert", hidden: true });
    this.status = element("div", { className: "rv-line rv-status", role: "status" });
    this.status.setAttribute("aria-live", "polite");
    title.className += " rv-title";
    Object.assign(this, { title, summary, pair, selection });
    const left = [this.zoomRow.row, title, this.map.element, this.map.legend, summary];
    const curve = this.facts.scored ? [this.curve.element] : [];
    const right = [this.index.element, ...curve, pair];
    this.element = element("div", { className: "rv", "data-lm-suppress-shortcuts": "true" }, [
      element("div", { className: "rv-line" }, [this.heading()]),
      this.controls.element,
      this.problem,
      this.status,
      element("div", { className: "rv-columns" }, [
        element("div", { className: "rv-left" }, left),
        element("div", { className: "rv-right" }, right),
      ]),
      this.frames.element,
      selection,
      element("div", { className: "rv-note", textContent: HELP }),
    ]);
    // JupyterLab would take arrows and digits for its own commands.
    this.element.addEventListener("keydown", (event) => event.stopPropagation());
    this.element.routeViewer = this; // for the tests
    host.append(this.element);
  }

  heading() {
    const { title, grid, tokens, blocks, heads } = this.facts;
    const facts =
      ` grid ${grid.join(" × ")} (t, h, w), ${whole(tokens)} tokens, ${heads} heads of ` +
      `${whole(blocks[0])} × ${whole(blocks[1])} block pairs`;
    return element("span", {}, [element("b", { textContent: title }), facts]);
  }

  readConstants() {
    const { model } = this;
    this.queryBoxes = numbersOf(model.get("query_boxes"), Int16Array);
    this.keyBoxes = numbersOf(model.get("key_boxes"), Int16Array);
    this.cividis = bytesOf(model.get("cividis"));
  }

  // -- state ---------------------------------------------------------------------------------------

  /** What is on the screen, which may lag behind what was asked for. */
  get place() {
    const { layer, step, heads } = this.model.get("shown");
    const head = this.model.get("head");
    const here = head >= heads[0] && head < heads[0] + heads[1];
    return { layer, step, head: here ? head : heads[0] };
  }

  /** tau of the picture: the slider's where there are scores, else that of the bits. */
  get tau() {
    return this.pairs?.codes ? this.model.get("tau") : (this.model.get("shown").tau ?? 0);
  }

  /**
   * Saved at once: ipywidgets keeps one message under way and joins the others, and it knows which
   * echoes are stale only for what it was given to save.
   */
  set(values) {
    for (const [name, value] of Object.entries(values)) this.model.set(name, value);
    this.model.save_changes();
  }

  setStop(index) {
    const { stops } = this.pairs;
    this.set({ tau: stops[Math.max(0, Math.min(stops.length - 1, index))] });
  }

  /** Another call or head; the kernel is asked only for what is not here. */
  open(layer, step, head) {
    this.set({ layer, step, head });
    const { place } = this;
    this.await(place.layer !== layer || place.step !== step || place.head !== head, "mask");
  }

  askForScores() {
    this.set({ want_scores: true });
    this.await(true, "scores");
  }

  await(missing, what) {
    clearTimeout(this.waiting);
    this.status.textContent = missing ? `Loading the ${what} …` : "";
    if (!missing) return;
    const text = "No answer from a kernel: it is busy, or this notebook runs none. Zoom, hover and " +
      "tau work without it for the heads that are here.";
    this.waiting = setTimeout(() => (this.status.textContent = text), PATIENCE);
  }

  // -- moving ----------------------------------------------------------------------------------------

  zoom(factor, [i, j] = this.center()) {
    const [top, bottom, left, right] = this.window();
    const [rows, columns] = this.facts.blocks;
    const span = (low, high, at, most) => {
      const size = Math.max(Math.min(8, most), Math.min(most, Math.round((high - low) * factor)));
      const share = (at + 0.5 - low) / (high - low);
      const start = Math.round(at + 0.5 - share * size);
      const first = Math.max(0, Math.min(most - size, start));
      return [first, first + size];
    };
    this.set({ window: [...span(top, bottom, i, rows), ...span(left, right, j, columns)] });
  }

  pan(down, across, [top, bottom, left, right]) {
    const shift = (low, high, by, most) => {
      const moved = Math.max(0, Math.min(most - (high - low), Math.round(low + by)));
      return [moved, moved + high - low];
    };
    const [rows, columns] = this.facts.blocks;
    this.set({ window: [...shift(top, bottom, down, rows), ...shift(left, right, across, columns)] });
  }

  whole() {
    const [rows, columns] = this.facts.blocks;
    this.set({ window: [0, rows, 0, columns] });
  }

  step(down, across) {
    const [rows, columns] = this.facts.blocks;
    const move = (value, by, count) => Math.max(0, Math.min(count - 1, value + by));
    this.set({
      query_block: move(this.model.get("query_block"), down, rows),
      key_block: move(this.model.get("key_block"), across, columns),
    });
  }

  /** The chosen pair if it is on the screen, else the middle of the window. */
  center() {
    const [top, bottom, left, right] = this.window();
    const [i, j] = [this.model.get("query_block"), this.model.get("key_block")];
    const inside = i >= top && i < bottom && j >= left && j < right;
    return inside ? [i, j] : [Math.floor((top + bottom) / 2), Math.floor((left + right) / 2)];
  }

  window() {
    const window = this.model.get("window");
    const [rows, columns] = this.facts.blocks;
    const [top, bottom, left, right] = window;
    const fits = 0 <= top && top < bottom && bottom <= rows;
    if (window.length !== 4 || !fits || !(0 <= left && left < right && right <= columns)) {
      throw new Error(
        `window=[${window}]: expected [top, bottom, left, right] with ` +
          `0 <= top < bottom <= ${rows} and 0 <= left < right <= ${columns}`,
      );
    }
    return window;
  }

  // -- drawing -----------------------------------------------------------------------------------------

  listen() {
    const follow = (names, why, act = () => {}) => {
      for (const name of names) {
        const heard = () => this.guard(() => (act(), this.want(why)));
        this.model.on(`change:${name}`, heard);
        this.heard.push([name, heard]);
      }
    };
    this.heard = [];
    const { parts } = this.facts;
    const numbered = (name) => Array.from({ length: parts[name] }, (_, n) => `${name}_${n}`);
    follow(["tau"], "tau");
    follow(["window"], "zoom");
    follow(["query_block", "key_block"], "pair");
    follow(["head", "densities", "errors", "ground", ...numbered("token_blocks")], "head");
    follow(["shown", "rows", "stops", ...numbered("bits"), ...numbered("codes")], "mask", () => {
      this.stale = true;
    });
    follow(["problem"], "problem", () => this.await(false));
  }

  close() {
    for (const [name, heard] of this.heard) this.model.off(`change:${name}`, heard);
    for (const timer of [this.waiting, this.reporting, this.framesTimer]) clearTimeout(timer);
    cancelAnimationFrame(this.frame);
  }

  /** Asks for a drawing; many requests before the next screen frame make one. */
  want(why) {
    this.asked ??= { why, at: performance.now() };
    if (this.asked.frame) return;
    this.asked.frame = true;
    this.frame = requestAnimationFrame(() => this.guard(() => this.drawAsked()));
  }

  drawAsked() {
    const { why, at } = this.asked;
    this.asked = null;
    const start = performance.now();
    if (!this.refresh()) return;
    this.draw();
    this.recover();
    const end = performance.now();
    this.times.push({ why, work: end - start, total: end - at, tau: this.tau });
    if (this.times.length > 500) this.times.shift();
    this.firstPicture ??= Date.now() / 1000 - this.facts.started;
    this.report();
  }

  /** Takes over what the kernel sent once it is complete; false while there is nothing to draw. */
  refresh() {
    if (this.stale === false) return true;
    const shown = this.model.get("shown");
    const bits = shown.serial ? gather(this.model, "bits", shown.serial) : null;
    if (!bits) return this.pairs !== undefined && this.pairs.serial === shown.serial;
    const codes = shown.scored ? gather(this.model, "codes", shown.serial) : null;
    const [rows, columns] = this.facts.blocks;
    const stops = numbersOf(this.model.get("stops"), Float64Array);
    const { serial, band, sink } = shown;
    const [first, count] = shown.heads;
    const own = { serial, rows, columns, bits, codes, stops, band, sink, first, count };
    const news = this.pairs?.serial !== serial || (this.pairs.codes === null) !== (codes === null);
    this.pairs = own;
    this.rowStatistics = numbersOf(this.model.get("rows"), Float32Array);
    if (news) this.curves = this.differing = null;
    this.stale = false;
    this.await(false);
    return true;
  }

  draw() {
    const { model, pairs, tau, place } = this;
    const window = this.window();
    const [query, key] = [model.get("query_block"), model.get("key_block")];
    this.choice = choose(pairs, place.head, tau);
    const of = `${pairs.serial}/${pairs.codes !== null}/${place.head}/${tau}`;
    this.picture = this.kept("picture", `${of}/${window}`, () => pool(this.choice, window, this.facts.size));
    this.total = this.kept("total", of, () => tally(this.choice));
    this.map.draw(this.picture, this.total, window, query, key);
    const head = `${pairs.serial}/${pairs.codes !== null}/${place.head}`;
    this.kept("index", `${head}/${model.get("densities")?.byteLength}`, () => this.index.draw());
    this.kept("curve", of, () => this.drawCurve(place.head, tau));
    // The frames follow right after the map is on the screen: they take longer than the map.
    clearTimeout(this.framesTimer);
    this.framesTimer = setTimeout(() => this.guard(() => this.drawFrames(`${of}/${query}`, query)));
    this.controls.show({ ...place, ...this.asking() }, tau, pairs.stops, this.scoreState());
    this.say(window, query, key);
  }

  /** What was made for the same key the last time, or made now. */
  kept(name, key, make) {
    this.memory ??= {};
    if (this.memory[name]?.key !== key) this.memory[name] = { key, value: make() };
    return this.memory[name].value;
  }

  asking() {
    const [layer, step, head] = ["layer", "step", "head"].map((name) => this.model.get(name));
    return { layer, step, head };
  }

  scoreState() {
    const { codes, rows, columns, count } = this.pairs;
    return { scored: codes !== null, bytes: rows * columns * count };
  }

  drawCurve(head, tau) {
    const { pairs } = this;
    if (pairs.codes && !this.curves) {
      const heads = Array.from({ length: pairs.count }, (_, n) => pairs.first + n);
      this.curves = new Map(heads.map((own) => [own, curveOf(pairs, own)]));
    }
    this.curve.draw(pairs.codes ? this.curves : null, pairs.stops, tau, head);
  }

  drawFrames(key, query) {
    this.ground ??= bytesOf(this.model.get("ground"));
    const blocks = this.tokenBlocks ? null : gather(this.model, "token_blocks", null);
    if (!this.ground.length) this.ground = null;
    if (blocks?.length) this.tokenBlocks = new Uint16Array(blocks.slice().buffer);
    if (!this.tokenBlocks || !this.ground) return; // they come after the first picture
    this.kept("frames", key, () => {
      const row = new Uint8Array(this.pairs.columns);
      decideRow(this.choice, query, 0, this.pairs.columns, row);
      this.selection.textContent = this.frames.draw(row, query, this.tokenBlocks);
    });
    this.framesTimer = null;
  }

  say(window, query, key) {
    const { layer, step, head } = this.place;
    const scored = this.facts.scored ? ` · tau ${tauText(this.tau)}` : "";
    this.title.textContent =
      `layer ${layer} · step ${step} · head ${head}${scored} · density ${this.total.density.toFixed(4)}`;
    const summary = summaryText(this.total, this.facts) + this.doubt(head);
    this.summary.textContent = summary;
    this.map.canvas.setAttribute("aria-label", `Mask of ${this.title.textContent}. ${summary}`);
    this.pair.textContent = `Chosen pair. ${this.pairTexts(query, key, false).join(". ")}.`;
    const [top, bottom, left, right] = window;
    this.zoomRow.window.textContent =
      `queries ${top}-${bottom - 1}, keys ${left}-${right - 1} of ${this.facts.blocks.join(" × ")}`;
    const problem = this.model.get("problem") || this.failed || "";
    this.problem.hidden = !problem;
    this.problem.textContent = problem && `⚠ ${problem}`;
  }

  /** Says so where the bits are not those that the scores give. */
  doubt(head) {
    const { tau } = this.model.get("shown");
    if (!this.pairs.codes || tau === null) return "";
    this.differing ??= new Map();
    if (!this.differing.has(head)) this.differing.set(head, disagreement(this.pairs, head, tau));
    const number = this.differing.get(head);
    return number ? ` The mask as made differs from these scores in ${whole(number)} pairs.` : "";
  }

  pairTexts(i, j, pixel = true) {
    const lines = pairLines(this, this.choice, i, j);
    return pixel ? [...lines, ...pixelLine(this.picture, this.map.window, i, j)] : lines;
  }

  /** An error in the browser is over once a drawing went well. */
  recover() {
    if (!this.failed) return;
    this.failed = "";
    this.set({ browser_problem: "" });
    this.want("problem");
  }

  /** Tells the kernel what is on the screen, once it rests. */
  report() {
    clearTimeout(this.reporting);
    this.reporting = setTimeout(() => this.guard(() => this.tell()), REPORT_WAIT);
  }

  tell() {
    const { picture, total, pairs, tau } = this;
    const { why, work } = this.times[this.times.length - 1];
    const { density, counts, fewest, most } = total;
    const sum = picture.density.reduce((all, value) => all + value, 0);
    const { factor } = picture;
    const made = { factor, size: [picture.rows, picture.columns], mean: sum / picture.density.length };
    const shown = { ...this.place, tau, scored: pairs.codes !== null, window: this.map.window };
    this.set({ report: { ...shown, ...made, density, counts, rows: [fewest, most], why, work } });
  }

  /** Runs work; an error is shown here and told to the kernel, whose log keeps it. */
  guard(work) {
    try {
      return work();
    } catch (error) {
      this.failed = `Error in the browser: ${error.message}`;
      this.problem.textContent = `⚠ ${this.failed}`;
      this.problem.hidden = false;
      this.set({ browser_problem: `${error.message}\n${error.stack}` });
      return undefined;
    }
  }
}

export default {
  render({ model, el }) {
    const viewer = new Viewer(model, el);
    return () => viewer.close();
  },
};
