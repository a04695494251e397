"""Makes Grafana's JSON from `dashboards.yaml`: `python deploy/grafana/generate.py`.

Owns the forms of panels and their places in a grid of 24 columns; what is shown and its queries are in the
YAML. `dashboards()` is what a test compares with the files that are committed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_HERE = Path(__file__).resolve().parent
_KINDS = {
    "line": "timeseries",
    "stacked": "timeseries",
    "stat": "stat",
    "bar": "bargauge",
    "table": "table",
    "heat": "heatmap",
}
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _HEIGHT, _STAT_HEIGHT = 24, 8, 4


def dashboards() -> Iterator[tuple[str, str]]:
    """(name, JSON text) of each dashboard."""
    spec = yaml.safe_load((_HERE / "dashboards.yaml").read_text(encoding="utf-8"))
    for name, content in spec.items():
        yield name, json.dumps(_dashboard(name, content), indent=1, ensure_ascii=False) + "\n"


def _dashboard(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "uid": f"baton-{name}",
        "title": spec["title"],
        "tags": ["baton"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["baton"], "title": "Baton", "asDropdown": False, "keepTime": True}
        ],
        "templating": {"list": _variables(spec.get("variables", {}))},
        "panels": list(_panels(spec["rows"])),
    }


def _variables(texts: dict[str, str]) -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return [
        source,
        *(
            {
                "name": name,
                "label": name.replace("_", " "),
                "type": "textbox",
                "query": value,
                "current": {"text": value, "value": value},
            }
            for name, value in texts.items()
        ),
    ]


def _panels(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    top, number = 0, 1
    for row in rows:
        yield {
            "id": number,
            "type": "row",
            "title": row["title"],
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": top, "w": _COLUMNS, "h": 1},
        }
        top, number = top + 1, number + 1
        panels = row["panels"]
        in_a_line = len(panels) if len(panels) <= 3 or panels[0][1] == "stat" else 3
        width = _COLUMNS // in_a_line
        for index, panel in enumerate(panels):
            height = _STAT_HEIGHT if all(kind == "stat" for _, kind, _, _ in panels) else _HEIGHT
            if index and index % in_a_line == 0:
                top += height
            place = {"x": index % in_a_line * width, "y": top, "w": width, "h": height}
            yield {"id": number, "gridPos": place, **_panel(*panel)}
            number += 1
        top += height


def _panel(title: str, kind: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    is_instant = kind in ("bar", "table")
    panel: dict[str, Any] = {
        "type": _KINDS[kind],
        "title": title,
        "datasource": _DATASOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": query,
                "legendFormat": legend or "__auto",
                "instant": is_instant,
                "range": not is_instant,
                "format": "heatmap" if kind == "heat" else "table" if kind == "table" else "time_series",
            }
            for index, (legend, query) in enumerate(queries.items())
        ],
        "fieldConfig": {"defaults": {"unit": unit, "custom": {}}, "overrides": []},
        "options": {},
    }
    if panel["type"] == "timeseries":
        custom = {"fillOpacity": 30 if kind == "stacked" else 8, "lineWidth": 1, "showPoints": "never"}
        custom["stacking"] = {"mode": "normal" if kind == "stacked" else "none"}
        panel["fieldConfig"]["defaults"]["custom"] = custom
        panel["options"] = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    elif kind == "stat":
        panel["options"] = {
            "colorMode": "value",
            "graphMode": "area",
            "reduceOptions": {"calcs": ["lastNotNull"]},
        }
    return panel


if __name__ == "__main__":
    for dashboard, text in dashboards():
        (_HERE / "dashboards" / f"{dashboard}.json").write_text(text, encoding="utf-8")
