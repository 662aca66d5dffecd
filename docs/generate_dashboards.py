"""Grafana dashboards: a table of panels, each a title, a unit and PromQL, and the files written from it.

Grafana's own SDK builds them (places, what Grafana calls a query's target), so that the files are of a form
that its authors vouch for. They are committed, and a test compares: who only runs needs no SDK. A test parses
every query and looks each metric up in `base/metrics.py`; another has a real Prometheus answer them, which
scrapes a cluster at work.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import common, prometheus, timeseries
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import DashboardLinkType, DataSourceRef

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"

COLUMNS = 24
PANEL_WIDTH = 8
PANEL_HEIGHT = 8

LEGEND = (
    common.VizLegendOptions()
    .display_mode(LegendDisplayMode.LIST)
    .placement(LegendPlacement.BOTTOM)
    .show_legend(True)
)
TOOLTIP = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)

SOURCE = "source"
"""The name of the variable by which a reader of a dashboard chooses the Prometheus."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph."""

    title: str
    unit: str
    """Grafana's name: s, Bps, percentunit, reqps, short."""
    queries: tuple[tuple[str, str], ...]
    """(PromQL, legend)."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page of graphs."""

    uid: str
    title: str
    panels: tuple[Panel, ...]


def quantiles(buckets: str, by: str = "") -> tuple[tuple[str, str], ...]:
    """Return the queries of a histogram's median, 90 % and 99 %, apart for each value of the label `by`."""
    labels, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    return tuple(
        (
            f"histogram_quantile({quantile}, sum by ({labels}) (rate({buckets}[$__rate_interval])))",
            f"p{quantile * 100:g}{legend}",
        )
        for quantile in (0.5, 0.9, 0.99)
    )


def line(query: str, legend: str) -> tuple[tuple[str, str], ...]:
    """Return the one query of a panel."""
    return ((query, legend),)


def rate(metric: str, by: str = "") -> tuple[tuple[str, str], ...]:
    """Return the query of a counter's increase a second."""
    grouped = f" by ({by})" if by else ""
    return line(f"sum{grouped} (rate({metric}_total[$__rate_interval]))", f"{{{{{by}}}}}" if by else "all")


TTFT_PARTS = (
    "sum by (part) (rate(conductor_ttft_part_seconds_sum[$__rate_interval]))"
    " / ignoring (part) group_left () sum(rate(conductor_ttft_seconds_count[$__rate_interval]))"
)

DASHBOARDS = (
    Dashboard(
        "conductor-overview",
        "Conductor: cluster",
        (
            Panel("Requests ended", "reqps", rate("conductor_sequences", "outcome")),
            Panel("Requests rejected", "reqps", rate("conductor_rejections", "reason")),
            Panel(
                "Requests now",
                "short",
                (
                    ("sum(conductor_running_sequences)", "running"),
                    ("sum(conductor_unplaced_sequences)", "waiting to be placed"),
                    ("sum(conductor_waiting_sequences)", "waiting on nodes"),
                ),
            ),
            Panel(
                "Tokens",
                "short",
                (
                    ("sum(rate(conductor_prompt_tokens_total[$__rate_interval]))", "prompt"),
                    ("sum(rate(conductor_generation_tokens_total[$__rate_interval]))", "generated"),
                ),
            ),
            Panel("KV blocks held", "percentunit", line("conductor_kv_usage_ratio", "held")),
            Panel("Processes up", "short", line('sum by (job) (up{job=~"conductor.*"})', "{{job}}")),
        ),
    ),
    Dashboard(
        "conductor-slo",
        "Conductor: SLO and goodput",
        (
            Panel("Time to first token", "s", quantiles("conductor_ttft_seconds_bucket")),
            Panel(
                "Time between tokens, mean of each request (what the bound is on)",
                "s",
                quantiles("conductor_request_tbt_seconds_bucket"),
            ),
            Panel("Time between tokens, each gap", "s", quantiles("conductor_tbt_seconds_bucket")),
            Panel("Whole request", "s", quantiles("conductor_request_seconds_bucket")),
            Panel("Where the time to first token goes (mean)", "s", line(TTFT_PARTS, "{{part}}")),
            Panel("SLO missed, by cause", "reqps", rate("conductor_slo_misses", "cause")),
            Panel(
                "Share of requests that missed",
                "percentunit",
                (("conductor:missed:ratio5m", "5 minutes"), ("conductor:missed:ratio6h", "6 hours")),
            ),
        ),
    ),
    Dashboard(
        "conductor-prefill",
        "Conductor: prefill pool",
        (
            Panel("Prompt tokens, by where their KV came from", "short", rate("prefill_tokens", "source")),
            Panel("A step with a chunk in it", "s", quantiles("prefill_step_seconds_bucket")),
            Panel("Waiting for prefill", "s", quantiles('conductor_ttft_part_seconds_bucket{part="queue"}')),
            Panel("Prompt length", "short", quantiles("conductor_request_prompt_tokens_bucket")),
        ),
    ),
    Dashboard(
        "conductor-decode",
        "Conductor: decode pool",
        (
            Panel("Tokens", "short", rate("decode_tokens")),
            Panel("A step", "s", quantiles("decode_step_seconds_bucket")),
            Panel("Sequences preempted", "short", rate("decode_preemptions")),
            Panel("Of these, moved to host memory", "short", rate("decode_swapped_sequences")),
            Panel("Answer length", "short", quantiles("conductor_request_generation_tokens_bucket")),
        ),
    ),
    Dashboard(
        "conductor-kv",
        "Conductor: KV cache and balancing",
        (
            Panel(
                "Prompt tokens that were matched", "percentunit", line("conductor:hit:ratio10m", "matched")
            ),
            Panel("Blocks", "short", line("sum by (place) (kvstore_blocks)", "{{place}}")),
            Panel("Free blocks of each node", "short", line('kvstore_blocks{place="free"}', "{{instance}}")),
            Panel(
                "Prompt tokens that each node computes",
                "short",
                line(
                    'sum by (instance) (rate(prefill_tokens_total{source="computed"}[$__rate_interval]))',
                    "{{instance}}",
                ),
            ),
            Panel("Held blocks of each node", "short", line('kvstore_blocks{place="held"}', "{{instance}}")),
            Panel(
                "Held blocks while nothing runs: leaked",
                "short",
                line(
                    'sum(kvstore_blocks{place="held"}) and on () sum(conductor_running_sequences) == 0',
                    "held",
                ),
            ),
        ),
    ),
    Dashboard(
        "conductor-transfer",
        "Conductor: transfers",
        (
            Panel("KV moved", "Bps", rate("transfer_bytes", "transport")),
            Panel("One batch", "s", quantiles("transfer_seconds_bucket", "transport")),
            Panel("Failed batches", "short", rate("transfer_failures", "transport")),
            Panel("Share that goes by TCP", "percentunit", line("conductor:tcp:ratio5m", "tcp")),
        ),
    ),
)


def as_text(dashboard: Dashboard) -> str:
    """Return a dashboard as Grafana's JSON."""
    built = (
        grafana.Dashboard(dashboard.title)
        .uid(dashboard.uid)
        .tags(["conductor"])
        .refresh("15s")
        .time("now-1h", "now")
        .with_variable(grafana.DatasourceVariable(SOURCE).label("Prometheus").type("prometheus"))
        .link(
            grafana.DashboardLink("Conductor")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["conductor"])
            .keep_time(True)
        )
    )
    for number, panel in enumerate(dashboard.panels, 1):
        built = built.with_panel(_panel(panel).id(number))
    return JSONEncoder(sort_keys=True, indent=1).encode(built.build()) + "\n"


def _panel(panel: Panel) -> timeseries.Panel:
    source = DataSourceRef("prometheus", f"${{{SOURCE}}}")
    built = timeseries.Panel().title(panel.title).unit(panel.unit).min(0).datasource(source)
    built = built.span(PANEL_WIDTH).height(PANEL_HEIGHT).legend(LEGEND).tooltip(TOOLTIP)
    for number, (query, legend) in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query).legend_format(legend).datasource(source)
        built = built.with_target(target.ref_id(chr(ord("A") + number)))
    return built


def main() -> None:
    """Write every dashboard's file."""
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.uid}.json").write_text(as_text(dashboard))


if __name__ == "__main__":
    main()
