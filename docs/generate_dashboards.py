"""Grafana dashboards, written from the table in `conductor/api/panels.py`.

Grafana's own SDK builds them (places, what Grafana calls a query's target), so that the files are of a form
that its authors vouch for. They are committed, and a test compares: who only runs needs no SDK.
"""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.builders import common, prometheus, timeseries
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import DashboardLinkType, DataSourceRef

from conductor.api.panels import DASHBOARDS, Dashboard, Panel

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
