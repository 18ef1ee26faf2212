"""Draws ratios as a bar chart in SVG, on a logarithmic scale around 1."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, LABELS, ROW, GAP, MARGIN = 720, 190, 18, 14, 34
BETTER, WORSE, GRID, TEXT = "#1060c0", "#c05020", "#dddddd", "#333333"

Groups = Mapping[str, Sequence[tuple[str, float]]]


def draw(title: str, groups: Groups) -> str:
    """Return an SVG with one bar per name and ratio, by group; bars left of 1 mean slower."""
    ratios = [ratio for rows in groups.values() for _, ratio in rows]
    low = min(0, math.floor(min(map(math.log2, ratios), default=0)))
    high = max(1, math.ceil(max(map(math.log2, ratios), default=1)))
    height = 2 * MARGIN + sum(ROW * (len(rows) + 1) + GAP for rows in groups.values())

    def across(ratio: float) -> float:
        return LABELS + (math.log2(ratio) - low) / (high - low) * (WIDTH - LABELS - 60)

    font = f'font-family="sans-serif" font-size="12" fill="{TEXT}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" {font}>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20" font-size="14" font-weight="bold">{html.escape(title)}</text>',
    ]
    for power in range(low, high + 1):
        x, name = across(2.0**power), f"{2.0**power:g}x"
        colour = TEXT if power == 0 else GRID
        out.append(f'<path d="M{x:.1f} {MARGIN} V{height - MARGIN}" stroke="{colour}"/>')
        out.append(f'<text x="{x:.1f}" y="{height - 16}" text-anchor="middle">{name}</text>')
    y = MARGIN
    for group, rows in groups.items():
        y += ROW
        out.append(f'<text x="8" y="{y}" font-weight="bold">{html.escape(group)}</text>')
        for name, ratio in rows:
            begin, end = sorted((across(1.0), across(ratio)))
            colour = BETTER if ratio >= 1 else WORSE
            out.append(f'<text x="{LABELS - 8}" y="{y + 15}" text-anchor="end">')
            out.append(f"{html.escape(name)}</text>")
            out.append(f'<rect x="{begin:.1f}" y="{y + 5}" width="{max(end - begin, 1):.1f}" ')
            out.append(f'height="{ROW - 6}" fill="{colour}"/>')
            out.append(f'<text x="{end + 5:.1f}" y="{y + 15}">{ratio:.1f}</text>')
            y += ROW
        y += GAP
    return "\n".join([*out, "</svg>\n"])
