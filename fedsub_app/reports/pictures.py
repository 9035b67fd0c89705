"""Pictures of runs, drawn with matplotlib: learning curves, a partition. PNG files and the report's SVG look alike."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from html import escape
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedsub_app.common.errors import UserError
from fedsub_app.reports.curves import COSTS, LOSS, Curve, Group, costs_of, curves, losses_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart, without their yellow, which white swallows. Seven
# colours and four dashes have no common divisor: 28 styles.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("", "6 2", "2 1.5", "7 2 1.5 2")  # of a line of width 1, as SVG's stroke-dasharray
LONGEST = 18  # letters of a label beside its curve; where one is longer all are numbers
MAX_LABELS = 22  # beside one picture


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def dashes(number: int) -> str:
    """Return how the curve ``number`` is dashed, as SVG's stroke-dasharray; "" is a whole line."""
    return DASHES[number % len(DASHES)]


def figure(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> "Figure":
    from matplotlib.figure import Figure  # on demand: it costs 0.3 s of every start

    return Figure(figsize=(width, height), layout=layout)


def legend_beside(drawing: "Figure") -> None:
    """Add the legend of all axes of a figure, where it covers none of them."""
    drawing.legend(loc="outside right upper", fontsize="small")


def as_text() -> AbstractContextManager[None]:
    """Draw labels as they are: letters and no outlines in SVG, no mathematics between dollar signs."""
    from matplotlib import rc_context

    return rc_context({"svg.fonttype": "none", "text.parse_math": False, "font.size": 9})


def spread_out(places: Sequence[float], gap: float) -> list[float]:
    """Return places near those given, in the same order, ``gap`` apart or more, and within 0 to 1 if they fit."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    spread = [min(1.0, max(0.0, places[index])) for index in order]
    for low, high in pairwise(range(len(spread))):
        spread[high] = max(spread[high], spread[low] + gap)
    if spread and spread[-1] > 1:
        spread[-1] = 1.0
        for high, low in pairwise(reversed(range(len(spread)))):
            spread[low] = min(spread[low], spread[high] - gap)
    moved = dict(zip(order, spread, strict=True))
    return [moved[index] for index in range(len(places))]


def short_names(lines: Sequence[Curve]) -> list[str]:
    """Return what stands beside the curves: their labels, or numbers where one is too long; "" where they are many."""
    if len(lines) > MAX_LABELS:
        return [""] * len(lines)
    long = any(len(line.label) > LONGEST for line in lines)
    return [str(line.number + 1) if long else line.label for line in lines]


def draw_lines(axes: "Axes", lines: Sequence[Curve], axis: str, limits: tuple[float, float], log: bool = False) -> None:
    """Draw curves against ``axis`` with their bands, each with its label at its end; ``log``: on a logarithmic axis."""
    axes.set_ylim(*limits)
    if log:
        axes.set_xscale("log")
    for line in lines:
        x, marker = line.x[axis], "o" if len(line.mean) == 1 else ""
        pattern = [float(word) for word in dashes(line.number).split()]
        style: Any = (0, pattern) if pattern else "-"
        tone = colour(line.number)
        axes.plot(x, line.mean, color=tone, linestyle=style, marker=marker, linewidth=1.5, gid=f"run{line.number}")
        if line.low != line.mean:
            axes.fill_between(x, line.low, line.high, color=tone, alpha=0.15, linewidth=0, gid=f"run{line.number}")
    low, high = limits
    height = axes.get_position().height * axes.get_figure().get_figheight() * 72  # type: ignore[union-attr]
    ends = spread_out([(line.mean[-1] - low) / (high - low) for line in lines], min(10 / height, 1 / len(lines)))
    for line, name, place in zip(lines, short_names(lines), ends, strict=True):
        tone = colour(line.number)
        axes.annotate(
            name,
            (line.x[axis][-1], line.mean[-1]),
            (1.04, place),
            textcoords="axes fraction",
            color=tone,
            va="center",
            arrowprops={"arrowstyle": "-", "color": "#aaaaaa", "linewidth": 0.5, "shrinkA": 2, "shrinkB": 2},
            gid=f"run{line.number}",
        )
    axes.set_xlabel(axis)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if not log:
        axes.locator_params(axis="x", nbins=6, integer=axis == "round")


def limits_of(lines: Sequence[Curve]) -> tuple[float, float]:
    """Return the range that holds some curves and their bands, with a margin."""
    low = min(min(line.low) for line in lines)
    high = max(max(line.high) for line in lines)
    margin = max(1.0 if lines[0].score.unit else 0.0, 0.04 * (high - low)) or 1.0
    return low - margin, high + margin


def axes_of(groups: Sequence[Group]) -> list[str]:
    """Return what the curves of some groups are drawn against: rounds and, of several groups, the costs."""
    return ["round", *(costs_of(groups) if len(groups) > 1 else ())]


def write_picture(drawing: "Figure", target: Path) -> Path:
    try:
        with as_text():
            drawing.savefig(target, dpi=120)
    except ValueError as error:  # a suffix that matplotlib does not know; its message lists those that it does
        raise UserError(f"{target}: {error}") from None
    return target


def figure_of_curves(groups: Sequence[Group]) -> "Figure":
    """Return the score against rounds, bytes, FLOPs and seconds, a curve a group; of one group score and loss."""
    rows = curves(groups)
    if not rows:
        folders = ", ".join(str(record.folder) for group in groups for record in group.records)
        raise UserError(f"{folders}: no evaluated round to draw")
    if len(groups) == 1:
        panels = [[(title, lines, "round") for title, lines in (rows | curves(groups, losses_of)).items()]]
    else:
        panels = [[(title, lines, axis) for axis in axes_of(groups)] for title, lines in rows.items()]
    with as_text():
        drawing = figure(4 * len(panels[0]), 3.6 * len(panels))
        keys: dict[str, str] = {}
        for row, plots in zip(panels, drawing.subplots(len(panels), len(panels[0]), squeeze=False), strict=True):
            for number, ((title, lines, axis), plot) in enumerate(zip(row, plots, strict=True)):
                draw_lines(plot, lines, axis, limits_of(lines))
                if not number or len(groups) == 1:
                    plot.set_ylabel(lines[0].score.titled(title))
                keys |= {name: line.label for name, line in zip(short_names(lines), lines, strict=True)}
        if any(name != label for name, label in keys.items()):
            text = "\n".join(f"{name}  {label}" for name, label in keys.items())
            drawing.supxlabel(text, fontsize="small", ha="left", x=0.02)
    return drawing


def _against_bytes(groups: Sequence[Group]) -> "Figure | None":
    """Return the score against bytes on a logarithmic axis, a panel a score; ``None`` with fewer than two groups.

    A group that sends nothing is a line at its last score.
    """
    axis = next(iter(COSTS))
    rows = {title: lines for title, lines in curves(groups).items() if any(line.x[axis][-1] > 0 for line in lines)}
    if len(groups) < 2 or not rows:
        return None
    drawing = figure(1 + 4.4 * len(rows), 3.2)
    for panel, (title, lines) in zip(drawing.subplots(1, len(rows), squeeze=False)[0], rows.items(), strict=True):
        sent = [amount for line in lines for amount in line.x[axis] if amount > 0]
        shown = []
        for line in lines:
            first = next((k for k, amount in enumerate(line.x[axis]) if amount > 0), None)
            if first is None:
                x, part = [min(sent), max(sent)], slice(-1, None)
                mean, low, high = (2 * list(values[part]) for values in (line.mean, line.low, line.high))
            else:
                x, mean, low, high = (values[first:] for values in (line.x[axis], line.mean, line.low, line.high))
                panel.plot(x[-1], mean[-1], "o", color=colour(line.number), gid=f"run{line.number}")
            shown.append(line._replace(x={axis: x}, mean=mean, low=low, high=high))
        draw_lines(panel, shown, axis, limits_of(shown), log=True)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set(xlabel="MB sent, both ways, by the papers' formula", ylabel=lines[0].score.titled(title))
    return drawing


def draw_against_bytes(groups: Sequence[Group], target: Path | None = None) -> str:
    """Return the score against bytes as SVG, "" where there is no picture; ``target``: a file for it as well."""
    with as_text():
        drawing = _against_bytes(groups)
        if drawing and target:
            drawing.savefig(target, dpi=160)
        return svg(drawing, f"{groups[0].records[0].score.name.capitalize()} against bytes") if drawing else ""


def svg_of_curves(title: str, lines: Sequence[Curve], axis: str, ylabel: str = "") -> str:
    """Return one picture of curves for an HTML page; ``ylabel``: instead of the score."""
    with as_text():
        # The layout is fixed, which takes a third of the time that a constrained one does.
        drawing = figure(width := 4.2, height := 2.9, layout=None)
        letters = max(map(len, short_names(lines)))
        left, bottom, top, right = 0.54, 0.48, 0.08, 0.22 + 0.08 * letters  # inches
        box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
        axes = drawing.add_axes(box)
        draw_lines(axes, lines, axis, limits_of(lines))
        axes.set_ylabel(ylabel or lines[0].score.titled(title if lines[0].score == LOSS else lines[0].score.name))
        return svg(drawing, f"{title} against {axis}", lines)


def svg_of_lines(
    title: str, ylabel: str, xlabel: str, lines: Mapping[int, tuple[str, list[float], list[float]]]
) -> str:
    """Return one picture of plain lines, number of the style -> label, x, y, for an HTML page."""
    as_curves = [Curve(label, number, {xlabel: x}, y, y, y) for number, (label, x, y) in lines.items()]
    return svg_of_curves(title, as_curves, xlabel, ylabel)


def svg(drawing: "Figure", title: str, lines: Sequence[Curve] = ()) -> str:
    """Return a figure as SVG that stands inside an HTML page, with a title for who cannot see it."""
    from matplotlib import rc_context

    text = StringIO()
    with rc_context({"svg.hashsalt": title}):  # the names of its parts: the same each time, others in each picture
        drawing.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    body = "<svg" + text.getvalue().partition("<svg")[2]
    body = re.sub(r' id="run(\d+)"', r' class="run\1"', body)
    body = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", body)  # figure_1, axes_1: the same in every picture
    label = escape(title, quote=True)
    head = f'<svg role="img" aria-label="{label}"{_scales(drawing, lines)} viewBox'
    # The head as it is, no template: JSON has backslashes.
    return re.sub(r"<svg [^>]*?viewBox", lambda _: head, body, count=1, flags=re.DOTALL)


def _scales(drawing: "Figure", lines: Sequence[Curve]) -> str:
    """Return what a page's script needs to show the curves' values under the pointer; "" without curves.

    ``data-box``: left, top, width, height as fractions; ``data-x``, ``data-y``: the axes' spans; ``data-labels``.
    """
    if not lines:
        return ""
    axes = drawing.axes[0]
    box = axes.get_position()
    numbers = {"box": (box.x0, 1 - box.y1, box.width, box.height), "x": axes.get_xlim(), "y": axes.get_ylim()}
    spans = "".join(f' data-{name}="{" ".join(f"{v:.6g}" for v in values)}"' for name, values in numbers.items())
    return f'{spans} data-labels="{escape(json.dumps({line.number: line.label for line in lines}), quote=True)}"'


def draw_partition(counts: Sequence[Sequence[int]], target: Path) -> None:
    """Draw client × class counts as circles."""
    clients, classes = len(counts), len(counts[0])
    drawing = figure(min(16.0, 4 + 0.3 * clients), min(12.0, 1.5 + 0.25 * classes))
    axes = drawing.subplots()
    axes.locator_params(integer=True)
    maximum = max(max(row) for row in counts) or 1
    points = [(c, k, 180 * row[k] / maximum) for c, row in enumerate(counts) for k in range(classes) if row[k]]
    axes.scatter(*zip(*points, strict=True), color=COLOURS[0])
    axes.set(xlabel="client", ylabel="class", xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3))
    axes.set_title(f"training samples: the largest circle is {maximum}", fontsize="medium")
    drawing.savefig(target, dpi=120)
