"""Reliability diagrams as SVG: one panel a position, before and after calibration.

Written by hand: a few hundred shapes do not justify a plotting library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from specbench.cache import write_text_atomically
from specbench.errors import InputError
from specbench.estimators.reliability import ReliabilityCurve

# Pixels. Panels of 150 keep four columns within the width of a rendered Markdown page.
_PANEL = 150
_GAP_X, _GAP_Y = 50, 62
_MARGIN_LEFT, _MARGIN_TOP, _MARGIN_BOTTOM, _MARGIN_RIGHT = 52, 78, 46, 16
_NUM_COLUMNS = 4
_MIN_RADIUS, _MAX_RADIUS = 1.5, 6.0
_TICKS = (0.0, 0.5, 1.0)
# Blue and orange of Okabe and Ito's palette, told apart with every form of colour blindness;
# the shapes differ as well.
_BEFORE_COLOUR, _AFTER_COLOUR = "#d55e00", "#0072b2"


@dataclass(frozen=True)
class ReliabilityPanel:
    """One panel.

    Attributes:
        title: for example "position 1".
        before, after: curves; an empty one is not drawn.
        ece_before, ece_after: printed below the title; None prints a dash.
    """

    title: str
    before: ReliabilityCurve
    after: ReliabilityCurve
    ece_before: float | None = None
    ece_after: float | None = None


def reliability_svg(panels: Sequence[ReliabilityPanel], title: str) -> str:
    """The diagram as SVG text; areas of the marks are in proportion to sample weight.

    Raises:
        InputError: no panels.
    """
    if not panels:
        raise InputError("a reliability diagram needs at least one position")
    num_columns = min(_NUM_COLUMNS, len(panels))
    num_rows = -(-len(panels) // num_columns)
    # The legend needs three panels' width even where there is only one.
    width = max(
        _MARGIN_LEFT + num_columns * (_PANEL + _GAP_X) - _GAP_X + _MARGIN_RIGHT,
        _MARGIN_LEFT + 3 * _PANEL,
    )
    height = _MARGIN_TOP + num_rows * (_PANEL + _GAP_Y) - _GAP_Y + _MARGIN_BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11" fill="#222">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        *_header(title),
    ]
    for index, panel in enumerate(panels):
        row, column = divmod(index, num_columns)
        left = _MARGIN_LEFT + column * (_PANEL + _GAP_X)
        top = _MARGIN_TOP + row * (_PANEL + _GAP_Y)
        parts += [
            f'<g class="panel" transform="translate({left} {top})">',
            *_frame(panel),
            *_curve(panel.before, "before", _BEFORE_COLOUR),
            *_curve(panel.after, "after", _AFTER_COLOUR),
            "</g>",
        ]
    middle_x, middle_y = width / 2, _MARGIN_TOP + (height - _MARGIN_TOP - _MARGIN_BOTTOM) / 2
    parts += [
        f'<text x="{middle_x:g}" y="{height - 10}" text-anchor="middle">predicted</text>',
        f'<text transform="translate(14 {middle_y:g}) rotate(-90)" text-anchor="middle">'
        "observed</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def write_reliability_diagram(path: Path, panels: Sequence[ReliabilityPanel], title: str) -> None:
    """Write the SVG atomically; raises EnvironmentProblem if the path cannot be written."""
    write_text_atomically(path, reliability_svg(panels, title))


def _header(title: str) -> list[str]:
    y = 42
    return [
        f'<text x="{_MARGIN_LEFT}" y="22" font-size="14" font-weight="bold">{escape(title)}</text>',
        _mark("before", _MARGIN_LEFT + 5, y - 4, 4.0, _BEFORE_COLOUR),
        f'<text x="{_MARGIN_LEFT + 14}" y="{y}">before</text>',
        _mark("after", _MARGIN_LEFT + 75, y - 4, 4.0, _AFTER_COLOUR),
        f'<text x="{_MARGIN_LEFT + 84}" y="{y}">after calibration</text>',
        f'<text x="{_MARGIN_LEFT + 190}" y="{y}" fill="#666">dashed: perfect; area: samples</text>',
    ]


def _frame(panel: ReliabilityPanel) -> list[str]:
    errors = f"ECE {_number(panel.ece_before)} → {_number(panel.ece_after)}"
    parts = [
        f'<rect width="{_PANEL}" height="{_PANEL}" fill="none" stroke="#999"/>',
        f'<line x1="0" y1="{_PANEL}" x2="{_PANEL}" y2="0" stroke="#999" stroke-dasharray="4 3"/>',
        f'<text x="0" y="-6" font-weight="bold">{escape(panel.title)}</text>',
        f'<text x="{_PANEL}" y="-6" text-anchor="end">{errors}</text>',
    ]
    for tick in _TICKS:
        x, y = _x(tick), _y(tick)
        parts.append(f'<text x="{x:g}" y="{_PANEL + 13}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<text x="-5" y="{y + 4:g}" text-anchor="end">{tick:g}</text>')
    return parts


def _curve(curve: ReliabilityCurve, name: str, colour: str) -> list[str]:
    if not curve.predicted:
        return []
    points = [(_x(p), _y(o)) for p, o in zip(curve.predicted, curve.observed, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    heaviest = max(curve.weight)
    return [
        f'<polyline class="{name}" points="{path}" fill="none" stroke="{colour}" '
        'stroke-opacity="0.6"/>',
        *(
            _mark(name, x, y, max(_MIN_RADIUS, _MAX_RADIUS * (weight / heaviest) ** 0.5), colour)
            for (x, y), weight in zip(points, curve.weight, strict=True)
        ),
    ]


def _mark(name: str, x: float, y: float, radius: float, colour: str) -> str:
    """A circle after calibration, a square of the same area before it."""
    style = f'class="{name}" fill="{colour}" fill-opacity="0.7"'
    if name == "after":
        return f'<circle {style} cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
    side = radius * 1.77  # sqrt(pi)
    return (
        f'<rect {style} x="{x - side / 2:.1f}" y="{y - side / 2:.1f}" width="{side:.1f}" '
        f'height="{side:.1f}"/>'
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _x(probability: float) -> float:
    return probability * _PANEL


def _y(probability: float) -> float:
    return (1.0 - probability) * _PANEL
