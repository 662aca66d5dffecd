"""The pages of bench/results: `python -m bench.evidence` writes NAME.md beside each NAME.claims.json.

A file of claims says what is claimed, what must be, which command measures it, and where the figure is: a
template such as `{rows/0/value:.1f} ms` reads the result file that `from` names, so that a new result makes a
new page. Hardware, versions, commit and date are read from that result too. A figure whose raw result was not
kept stands in the claim itself, with the same facts. Whether what must be is met is worked out from both
(bench/evidence_verdict.py), and README.md has what is not met. tests/bench/test_evidence.py makes the pages
again and compares.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.evidence_faults import fault_cells
from bench.evidence_plot import bars
from bench.evidence_verdict import VERDICTS, kind_of, verdict

RESULTS = Path(__file__).resolve().parent / "results"
FACTS = ("hardware", "versions", "commit", "date", "command")
FIELD = re.compile(r"\{(?P<path>[^{}:*]+)(?:\*(?P<factor>[\d.]+))?(?::(?P<format>[^{}]*))?\}")


@dataclass(frozen=True)
class Row:
    """One line of a claim's table."""

    what: str
    must: str
    measured: tuple[str, ...]
    verdict: str
    """What the figures say of what must be; empty where nothing must be."""
    judged: tuple[str, ...]
    """The figures that were held against what must be."""
    facts: tuple[str, ...]
    """Hardware, versions, commit, date and command, in the order of FACTS."""


def find(result: Any, path: str) -> Any:
    """Return what `path` names in `result`: keys of objects and places in lists, slashes between them."""
    for part in path.split("/") if path else ():
        result = result[int(part)] if isinstance(result, list) else result[part]
    return result


def filled(template: str, result: Any) -> str:
    """Return `template` with each `{path*factor:format}` replaced by that figure of `result`."""

    def figure(match: re.Match[str]) -> str:
        value = find(result, match["path"])
        if match["factor"]:
            value *= float(match["factor"])
        return format(value, match["format"] or "")

    return FIELD.sub(figure, template)


def about(result: Any) -> dict[str, str]:
    """Return hardware, versions, commit and date, as far as `result` says them."""
    said = result[0] if isinstance(result, list) else result
    said = said.get("about") or [run["about"] for run in said.get("runs", ()) if "about" in run] or said
    said = said.get("run", said) if isinstance(said, dict) else said
    if isinstance(said, list):
        said = {**said[0], "commit": ", ".join(dict.fromkeys(each["commit"] for each in said))}
    both = {**(result if isinstance(result, dict) else {}), **said}
    return {
        "hardware": _hardware(both),
        "versions": _versions(both),
        "commit": str(both.get("commit", "")),
        "date": str(both.get("date", "")),
        "command": str(both.get("command", "")),
    }


def _hardware(about_run: dict[str, Any]) -> str:
    gpus = about_run.get("gpus") or ([about_run["gpu"]] if "gpu" in about_run else [])
    parts = [f"{len(gpus)} {gpus[0]}"] if gpus else []
    if "processor" in about_run:
        cores = about_run.get("cores")
        parts.append(f"{cores} cores of {about_run['processor']}" if cores else about_run["processor"])
    return "; ".join(parts)


def _versions(about_run: dict[str, Any]) -> str:
    named = {
        name: about_run[name] for name in ("python", "torch", "triton", "transformers") if name in about_run
    }
    return ", ".join(
        f"{name} {version}" for name, version in {**named, **about_run.get("versions", {})}.items()
    )


@functools.cache
def read_result(name: str) -> Any:
    """Return the JSON of a file of bench/results."""
    return json.loads((RESULTS / name).read_text())


def rows(claim: dict[str, Any]) -> Iterator[Row]:
    """Yield the lines of a claim's table: those that are written down, or one for each entry of a result."""
    if claim.get("faults"):
        for kind, result in read_result(claim["from"]).items():
            must = claim["musts"].get(kind, claim["must"])
            yield _row({"what": f"`{kind}`", "must": must, "measured": fault_cells(result)}, claim, result)
        return
    for written in claim["rows"]:
        row = {**{key: claim[key] for key in ("from", "must") if key in claim}, **written}
        result = read_result(row["from"]) if "from" in row else {}
        entries = find(result, row["each"]) if "each" in row else [result]
        for entry in entries:
            yield _row(row, claim, result, entry)


def _row(row: dict[str, Any], claim: dict[str, Any], result: Any, entry: Any = None) -> Row:
    known = about(result) if result else {}
    written = row["measured"] if isinstance(row["measured"], list) else [row["measured"]]
    measured = [filled(each, entry) for each in written]
    what, must = filled(row.get("what", ""), entry), row.get("must", "")
    said = row.get("verdict") or (verdict(must, columns_of(claim), measured) if must else "")
    if said not in ("", *VERDICTS) and "verdict" in row:
        raise ValueError(f"{claim['claim']}: {said!r} is none of {VERDICTS}")
    found = zip(columns_of(claim), measured, strict=True)
    judged = [cell for column, cell in found if isinstance(must, str) or column in must]
    bounds = (
        must if isinstance(must, str) else "; ".join(f"{column} {bound}" for column, bound in must.items())
    )
    return Row(
        what,
        bounds,
        tuple(measured),
        said,
        tuple(filter(None, judged)),
        tuple(str(row.get(fact) or known.get(fact) or claim.get(fact, "")) for fact in FACTS),
    )


def columns_of(claim: dict[str, Any]) -> list[str]:
    """Return the names of a claim's columns of figures."""
    return list(claim.get("columns", ["measured"]))


def page(name: str, claims: dict[str, Any]) -> str:
    """Return the page of one subject: a table for each claim, those of earlier commits last."""
    parts = [
        f"# {claims['title']}\n\n{claims['says']}\n\n"
        f"Generated from `{name}.claims.json` and the results that it names by `python -m bench.evidence`.\n"
    ]
    now = [claim for claim in claims["claims"] if not claim.get("earlier")]
    earlier = [claim for claim in claims["claims"] if claim.get("earlier")]
    parts += [f"\n## {claim['claim']}\n\n{_table(claim)}" for claim in now]
    if earlier:
        parts.append("\n## Earlier commits\n\nWhat was measured of code that has changed since.\n")
    parts += [f"\n### {claim['claim']}\n\n{_table(claim)}" for claim in earlier]
    return "".join(parts)


def overview(subjects: dict[str, dict[str, Any]]) -> str:
    """Return the page that counts the bounds which each subject meets, and lists those that are not met."""
    counted, unmet = [], []
    for name, claims in subjects.items():
        found = [
            (claim, row)
            for claim in claims["claims"]
            if not claim.get("earlier")
            for row in rows(claim)
            if row.verdict
        ]
        counts = Counter(kind_of(row.verdict) for _, row in found)
        counted.append([f"[{claims['title']}]({name}.md)", *(str(counts[each]) for each in VERDICTS)])
        unmet += [
            [f"[{name}]({name}.md)", claim["claim"], row.what, row.must, "; ".join(row.judged), row.verdict]
            for claim, row in found
            if row.verdict != "met"
        ]
    return (
        "# Evidence\n\nWhat was measured, and whether it is what it must be. A bound is one row of a page's "
        "tables; those of earlier\ncommits are not counted. Generated by `python -m bench.evidence`.\n\n"
        + _markdown_table(["subject", *VERDICTS], counted)
        + "\n## What is not met\n\n"
        + _markdown_table(["subject", "claim", "row", "must", "measured", "verdict"], unmet)
    )


def plots(claims: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield the file and the text of each chart that a claim asks for by its `plot`."""
    for claim in claims["claims"]:
        if "plot" in claim:
            series = [(row.what, row.measured) for row in rows(claim)]
            yield RESULTS / claim["plot"]["file"], bars(claim["plot"]["title"], claim["columns"], series)


def _table(claim: dict[str, Any]) -> str:
    lines = list(rows(claim))
    columns = columns_of(claim)
    if any(len(line.measured) != len(columns) for line in lines):
        raise ValueError(f"{claim['claim']}: each line needs a cell for each of {columns}")
    head = ["", "must", *columns, "verdict", *FACTS]
    table = [[line.what, line.must, *line.measured, line.verdict, *_in_code(line.facts)] for line in lines]
    _mark_repeats(table, len(columns) + 3)
    shown = [column for column in range(len(head)) if any(row[column] for row in table)]
    text = _markdown_table(
        [head[column] for column in shown], [[row[column] for column in shown] for row in table]
    )
    return text + (f"\n{claim['note']}\n" if "note" in claim else "")


def _markdown_table(head: list[str], table: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *table]
    return "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)


def _mark_repeats(table: list[list[str]], first: int) -> None:
    """Write a ditto mark for each fact, from column `first` on, that the line above has too."""
    for above, line in reversed(list(itertools.pairwise(table))):
        line[first:] = [
            "″" if fact and fact == same else fact
            for same, fact in zip(above[first:], line[first:], strict=True)
        ]


def _in_code(facts: tuple[str, ...]) -> tuple[str, ...]:
    *others, command = facts
    return (*others, f"`{command}`" if command else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def pages() -> dict[Path, str]:
    """Return the text of every page and of every chart, by its file."""
    subjects = {
        file.name.removesuffix(".claims.json"): json.loads(file.read_text())
        for file in sorted(RESULTS.glob("*.claims.json"))
    }
    made = {RESULTS / "README.md": overview(subjects)}
    for name, claims in subjects.items():
        made[RESULTS / f"{name}.md"] = page(name, claims)
        made |= dict(plots(claims))
    return made


def main() -> None:
    """Write all pages."""
    for file, text in pages().items():
        file.write_text(text)


if __name__ == "__main__":
    main()
