"""The page's style sheet; figures take their ink from its variables."""

STYLE = """
:root{--ink:#1b2129;--faint:#5f6b7a;--grid:#e3e7ec;--paper:#ffffff;--page:#f4f6f8;
--good:#00795a;--bad:#c1271d;--warn:#9a6700;--accent:#0f8fd6}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaef;--faint:#98a4b3;--grid:#2b333d;
--paper:#171c22;--page:#0e1216;--good:#3fc79a;--bad:#ff7a6e;--warn:#e3b341;--accent:#4db5f0}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1300px;margin:0 auto;padding:36px 24px 64px}
svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:30px;line-height:1.2;margin:0 0 6px;letter-spacing:-.02em}
h2{font-size:21px;margin:40px 0 14px;letter-spacing:-.01em}
h3{font-size:16px;margin:0 0 4px}
header p{margin:0;color:var(--faint)}
header b{color:var(--ink);font-weight:600}
.dot{opacity:.5;padding:0 4px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(220px,1fr));
gap:16px;margin:26px 0 8px}
.stat,.card{background:var(--paper);border:1px solid var(--grid);border-radius:12px}
.stat{padding:18px 20px}
.stat strong{display:block;font-size:30px;line-height:1.15;letter-spacing:-.02em}
.stat span{color:var(--faint);font-size:14px}
.good strong{color:var(--good)}.bad strong{color:var(--bad)}
.card{padding:20px 22px;margin:0 0 16px}
.note{color:var(--faint);font-size:13.5px;margin:0 0 14px;max-width:88ch}
.alarm{background:var(--bad);color:#fff;border-radius:8px;padding:10px 14px;font-weight:600;
margin:8px 0}
.figure{overflow-x:auto;padding:4px 0 10px}
.figure svg{display:block}
.card.wide{padding-bottom:26px}
.beside{display:flex;flex-wrap:wrap;gap:8px 32px;align-items:flex-start}
.beside .figure{flex:1 1 auto;max-width:100%}
.beside .scroll{flex:0 1 auto}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:500}
thead th{color:var(--faint);font-size:12.5px;font-weight:500}
th,td{padding:6px 12px 6px 0;border-bottom:1px solid var(--grid);white-space:nowrap;
vertical-align:top}
.n{text-align:right}
th.n{text-align:right}
.heat{margin-top:8px}
.heat td.n{padding:5px 12px;min-width:74px}
.heat small{display:block;color:var(--faint);font-size:11px}
.heat thead th.n{padding-right:12px}
.all{width:100%}
.all tr.cell th{padding-top:18px;font-weight:650}
.facts th{color:var(--faint);padding-right:26px}
.facts td{white-space:normal;overflow-wrap:anywhere}
.bar{display:flex;width:130px;height:11px;margin-top:5px;border-radius:3px;overflow:hidden}
.bar i{display:block;height:100%}
.identical{color:var(--good)}.tie{color:var(--warn)}
.different{color:var(--bad);font-weight:700}
pre{background:var(--page);border:1px solid var(--grid);border-radius:8px;padding:12px 14px;
white-space:pre-wrap;overflow-wrap:anywhere;font-size:13px;margin:6px 0 14px}
"""
