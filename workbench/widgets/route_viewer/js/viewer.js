// Puts the parts together: one persistent view, one drawing for each screen frame at most.

const REPORT_WAIT = 150; // ms of quiet before the kernel hears what is on the screen
const HELP =
  "Map: click a pair to explain it, drag to pan, wheel to zoom once clicked (or with Ctrl). Keys on " +
  "the map: arrows move the pair, Shift + arrows pan, + and − zoom, 0 shows the whole mask.";

class Viewer extends Moving {
  constructor(model, host) {
    super(model);
    this.times = []; // what each drawing cost in ms, newest last: { why, work, total, tau }
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
    this.indexNews = 0;
    const { parts } = this.facts;
    const numbered = (name) => Array.from({ length: parts[name] }, (_, n) => `${name}_${n}`);
    follow(["tau"], "tau");
    follow(["window"], "zoom");
    follow(["query_block", "key_block"], "pair");
    follow(["head", "ground", ...numbered("token_blocks")], "head");
    follow(["densities", "errors", "curves"].flatMap(numbered), "index", () => this.indexNews++);
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

  draw() {
    const { model, pairs, tau, place } = this;
    const window = this.window();
    const [query, key] = [model.get("query_block"), model.get("key_block")];
    this.choice = choose(pairs, place.head, tau);
    const of = `${pairs.serial}/${pairs.codes !== null}/${place.head}/${tau}`;
    this.picture = this.kept("picture", `${of}/${window}`, () => pool(this.choice, window, this.facts.size));
    this.total = this.kept("total", of, () => tally(this.choice));
    this.map.draw(this.picture, this.total, window, query, key);
    this.kept("index", `${of}/${this.indexNews}`, () => this.index.draw());
    this.kept("curve", of, () => this.drawCurve(place.head, tau));
    // The frames follow right after the map is on the screen: they take longer than the map.
    clearTimeout(this.framesTimer);
    this.framesTimer = setTimeout(() => this.guard(() => this.drawFrames(`${of}/${query}`, query)));
    this.controls.show({ ...place, ...this.asking() }, tau, pairs.stops, this.scoreState());
    this.say(window, query, key);
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
    this.curve.draw(this.shownCurves, this.pairs.stops, tau, head);
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
