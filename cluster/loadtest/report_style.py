"""The style of the report's page, light and dark as the reader's system is. Text only."""

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --text: #1c2430; --soft: #5d6878; --line: #dde2e9; --grid: #e8ecf1;
  --blue: #2f6fde; --blue-soft: #2f6fde26; --amber: #d98a00; --red: #c93a3a; --green: #1f8a4c;
  --grey: #8a94a3;
  --pass: #e3f4ea; --fail: #fbe6e6; --warn: #fff4dc; }
@media (prefers-color-scheme: dark) { :root {
  --page: #12161c; --card: #1a2028; --text: #e4e9f0; --soft: #9aa6b6; --line: #2c3541; --grid: #252d38;
  --blue: #6ea2ff; --blue-soft: #6ea2ff2b; --amber: #f0ae3c; --red: #f07a7a; --green: #58c98a;
  --grey: #76818f;
  --pass: #16352a; --fail: #42201f; --warn: #3a2f16; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 22px 60px; }
h1 { font-size: 22px; margin: 0 0 2px; } h2 { font-size: 16px; margin: 0 0 10px; }
.soft { color: var(--soft); } .none { color: var(--soft); font-style: italic; }
.verdict { border-radius: 10px; padding: 16px 20px; margin: 18px 0; border-left: 6px solid; }
.verdict.pass { background: var(--pass); border-color: var(--green); }
.verdict.fail { background: var(--fail); border-color: var(--red); }
.verdict strong { font-size: 19px; display: block; }
.verdict .word { font-size: 12px; letter-spacing: .08em; text-transform: uppercase; font-weight: 700; }
.pass .word { color: var(--green); } .fail .word { color: var(--red); }
.verdict ul, .warnings ul { margin: 8px 0 0; padding-left: 20px; overflow-wrap: anywhere; }
.warnings { background: var(--warn); border-radius: 10px; padding: 12px 20px; margin: 0 0 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px;
  margin: 18px 0; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 14px; } .tile b { display: block; font-size: 17px; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 16px; }
.card { padding: 16px 18px; min-width: 0; } .wide { grid-column: 1 / -1; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
.pairs td { white-space: normal; overflow-wrap: anywhere; text-align: left; }
.yes { color: var(--green); font-weight: 600; } .no { color: var(--red); font-weight: 600; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: inherit; fill: var(--soft); font-size: 12px; }
.label { font-size: 12.5px; } .note { font-size: 12px; paint-order: stroke; stroke: var(--card);
  stroke-width: 4px; }
.grid { stroke: var(--grid); } .axis { stroke: var(--grey); }
.bar { fill: var(--blue); } .bar.over { fill: var(--amber); }
.mark { stroke: var(--text); stroke-dasharray: 4 3; } svg .mark-text { fill: var(--text); }
.limit { stroke: var(--red); stroke-width: 1.5; } svg .limit-text { fill: var(--red); }
.curve { fill: none; stroke: var(--blue); stroke-width: 1.8; } .fill { fill: var(--blue-soft); }
.ideal { fill: none; stroke: var(--grey); stroke-dasharray: 5 4; }
circle.good { fill: var(--blue); } circle.missed { fill: var(--amber); } circle.error { fill: var(--red); }
circle.refused { fill: var(--grey); } circle.unfinished { fill: none; stroke: var(--grey);
  stroke-width: 1.5; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; color: var(--soft); font-size: 13px;
  margin-bottom: 6px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 6px; }
details summary { cursor: pointer; color: var(--soft); }
"""
