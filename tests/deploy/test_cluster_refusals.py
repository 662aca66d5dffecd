"""Why nodes did not attach is said where `conductor up` gives up."""

import logging

from base.errors import StaleError
from base.logs import event
from deploy.cluster import refusals


def test_the_last_reason_of_each_conductor_is_found(tmp_path):
    lines = logging.Handler()
    said = []
    lines.emit = lambda record: said.append(f"12:00 WARNING conductor x {record.getMessage()}\n")
    log = logging.Logger("x")
    log.addHandler(lines)
    event(log, "node refused", reason=StaleError("node d0 has blocks of 16"))
    event(log, "node refused", reason=StaleError('node d0: "key" differs'), unlogged=3)
    event(log, "node joined", node_id="p0")
    (tmp_path / "conductor.log").write_text("".join(said))
    (tmp_path / "conductor-1.log").write_text("".join(said[:1]))
    (tmp_path / "conductor-2.log").write_text(said[2])
    (tmp_path / "conductor-3.log").write_text(said[1].rstrip()[:-20])
    (tmp_path / "prefill-0.log").write_text("".join(said))
    first, cut, last = refusals(tmp_path)
    assert (first, last) == ("node d0 has blocks of 16", 'node d0: "key" differs')
    assert cut.startswith('"node d0')
