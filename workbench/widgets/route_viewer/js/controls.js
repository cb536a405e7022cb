// Layer, step, head, tau and zoom: labelled, with units, usable from the keyboard.

class Controls {
  constructor(viewer) {
    this.viewer = viewer;
    const { layers, heads, scored } = viewer.facts;
    this.layer = this.select(layers, () => this.pickLayer());
    this.step = this.select([], () => this.pick());
    this.head = this.select(Array.from({ length: heads }, (_, head) => head), () => this.pick());
    this.slider = element("input", { type: "range", min: 0, step: 1, className: "rv-tau" });
    this.number = element("input", { type: "number", step: 0.02, className: "rv-number" });
    this.slider.addEventListener("input", () => {
      viewer.guard(() => viewer.setStop(Number(this.slider.value)));
    });
    this.number.addEventListener("change", () => {
      viewer.guard(() => this.number.value && viewer.set({ tau: Number(this.number.value) }));
    });
    this.load = button("Load scores", "", () => viewer.guard(() => viewer.askForScores()));
    this.note = element("span", { className: "rv-note" });
    const first = [labelled("Layer", this.layer), labelled("Step", this.step)];
    const tau = [labelled("tau (standard deviations)", this.slider), this.number, this.load];
    this.element = element("div", { className: "rv-row" }, [
      ...first,
      labelled("Head", this.head),
      ...(scored ? tau : []),
      this.note,
    ]);
    this.number.setAttribute("aria-label", "tau in standard deviations, as a number");
  }

  select(options, act) {
    const made = element("select");
    this.fill(made, options);
    made.addEventListener("change", () => this.viewer.guard(act));
    return made;
  }

  fill(select, options) {
    const made = options.map((name) => element("option", { value: name, textContent: name }));
    select.replaceChildren(...made);
  }

  pickLayer() {
    const [layer, step, head] = [this.layer, this.step, this.head].map((knob) => Number(knob.value));
    this.viewer.open(layer, this.viewer.nearestStep(layer, step), head);
  }

  pick() {
    this.viewer.open(...[this.layer, this.step, this.head].map((knob) => Number(knob.value)));
  }

  /** Shows what is chosen now, and what tau can do. */
  show({ layer, step, head }, tau, stops, state) {
    this.layer.value = layer;
    const steps = this.viewer.stepsOf(layer);
    if (steps.join() !== this.steps) this.fill(this.step, steps);
    this.steps = steps.join();
    this.step.value = step;
    this.head.value = head;
    this.slider.max = stops.length - 1;
    const { level } = levelOf(stops, tau);
    this.slider.value = Math.min(level, stops.length - 1);
    this.slider.setAttribute("aria-valuetext", `tau ${tau}`);
    this.number.value = tau;
    this.slider.disabled = this.number.disabled = !state.scored;
    this.load.hidden = state.scored;
    this.load.textContent = `Load scores (${(state.bytes / 1e6).toFixed(1)} MB)`;
    this.load.title = "tau then moves in the browser; the scores come in parts below 1 MB";
  }
}

/** Buttons beside the map that do what its keys do. */
function zoomButtons(viewer) {
  const act = (work) => () => viewer.guard(work);
  const window = element("span", { className: "rv-note" });
  const row = element("div", { className: "rv-row" }, [
    button("+", "zoom in", act(() => viewer.zoom(0.5))),
    button("−", "zoom out", act(() => viewer.zoom(2))),
    button("Whole mask", "show the whole mask", act(() => viewer.whole())),
    window,
  ]);
  return { row, window };
}
