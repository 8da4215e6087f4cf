"""A picture of profiles: one flame graph per scenario in a single SVG file that needs nothing else.

Width is time, top down: the step, its parts, the records of a part. Colour is the share of the machine's limit: green
where nothing is left to gain, red where much is. A tooltip gives the numbers.
"""

from collections.abc import Iterator, Sequence
from html import escape

from headrace.bench.profile import Limits, Profile, Row

WIDTH, BAR, GAP = 1200, 26, 34
_LETTER = 7.0  # pixels, about


def flame_svg(profiles: Sequence[Profile], limits: Limits, title: str) -> str:
    """The file's text. Every step has the same width: compare shares, not lengths, between scenarios."""
    height = GAP + len(profiles) * (3 * BAR + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="monospace" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/><text x="4" y="18">{escape(title)}</text>',
    ]
    for index, profile in enumerate(profiles):
        parts.extend(_flame(profile, limits, GAP + index * (3 * BAR + GAP)))
    return "\n".join([*parts, "</svg>", ""])


def _flame(profile: Profile, limits: Limits, top: int) -> Iterator[str]:
    scale = WIDTH / profile.wall_ns
    name = f"{profile.scenario.name}: {profile.wall_ns / 1e6:.3f} ms a step"
    yield _bar((0.0, top, WIDTH), "#ddd", name, name)
    by_part: dict[str, list[Row]] = {}
    for row in profile.rows:
        by_part.setdefault(row.label, []).append(row)
    x = 0.0
    for part, rows in by_part.items():
        ns = sum(row.ns for row in rows)
        floor = sum(row.of_limit(limits) * row.ns for row in rows)
        yield _bar((x, top + BAR, ns * scale), _colour(floor / ns), part, _says(part, ns, profile, floor / ns))
        for row in rows:
            share = row.of_limit(limits)
            says = _says(f"{row.count} x {row.name}", row.ns, profile, share)
            yield _bar((x, top + 2 * BAR, row.ns * scale), _colour(share), row.name, says)
            x += row.ns * scale
    for part, ns in (("waiting", profile.idle_ns), ("outside the kernels", profile.outside_ns)):
        yield _bar((x, top + BAR, ns * scale), "#bbb", part, f"{part}: {ns / 1e6:.3f} ms, {ns / profile.wall_ns:.1%}")
        x += ns * scale


def _says(name: str, ns: float, profile: Profile, share: float) -> str:
    return f"{name}: {ns / 1e6:.3f} ms, {ns / profile.wall_ns:.1%} of the step, at {share:.0%} of the limit"


def _colour(share: float) -> str:
    return f"hsl({120 * min(1.0, share):.0f},70%,72%)"


def _bar(place: tuple[float, float, float], colour: str, label: str, tooltip: str) -> str:
    x, y, width = place
    shown = label[: int((width - 6) / _LETTER)] if width > 6 + _LETTER else ""
    text = f'<text x="{x + 3:.2f}" y="{y + 17:.2f}">{escape(shown)}</text>' if shown else ""
    return (
        f"<g><title>{escape(tooltip)}</title>"
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR - 1}" fill="{colour}" stroke="#fff"/>{text}</g>'
    )
