from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from specbench.errors import InputError
from specbench.estimators.reliability import ReliabilityCurve
from specbench.estimators.reliability_diagram import (
    ReliabilityPanel,
    reliability_svg,
    write_reliability_diagram,
)

SVG = "{http://www.w3.org/2000/svg}"
BEFORE = ReliabilityCurve((0.2, 0.8), (0.1, 0.5), (10.0, 10.0))
AFTER = ReliabilityCurve((0.0, 0.5, 1.0), (0.0, 0.5, 1.0), (1.0, 4.0, 16.0))
EMPTY = ReliabilityCurve((), (), ())


def panels_of(svg: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(svg)
    return [group for group in root.iter(f"{SVG}g") if group.get("class") == "panel"]


def test_points_lie_where_they_belong() -> None:
    (panel,) = panels_of(reliability_svg([ReliabilityPanel("p", BEFORE, AFTER)], "title"))
    frame = panel.find(f"{SVG}rect")
    assert frame is not None
    side = float(frame.get("width", ""))
    circles = panel.findall(f"{SVG}circle")
    # y grows downwards: (0, 0) is at the bottom left, (1, 1) at the top right.
    assert [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in circles] == [
        (0.0, side),
        (side / 2, side / 2),
        (side, 0.0),
    ]
    radii = [float(c.get("r", "")) for c in circles]
    assert radii == [1.5, 3.0, 6.0]  # areas 1 : 4 : 16
    squares = [r for r in panel.findall(f"{SVG}rect") if r.get("class") == "before"]
    centres = [float(r.get("x", "")) + float(r.get("width", "")) / 2 for r in squares]
    assert centres == pytest.approx([0.2 * side, 0.8 * side], abs=0.1)


@pytest.mark.parametrize("num_panels", [1, 3, 4, 5, 16])
def test_panels_fit_into_the_picture_and_do_not_overlap(num_panels: int) -> None:
    panels = [
        ReliabilityPanel(f"position {i}", BEFORE, AFTER, 0.2, 0.01) for i in range(num_panels)
    ]
    svg = reliability_svg(panels, "title")
    root = ElementTree.fromstring(svg)
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    corners = set()
    for panel in panels_of(svg):
        left, top = map(float, panel.get("transform", "")[len("translate(") : -1].split())
        frame = panel.find(f"{SVG}rect")
        assert frame is not None
        side = float(frame.get("width", ""))
        assert 0 <= left <= width - side
        assert 0 <= top <= height - side
        assert all(abs(left - x) >= side or abs(top - y) >= side for x, y in corners)
        corners.add((left, top))
    assert len(corners) == num_panels


def test_text_is_escaped_and_missing_numbers_are_dashes() -> None:
    panel = ReliabilityPanel("a < b & c", EMPTY, EMPTY, None, 0.1234)
    svg = reliability_svg([panel], "<title>")
    texts = [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "a < b & c" in texts
    assert "<title>" in texts
    assert "ECE – → 0.123" in texts
    (group,) = panels_of(svg)
    assert group.findall(f"{SVG}circle") == []
    assert group.findall(f"{SVG}polyline") == []


def test_no_positions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one position"):
        write_reliability_diagram(tmp_path / "d.svg", [], "title")
    assert list(tmp_path.iterdir()) == []


def test_the_file_holds_the_picture(tmp_path: Path) -> None:
    panels = [ReliabilityPanel("p", BEFORE, AFTER)]
    write_reliability_diagram(tmp_path / "d.svg", panels, "title")
    assert (tmp_path / "d.svg").read_text(encoding="utf-8") == reliability_svg(panels, "title")
