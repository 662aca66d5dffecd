"""Whether a measured cell is within what must be: met, missed, or not measured.

A bound is written as `>= 1,500`, `<= 50 ms`, `= 0`, `within 5 %` either way, or `all` (`31 of 31`). Each
figure of a cell has to keep it. What stands in brackets is not judged, and `74 of 84` is a share where the
bound is one. Words that are no bound, and cells that are no figures, are not guessed at: their row says its
verdict.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

VERDICTS = ("met", "missed", "not measured")
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    "=": operator.eq,
    "within": lambda figure, bound: abs(figure) <= bound,
}
BOUND = re.compile(r"(?P<comparison><=|>=|<|=|within) (?P<figure>[\d.,]+)(?: (?P<unit>\S+))?")
FIGURE = re.compile(r"(?<!\d)[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?")
UNITS = ("%", "us", "ms", "s", "GB/s", "tok/s", "MiB")
PART = re.compile(r"(?P<count>[\d,]+) of (?P<whole>[\d,]+)")


def verdict(must: str | Mapping[str, str], columns: Sequence[str], cells: Sequence[str]) -> str:
    """Return what `cells` say of `must`, which bounds every column or those that it names.

    Raises:
        ValueError: the bound, or a cell that it bounds, is not made of figures.
    """
    musts = must if isinstance(must, Mapping) else dict.fromkeys(columns, must)
    if unknown := musts.keys() - set(columns):
        raise ValueError(f"no column is called {', '.join(unknown)}")
    found = dict(zip(columns, cells, strict=True))
    kept = [within for column, bound in musts.items() for within in _within(bound, found[column])]
    if not kept:
        return "not measured"
    missed = kept.count(False)
    return "met" if not missed else "missed" if missed == len(kept) else f"missed in {missed} of {len(kept)}"


def _within(bound: str, cell: str) -> Iterable[bool]:
    """Yield for each figure of `cell` whether it keeps the bound."""
    plain = re.sub(r"\(.*?\)|\*\*", "", cell).strip()
    part = PART.fullmatch(plain)
    if part and bound == "all":
        return [part["count"] == part["whole"]]
    known = BOUND.fullmatch(bound)
    if not known:
        raise ValueError(
            f"'{bound}' is no bound such as '>= 0.8' or '<= 50 ms': write the verdict of the row"
        )
    if part and known["unit"] == "%":
        plain, part = f"{100 * _number(part['count']) / _number(part['whole'])} %", None
    figures, unit = _figures(part["count"] if part else plain)
    if unit and known["unit"] and unit != known["unit"]:
        raise ValueError(f"'{cell}' and '{bound}' have different units")
    compare = COMPARISONS[known["comparison"]]
    return [compare(figure, _number(known["figure"])) for figure in figures]


def _figures(cell: str) -> tuple[list[float], str]:
    """Return the figures of a cell and their unit."""
    rest = FIGURE.sub(" ", cell)
    words = [word for word in re.split(r"[\s,;]+", rest.replace(" / ", " ")) if word.strip("+")]
    units = {word for word in words if word in UNITS}
    if len(units) > 1 or set(words) - units - {"and", "to", "each"}:
        raise ValueError(f"'{cell}' is more than figures of one unit: write the verdict of the row")
    return [_number(each) for each in FIGURE.findall(cell)], "".join(units)


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def kind_of(said: str) -> str:
    """Return which of VERDICTS a verdict is: `missed in 1 of 3` is `missed`."""
    return said.split(" in ")[0]
