"""The panels' lines of text, as HTML that a screen reader follows."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from torch import Tensor

from blockattn.errors import Reason
from workbench.views.table import Table
from workbench.widgets.capture_session import CaptureSession, Measured

LINE = "margin:2px 0;line-height:1.45;font-size:13px"
LINK = "color:#1a5fb4;text-decoration:underline"
PRE = "font-size:12px;line-height:1.35;margin:4px 0"
ALERT = (
    "margin:4px 0;padding:6px 10px;border:1px solid #b3261e;border-left-width:5px;"
    "color:#8c1d18;background:#fdf1f0;font-size:13px;white-space:pre-wrap"
)

OLD = "wb-old"  # class of what belongs to a setting before

TABLE_STYLE = """<style>
.wb-table {overflow-x: auto; font-size: 12px; line-height: 1.35}
.wb-table table {margin: 6px 0}
.wb-table td, .wb-table th {padding: 2px 16px 2px 0; vertical-align: top}
.wb-table th {border-bottom: 1px solid #aab4c0}
</style>"""


def heading(session: CaptureSession) -> str:
    """What is being looked at, and where it is computed."""
    capture = session.capture
    t, h, w = capture.grid.shape
    facts = (
        f"grid {t} × {h} × {w} (t, h, w), {capture.grid.tokens:,} tokens, "
        f"{session.heads} heads of {session.head_dim}, computed on {session.device}"
    )
    return f'<div style="{LINE}"><b>{escape(capture.title)}</b> &nbsp; {facts}</div>'


def lines(*texts: str) -> str:
    """Plain lines under a picture."""
    return "".join(f'<div style="{LINE}">{escape(text)}</div>' for text in texts)


def table(*tables: Table) -> str:
    """Tables, close-set, that scroll sideways where they are wider than the panel."""
    body = "".join(one._repr_html_() for one in tables if one.rows)
    return f'{TABLE_STYLE}<div class="wb-table">{body}</div>'


def status(body: str) -> str:
    """A line of HTML whose changes are read out; what is not markup in it is escaped already."""
    return f'<div role="status" aria-live="polite" style="{LINE}">{body}</div>'


def what_was(text: str) -> str:
    """The line on what ran, from plain text."""
    return status(f"<b>What ran:</b> {escape(text)}")


def what_ran(
    session: CaptureSession,
    measured: Measured | None,
    head: int,
    *,
    failed: bool = False,
    title: str = "What ran",
) -> str:
    """Implementation, reasons, delivered density and error of the real sparse call."""
    if measured is not None:
        body = f"<b>{title}:</b> {call(measured, head)}"
    elif failed:
        body = f"<b>{title}:</b> nothing: the call failed, see the error above"
    elif session.automatic:
        body = f"<b>{title}:</b> … the call runs when the controls rest"
    else:
        body = (
            f"<b>{title}:</b> nothing yet. One dense call takes {session.flops / 1e9:,.0f} GFLOP "
            f"on {session.device}; press the button to run it"
        )
    return status(body)


def problems(errors: Mapping[str, Exception], *, old: bool = False) -> str:
    """Every open error with a sign and its text; empty without one.

    Args:
        errors: by what was being done.
        old: the picture and the numbers below are still there, of a setting before.
    """
    texts = [
        f'<div role="alert" style="{ALERT}">⚠ <b>Error while {escape(doing)}:</b> '
        f"{escape(type(error).__name__)}: {escape(str(error))}</div>"
        for doing, error in errors.items()
    ]
    if old:
        note = "The picture and the numbers below are of the setting before."
        texts.append(f"<style>.{OLD} {{opacity: 0.35}}</style>{lines(note)}")
    return "".join(texts)


def configuration(text: str) -> str:
    """A configuration to unfold and to save; the browser does both, also without a kernel."""
    data = f"data:application/yaml;base64,{base64.b64encode(text.encode()).decode()}"
    link = f'<a style="{LINK}" download="config.yaml" href="{data}">save as config.yaml</a>'
    return (
        f'<details style="{LINE}"><summary>Configuration for a server, {link}</summary>'
        f'<pre style="{PRE}">{escape(text)}</pre></details>'
    )


def call(measured: Measured, head: int) -> str:
    """What ran, delivered density, time, error of each head, and why nothing faster ran."""
    trace = measured.trace
    first = "" if trace.reasons else " It is the first choice for this call."
    dense = " <b>Nothing was sparse: this ran dense.</b>" if trace.density == 1 else ""
    names = f"{escape(trace.algorithm)} on implementation <b>{escape(trace.impl)}</b>"
    return (
        f"{names}, delivered density <b>{trace.density:.4f}</b> over all heads, "
        f"{measured.seconds * 1e3:,.0f} ms with routing (one call).{dense} Relative L2 error "
        f"against dense: {_errors(measured.relative_l2, head)}.{first}{_faster(trace.reasons)}"
    )


def _faster(reasons: Sequence[Reason]) -> str:
    """Which implementations are faster but did not serve the call; unfolded, why."""
    if not reasons:
        return ""
    why: dict[str, list[str]] = {}
    for reason in reasons:
        why.setdefault(reason.impl, []).append(reason.text)
    rows = (f"<li>{escape(name)}: {escape('; '.join(found))}</li>" for name, found in why.items())
    return (
        f"<details><summary>Faster, but not here: {escape(', '.join(why))}</summary>"
        f'<ul style="margin:0">{"".join(rows)}</ul></details>'
    )


def _errors(errors: Tensor, head: int, shown: int = 8) -> str:
    texts = [f"head {index} {value:.4f}" for index, value in enumerate(errors.tolist())]
    texts[head] = f"<b>{texts[head]}</b>"
    if len(texts) > shown:
        worst = int(errors.argmax())
        return f"{texts[head]}, mean {float(errors.mean()):.4f}, worst {texts[worst]}"
    return ", ".join(texts)
