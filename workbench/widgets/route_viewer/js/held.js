// What the browser holds of a mask, and how it asks the kernel for what it lacks.

const PATIENCE = 5000; // ms after which a kernel that does not answer is mentioned

class Held {
  constructor(model) {
    this.model = model;
    this.facts = model.get("facts");
    this.readConstants();
  }

  readConstants() {
    const { model } = this;
    this.queryBoxes = numbersOf(model.get("query_boxes"), Int16Array);
    this.keyBoxes = numbersOf(model.get("key_boxes"), Int16Array);
    this.cividis = bytesOf(model.get("cividis"));
    this.recorded = bytesOf(model.get("recorded"));
    this.curveStops = numbersOf(model.get("curve_stops"), Float64Array);
  }

  /** Whether there is a call at this row and column of the index. */
  isRecorded(row, column) {
    const n = row * this.facts.steps.length + column;
    return ((this.recorded[n >> 3] >> (n & 7)) & 1) === 1;
  }

  /** Steps of a layer. */
  stepsOf(layer) {
    const row = this.facts.layers.indexOf(layer);
    return this.facts.steps.filter((_, column) => this.isRecorded(row, column));
  }

  /** A layer may have been recorded at other steps: the nearest one is taken. */
  nearestStep(layer, step) {
    const nearer = (a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a);
    return this.stepsOf(layer).reduce(nearer);
  }

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

  /** Density at every stop of each head whose scores are here, or null. */
  get shownCurves() {
    const { pairs } = this;
    if (!pairs?.codes) return null;
    const heads = Array.from({ length: pairs.count }, (_, n) => pairs.first + n);
    this.curves ??= new Map(heads.map((head) => [head, curveOf(pairs, head)]));
    return this.curves;
  }

  /** What was made for the same key the last time, or made now. */
  kept(name, key, make) {
    this.memory ??= {};
    if (this.memory[name]?.key !== key) this.memory[name] = { key, value: make() };
    return this.memory[name].value;
  }
}
