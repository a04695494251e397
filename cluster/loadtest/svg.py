"""Frame: the axes of one plot as SVG, and where values lie in it.

Owns scales, ticks and marks. Colours are classes of the page's style. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

NARROW, WIDE = 540, 1100
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 26, 40
_WANTED_TICKS = 6


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from `low` to `high` onto pixels from `begin` to `end`; by their logarithm if `is_log`. Ticks of
    counts are whole.
    """

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False
    is_whole: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        share = math.log(value / low) / math.log(high / low) if self.is_log else (value - low) / (high - low)
        return self.begin + share * (self.end - self.begin)

    @property
    def ticks(self) -> list[float]:
        if self.is_log:
            return _log_ticks(self.low, self.high)
        return [tick for tick in _ticks(self.low, self.high) if not self.is_whole or tick == int(tick)]


@dataclass(frozen=True, slots=True)
class Frame:
    """One plot. `x` and `y` place values; the methods give pieces of SVG."""

    x: Scale
    y: Scale
    width: int
    height: int

    def axes(
        self, x_label: str, y_label: str, x_text: Callable[[float], str], y_text: Callable[[float], str]
    ) -> str:
        bottom, right = self.height - BOTTOM, self.width - RIGHT
        parts = []
        for tick in self.y.ticks:
            at = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">')
            parts.append(f"{escape(y_text(tick))}</text>")
        for tick in self.x.ticks:
            at = self.x(tick)
            parts.append(f'<line class="axis" x1="{at:.1f}" y1="{bottom}" x2="{at:.1f}" y2="{bottom + 4}"/>')
            parts.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">')
            parts.append(f"{escape(x_text(tick))}</text>")
        parts.append(f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
        middle = (LEFT + right) / 2
        parts.append(f'<text class="label" x="{middle}" y="{self.height - 5}" text-anchor="middle">')
        parts.append(f'{escape(x_label)}</text><text class="label" x="{LEFT - 52}" y="13">')
        parts.append(f"{escape(y_label)}</text>")
        return "".join(parts)

    def line(self, points: Sequence[tuple[float, float]], css: str) -> str:
        where = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return f'<polyline class="{css}" points="{where}"/>'

    def area(self, points: Sequence[tuple[float, float]], css: str) -> str:
        """Down to the bottom of the plot."""
        if not points:
            return ""
        floor = self.y(self.y.low)
        where = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        first, last = self.x(points[0][0]), self.x(points[-1][0])
        return f'<polygon class="{css}" points="{first:.1f},{floor:.1f} {where} {last:.1f},{floor:.1f}"/>'

    def bar(self, begin: float, end: float, value: float, css: str, title: str) -> str:
        left, right, top = self.x(begin), self.x(end), self.y(value)
        height = self.y(self.y.low) - top
        return (
            f'<rect class="{css}" x="{left + 0.5:.1f}" y="{top:.1f}" width="{max(right - left - 1, 1):.1f}" '
            f'height="{height:.1f}"><title>{escape(title)}</title></rect>'
        )

    def dot(self, x: float, y: float, css: str, title: str = "", radius: float = 2.6) -> str:
        inner = f"<title>{escape(title)}</title>" if title else ""
        at = f'cx="{self.x(x):.1f}" cy="{self.y(y):.1f}"'
        return f'<circle class="{css}" {at} r="{radius}">{inner}</circle>'

    def upright(self, x: float, css: str, text: str, row: int = 0) -> str:
        """A line across the plot at `x`; `row` keeps the words of neighbours apart."""
        at, height = self.x(x), self.height - BOTTOM
        is_late = at > self.width * 0.8
        place = f'x="{at + (-5 if is_late else 5):.1f}" y="{TOP + 11 + 14 * row}"'
        anchor = "end" if is_late else "start"
        return (
            f'<line class="{css}" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{height}"/>'
            f'<text class="note {css}-text" {place} text-anchor="{anchor}">{escape(text)}</text>'
        )

    def level(self, y: float, css: str, text: str) -> str:
        """A line along the plot at `y`."""
        at, right = self.y(y), self.width - RIGHT
        return (
            f'<line class="{css}" x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>'
            f'<text class="note {css}-text" x="{right - 4}" y="{at - 5:.1f}" text-anchor="end">'
            f"{escape(text)}</text>"
        )

    def drawn(self, *parts: str, title: str) -> str:
        inner = "".join(parts)
        size = f'viewBox="0 0 {self.width} {self.height}"'
        return f'<svg {size} role="img" aria-label="{escape(title, quote=True)}">{inner}</svg>'


def make_frame(
    x: tuple[float, float], y: tuple[float, float], size: tuple[int, int], axes: str = ""
) -> Frame:
    """`x` and `y` are the lowest and highest value; a range of no length is widened. `size`: pixels, width
    and height. `axes`: of "xyn" those that are logarithmic, and "n" where y is a number of things.
    """
    (width, height), is_x_log, is_y_log = size, "x" in axes, "y" in axes
    return Frame(
        Scale(*_widened(x, is_x_log), LEFT, width - RIGHT, is_x_log),
        Scale(*_widened(y, is_y_log), height - BOTTOM, TOP, is_y_log, "n" in axes),
        width,
        height,
    )


def plain(value: float) -> str:
    """A tick's number."""
    return f"{value:g}"


def _widened(span: tuple[float, float], is_log: bool) -> tuple[float, float]:
    low, high = span
    if is_log:
        return (low, high) if high > low * 1.01 else (low / 1.5, low * 1.5)
    return (low, high) if high > low else (low, low + 1.0)


def _ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / _WANTED_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each decade, fewer where there are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        inside = [value for value in found if low <= value <= high]
        if len(inside) <= _WANTED_TICKS + 3:
            break
    return inside
