"""Plain SVG pictures of measurements, the same bytes for the same figures. Owns axes, bars and lines; refuses to know where figures come from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, BAR, LEFT, RIGHT = 720, 18, 250, 60
COLOURS = ("#3b7dd8", "#d8743b", "#3ba55d", "#9a5bd0", "#b8a02a", "#5c6b7a")
STYLE = (
    "<style>text{font:12px sans-serif;fill:#24292f}.t{font-size:14px;font-weight:bold}"
    ".a{stroke:#8c959f;stroke-width:1}.g{stroke:#d0d7de;stroke-width:1}"
    "@media(prefers-color-scheme:dark){text{fill:#c9d1d9}.g{stroke:#30363d}}</style>"
)


def _svg(height: float, body: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}">'
    return "\n".join([head, STYLE, *body, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def bars(title: str, rows: Sequence[tuple[str, float, str]], mark: float | None = None, unit: str = "") -> str:
    """Horizontal bars: (label, value, group of the colour); `mark` draws a line at a value. Values start at 0."""
    top = max([v for _, v, _ in rows] + ([mark] if mark else [])) * 1.05
    span = WIDTH - LEFT - RIGHT
    groups = list(dict.fromkeys(g for _, _, g in rows))
    body, y = [_text(10, 20, title, kind="t")], 36.0
    for label, value, group in rows:
        long = span * value / top
        body.append(_text(LEFT - 8, y + BAR - 5, label, "end"))
        body.append(f'<rect x="{LEFT}" y="{y:.1f}" width="{long:.1f}" height="{BAR - 4}" fill="{COLOURS[groups.index(group) % len(COLOURS)]}"/>')
        body.append(_text(LEFT + long + 5, y + BAR - 5, f"{value:.3g}{unit}"))
        y += BAR + 4
    if mark:
        x = LEFT + span * mark / top
        body.append(f'<line x1="{x:.1f}" y1="32" x2="{x:.1f}" y2="{y:.1f}" class="a" stroke-dasharray="4 3"/>')
        body.append(_text(x, y + 12, f"{mark:g}{unit}", "middle"))
        y += 16
    return _svg(y + 26, body + _legend(groups, y + 16))


def _legend(groups: Sequence[str], y: float) -> list[str]:
    out, x = [], 10.0
    for i, group in enumerate(groups):
        out.append(f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>')
        out.append(_text(x + 14, y, group))
        x += 30 + 6.6 * len(group)
    return out


def lines(title: str, series: dict[str, Sequence[tuple[float, float]]], x_name: str, y_name: str, log_x: bool = False) -> str:
    """Curves through (x, y) points, y from 0."""
    place = (lambda v: math.log2(max(v, 1))) if log_x else (lambda v: v)
    points = [p for s in series.values() for p in s]
    low, high = min(place(x) for x, _ in points), max(place(x) for x, _ in points)
    top, left, right, up, down = max(y for _, y in points) * 1.08, 70, WIDTH - 20, 54, 318

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * (place(x) - low) / ((high - low) or 1), down - (down - up) * y / top

    body = [_text(10, 20, title, kind="t")]
    for k in range(5):
        value = top * k / 4
        y = at(points[0][0], value)[1]
        label = f"{value:.0f}" if top >= 100 else f"{value:.3g}"
        body += [f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" class="g"/>', _text(left - 6, y + 4, label, "end")]
    for x in sorted({x for x, _ in points}):
        body.append(_text(at(x, 0)[0], down + 16, f"{x:g}", "middle"))
    for i, (_, values) in enumerate(series.items()):
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (at(x, y) for x, y in sorted(values)))
        body.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="2"/>')
    body += [_text((left + right) / 2, down + 34, x_name, "middle"), _text(10, up - 16, y_name)]
    return _svg(down + 62, body + _legend(list(series), down + 54))
