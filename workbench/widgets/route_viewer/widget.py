"""RouteViewer: the Python half. It loads masks and hands bytes over; the browser does the rest."""

from __future__ import annotations

import base64
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets
from matplotlib.figure import Figure

from blockattn import BlockScores, checks
from workbench.mask_codes import ladder
from workbench.masks import Entry, Mask, MaskSet, token_blocks
from workbench.widgets.debounce import Debouncer
from workbench.widgets.route_viewer import figure, payload

logger = logging.getLogger(__name__)

HERE = Path(__file__).parent
# Parts of one ES module, in this order; only the last one exports.
SCRIPTS = (
    *("bits", "layout", "map", "curve", "index", "frames", "texts", "controls"),
    *("held", "moving", "viewer"),
)
LOAD_WAIT = 0.04  # seconds of quiet before another mask is loaded
PARTED = ("bits", "codes", "token_blocks", "densities", "errors", "curves")


def script() -> str:
    """The ES module that the browser loads."""
    return "\n".join((HERE / "js" / f"{name}.js").read_text("utf-8") for name in SCRIPTS)


def _synced(kind: type[traitlets.TraitType], default: Any) -> Any:
    return kind(default).tag(sync=True)


def _fits(span: list[int], size: int) -> bool:
    low, high = span
    return 0 <= low < high <= size


class RouteViewer(anywidget.AnyWidget):
    """Masks of any size: zoom, hover, tau, index and frames, all in the browser.

    The kernel is asked for another layer, step or head and, above 900,000 pairs, once for the
    scores of a head. All else works from what the browser holds, so also in a saved notebook. No
    update is larger than 1 MB. An error is shown in the widget and logged; to a script, which has
    no event loop, it is also raised. Where the first mask cannot be read, it says so
    and shows another one.

    Args:
        book: the masks, e.g. of :func:`workbench.masks.capture_masks`.
        layer, step: which call to show first; by default the first one.
        head: which head.

    Attributes:
        layer, step, head, tau, query_block, key_block: what is chosen; they may be set.
        window: block rows and columns shown: [top, bottom, left, right], half open.
        want_scores: whether scores are sent although a head's take several updates.
        shown: what the browser holds: layer, step, heads, tau of the bits.
        report: what the browser shows: density, counts, pooling factor, times in ms.
        problem: text of the open error, or what is wrong with the numbers of the shown call (NaN);
            empty when all is well.
    """

    _esm = script()
    _css = (HERE / "style.css").read_text("utf-8")

    facts = _synced(traitlets.Dict, {})
    shown = _synced(traitlets.Dict, {})
    report = _synced(traitlets.Dict, {})
    problem = _synced(traitlets.Unicode, "")
    browser_problem = _synced(traitlets.Unicode, "")
    layer = _synced(traitlets.Int, 0)
    step = _synced(traitlets.Int, 0)
    head = _synced(traitlets.Int, 0)
    tau = _synced(traitlets.Float, 1.0)
    query_block = _synced(traitlets.Int, 0)
    key_block = _synced(traitlets.Int, 0)
    window = _synced(traitlets.List, [])
    want_scores = _synced(traitlets.Bool, False)
    stops = _synced(traitlets.Bytes, b"")
    rows = _synced(traitlets.Bytes, b"")
    query_boxes = _synced(traitlets.Bytes, b"")
    key_boxes = _synced(traitlets.Bytes, b"")
    cividis = _synced(traitlets.Bytes, b"")
    ground = _synced(traitlets.Bytes, b"")
    recorded = _synced(traitlets.Bytes, b"")
    curve_stops = _synced(traitlets.Bytes, b"")

    def __init__(
        self, book: MaskSet, *, layer: int | None = None, step: int | None = None, head: int = 0
    ):
        started = time.time()
        self.book = book
        self._serial = 0
        self._table: np.ndarray | None = None
        self._indexed = False  # whether the browser has a table of the index
        place, self.mask, failed = self._readable(self._first(layer, step))
        grid, ground = self.mask.grid, payload.ground(book)
        counts = self._part_counts()
        names = (f"{name}_{n}" for name, count in counts.items() for n in range(count))
        self.add_traits(**{name: _synced(traitlets.Bytes, b"") for name in names})
        constants = {"parts": counts, "ground": list(ground.shape), "started": started}
        super().__init__(
            facts=payload.facts(book, self.mask) | constants,
            **payload.geometry(book, self.mask),
            layer=place[0],
            step=place[1],
            head=head,
            tau=1.0 if self.mask.tau is None else self.mask.tau,
            query_block=grid[0] // 2,
            key_block=grid[1] // 4,
            window=[0, grid[0], 0, grid[1]],
        )
        self._index = Debouncer(lambda: self._guard(self._fill_index, heals=False), 0.0)
        self._later = Debouncer(lambda: self._guard(self._follow), LOAD_WAIT)
        self._guard(self._load)
        self.problem = failed or self.problem
        self.ground = ground.tobytes()
        units = token_blocks(book.grid, math.gcd(*self.mask.passing.block))
        self._hand_over("token_blocks", units.tobytes())
        self.observe(lambda _: self._later(), names=["layer", "step", "head", "want_scores"])
        self.observe(self._log_browser, names="browser_problem")

    # -- for scripts and papers ------------------------------------------------------------------

    def flush(self) -> None:
        """Does now what waits: another mask, its place in the index."""
        self._later.flush()
        self._index.flush()

    def current(self) -> tuple[Mask, int]:
        """The mask at the chosen tau and the index of the chosen head in it."""
        self._later.flush()  # a place that was chosen a moment ago
        if self.book.scores is None or self.mask.tau is None or self.tau == self.mask.tau:
            return self.mask, self.head
        return Mask.of_scores(self._scores(range(self.head, self.head + 1)), self.tau), 0

    def figure(self) -> Figure:
        """The map of the window and the index, drawn by Matplotlib from the same numbers."""
        mask, head = self.current()
        top, bottom, left, right = self.window
        window = mask.window(head, (top, bottom), (left, right))
        return figure.draw(
            self.book, mask, window, self._index_of_head(), self._title(mask), self.query_block
        )

    def summary(self) -> str:
        """The line under the map: density, what made pairs exact, extreme rows."""
        return payload.describe(*self.current())

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """With a picture beside the widget, for readers of the notebook without a kernel."""
        bundle: Any = super()._repr_mimebundle_(**kwargs)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        if data is not None:
            try:
                png = figure.quick_png(self.figure())
                data["image/png"] = base64.b64encode(png).decode()
            except (ValueError, TypeError, LookupError, OSError):  # the widget shows what is wrong
                logger.exception("RouteViewer has no picture for readers without a kernel")
        return bundle

    def _index_of_head(self) -> np.ndarray:
        """Density of the head in every call: at the chosen tau where there are curves."""
        if self.book.curves:
            at_tau = self.book.densities_at(self.tau)
            return self.book.table(at_tau, self.mask.heads)[:, :, self.head]
        return self._densities()[:, :, self.head]

    def _title(self, mask: Mask) -> str:
        tau = "" if mask.tau is None else f" · tau {mask.tau:.2f}"
        return f"layer {self.layer} · step {self.step} · head {self.head}{tau}"

    # -- loading ---------------------------------------------------------------------------------

    def _first(self, layer: int | None, step: int | None) -> Entry:
        """The first call that has the given layer and step."""
        for known in self.book.entries:
            if layer in (None, known[0]) and step in (None, known[1]):
                return known
        raise ValueError(
            f"layer={layer!r}, step={step!r}: no mask; there are (layer, step) {self.book.entries}"
        )

    def _readable(self, wanted: Entry) -> tuple[Entry, Mask, str]:
        """The wanted mask, else the next one that can be read and what was wrong with the first."""
        *before, last = [wanted, *(entry for entry in self.book.entries if entry != wanted)]
        failed = ""
        for entry in before:
            try:
                return entry, self.book.load(*entry), failed
            except (OSError, ValueError, LookupError, RuntimeError) as error:
                where = f"layer {entry[0]}, step {entry[1]}"
                logger.exception("RouteViewer failed to load %s", where)
                failed = failed or f"Error while loading {where}: {type(error).__name__}: {error}"
        return last, self.book.load(*last), failed

    def _part_counts(self) -> dict[str, int]:
        _, count = payload.heads_sent(self.mask, 0)
        pairs = self.mask.grid[0] * self.mask.grid[1]
        curved = payload.sends_curves(self.book, self.mask)
        sizes = (
            count * self.mask.passing.nbytes // self.mask.heads,
            count * pairs if self.book.scores is not None else 0,
            self.book.grid.video_tokens * 2,
            4 * payload.cells(self.book, self.mask),
            4 * payload.cells(self.book, self.mask),
            2 * payload.cells(self.book, self.mask) * len(self.book.stops) if curved else 0,
        )
        return {name: payload.part_count(size) for name, size in zip(PARTED, sizes)}

    def _follow(self) -> None:
        """Loads what the browser lacks; another head of a mask that is there costs nothing."""
        there = (self.shown.get("layer"), self.shown.get("step")) == (self.layer, self.step)
        first, count = self.shown.get("heads", (0, 0))
        if not there or not first <= self.head < first + count:
            self._load()
        elif self.want_scores and not self.shown["scored"]:
            heads = range(first, first + count)
            self._send_scores(self._scores(heads))
            self._show(self.mask, heads, scored=True)

    def _load(self) -> None:
        mask = self.book.load(self.layer, self.step)
        if (mask.grid, mask.heads) != (self.mask.grid, self.mask.heads):
            raise ValueError(
                f"layer={self.layer}, step={self.step}: {mask.heads} heads of {mask.grid} blocks, "
                f"but the first mask has {self.mask.heads} of {self.mask.grid}; view them apart"
            )
        if not 0 <= self.head < mask.heads:
            raise ValueError(f"head={self.head}: must be in 0..{mask.heads - 1}")
        first, count = payload.heads_sent(mask, self.head)
        heads = range(first, first + count)
        small = self.book.scores is not None and payload.scores_at_once(mask)
        # All that can fail comes before anything changes: a mask is shown whole or not at all.
        scores = self._scores(heads) if small else None
        self.mask = mask
        self._serial += 1
        self._hand_over("bits", payload.bits(mask, first, count), self._serial)
        self.stops = payload.doubles(ladder(mask.tau))
        if scores is not None:  # they come with the bits, else after the first picture
            self._send_scores(scores)
        self._show(mask, heads, scored=small)
        if self.book.scores is not None and self.want_scores and not small:
            self._send_scores(self._scores(heads))
            self._show(mask, heads, scored=True)
        self._index()  # in a notebook once the cell has ended, after the picture is on its way

    def _show(self, mask: Mask, heads: range, *, scored: bool) -> None:
        """Tells the browser that what it was sent is complete, and what it is."""
        self.shown = {
            "serial": self._serial,
            "layer": self.layer,
            "step": self.step,
            "heads": [heads.start, len(heads)],
            "tau": mask.tau,
            "band": mask.band,
            "sink": list(mask.sink_span),
            "scored": scored,
        }

    def _send_scores(self, scores: BlockScores) -> None:
        self.rows = payload.row_statistics(scores)
        codes = payload.codes(scores, ladder(self.mask.tau))
        self._hand_over("codes", codes, self._serial)

    def _scores(self, heads: range) -> BlockScores:
        if self.book.scores is None:
            raise ValueError("book: has no scores, so tau cannot move; give MaskSet(scores=...)")
        return self.book.scores(self.layer, self.step, heads)

    def _fill_index(self) -> None:
        """A mask that was loaded has a place in the index."""
        place = self.book.place((self.shown["layer"], self.shown["step"]))
        table, fresh = self._densities(), not self._indexed
        if fresh:
            self._send_constant_tables()
            self._indexed = True
        if np.isnan(table[place]).all():
            table[place], fresh = self.mask.density().numpy(), True
        if fresh:
            self._hand_over("densities", table.tobytes())

    def _send_constant_tables(self) -> None:
        """After the first picture, which has no use for them yet."""
        self._hand_over("errors", self.book.table(self.book.errors, self.mask.heads).tobytes())
        if self.facts["curved"]:
            self._hand_over("curves", payload.curves(self.book, self.mask))

    def _densities(self) -> np.ndarray:
        """Densities of every known mask as made, float32 ``[layers, steps, heads]``; else NaN."""
        if self._table is None:
            self._table = self.book.table(self.book.densities, self.mask.heads)
        return self._table

    def _hand_over(self, name: str, data: bytes, serial: int = 0) -> None:
        """One update for each part that changed, so that none is larger than 1 MB."""
        for n, part in enumerate(payload.parts(serial, data)):
            self.set_trait(f"{name}_{n}", part)

    @traitlets.validate("query_block", "key_block")
    def _inside(self, proposal: Any) -> int:
        axis = ("query_block", "key_block").index(proposal["trait"].name)
        return checks.integer(
            proposal["trait"].name, proposal["value"], maximum=self.mask.grid[axis] - 1
        )

    @traitlets.validate("window")
    def _within(self, proposal: Any) -> list[int]:
        """[top, bottom, left, right] inside the mask; the viewer's own buttons stay there."""
        window, (rows, columns) = list(proposal["value"]), self.mask.grid
        four = len(window) == 4
        if not four or not (_fits(window[:2], rows) and _fits(window[2:], columns)):
            raise ValueError(
                f"window={window}: expected [top, bottom, left, right] with "
                f"0 <= top < bottom <= {rows} and 0 <= left < right <= {columns}"
            )
        return window

    # -- errors ----------------------------------------------------------------------------------

    def _guard(self, work: Callable[[], None], *, heals: bool = True) -> None:
        """Runs work and shows its exception, which would else vanish in the kernel's log.

        Work that ``heals`` takes an open error back: only a mask that was loaded does.
        """
        try:
            work()
        except Exception as error:
            where = f"layer {self.layer}, step {self.step}, head {self.head}"
            logger.exception("RouteViewer failed to load %s", where)
            self.problem = f"Error while loading {where}: {type(error).__name__}: {error}"
            raise
        if heals:
            self.problem = payload.doubt(self.mask, (self.layer, self.step))
            if self.problem:
                logger.warning("RouteViewer: %s", self.problem)

    def _log_browser(self, change: dict[str, Any]) -> None:
        if change["new"]:
            logger.error("RouteViewer failed in the browser: %s", change["new"])
