"""`conductor profile`: what prefill and decode cost on this device, as placement and replay read it.

What it measures is in `profile_run.py`, which imports the engine and with it seconds of torch: `--help` and a
profile that is made of a log do without.
"""

from __future__ import annotations

import argparse
import atexit
import sys
from collections.abc import Sequence
from pathlib import Path

from base.config import KV_DTYPES, WEIGHT_FORMATS
from base.errors import ConfigError
from base.logs import end_log
from base.option_values import real, require_writable, whole
from bench.profile_log import profile_from_run
from bench.profile_steps import profile_from_steps
from bench.shown_defaults import ShownDefaults
from conductor.placing.profile import Profile, profile_json
from conductor.replay.conformance import read_run

SHAPES = ("0.6b", "8b", "deepseek-v2-lite", "qwen3-30b-a3b")
"""The names in `engine_shapes.py`, which imports torch; a test compares."""


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="conductor profile",
        description="Time prefill and decode on this device and write a profile.",
        formatter_class=ShownDefaults,
    )
    add = parser.add_argument
    add("--model", default="smollm2", help="as in cluster.yaml")
    add("--shape", choices=SHAPES, help="random weights of this shape instead, on a GPU")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--from-log", type=Path, metavar="FILE", help="fit a decision log instead of measuring here")
    add("--timelines", type=Path, metavar="FOLDER", help="of the nodes of that log: fit their steps")
    add("--name", default="measured", help="of the profile")
    seconds = real(0, 1e6)
    add(
        "--max-batch",
        type=whole(0, 1 << 20),
        default=0,
        help="sequences in a step, as the nodes have it; 0: usual",
    )
    add("--quantization", choices=WEIGHT_FORMATS, default="none", help="of the weights")
    add("--kv-dtype", choices=KV_DTYPES, default="auto", help="of K and V, as in cluster.yaml")
    add("--out", type=Path, default=Path("profile.json"), help="where the profile goes")
    add("--commit", default="", help="where the checkout has no .git")
    add("--cache-dir", type=Path, default=Path("~/.cache/conductor-cluster"))
    add(
        "--link-bytes-per-s",
        type=real(0, 1e15, above=True),
        default=1.5e9,
        help="of one node, each way; not measured here",
    )
    add("--link-latency-s", type=seconds, default=0.002, help="of a hand-off; not measured here")
    add("--start-s", type=seconds, default=0.0, help="of a hand-off, until it decodes; not measured here")
    add("--join-s", type=seconds, default=0.0, help="the same, of its first step; not measured here")
    add("--dispatch-s", type=seconds, default=0.0, help="of TTFT, outside of nodes; not measured here")
    add("--dispatch-token-s", type=seconds, default=0.0, help="the same, for each token of the prompt")
    add(
        "--host-kv-tokens",
        type=whole(0, 1 << 40),
        default=0,
        help="KV in a node's share of host memory; 0: as on it",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = make_parser().parse_args(argv)
    try:
        if options.timelines and not options.from_log:
            raise ConfigError("--timelines: of the nodes of a decision log, which --from-log names")
        require_writable("--out", options.out)
        profile = _from_log(options) if options.from_log else _measured(options)
    except ConfigError as error:
        sys.stderr.write(f"conductor profile: {error}\n")
        return 1
    options.out.write_text(profile_json(profile))
    print_profile(profile)
    print(f"written to {options.out}")
    return 0


def _from_log(options: argparse.Namespace) -> Profile:
    run = read_run(options.from_log)
    if options.timelines:
        return profile_from_steps(run, options.timelines, options.name)
    return profile_from_run(run, options.name)


def _measured(options: argparse.Namespace) -> Profile:
    from bench.profile_run import measured_profile  # noqa: PLC0415 - torch takes seconds to import

    atexit.register(end_log)
    return measured_profile(options)


def print_profile(profile: Profile) -> None:
    """Print each point with what the fit says to it, and the errors."""
    evidence = profile.evidence
    for phase, points in (("prefill", evidence.prefill), ("decode", evidence.decode)):
        print(f"{phase:8} {'tokens':>8} {'context':>8} {'measured ms':>12} {'fitted ms':>10} {'error':>6}")
        for item in points:
            error = item.predicted_s / item.measured_s - 1
            print(
                f"{'':8} {item.tokens:8,.0f} {item.context:8,.0f} {1e3 * item.measured_s:12.2f} "
                f"{1e3 * item.predicted_s:10.2f} {error:6.1%}"
            )
    if evidence.steps:
        heads = ("chunk", "after", "batch", "measured ms", "fitted ms", "error")
        print(f"{'step':8}" + "".join(f"{head:>12}" for head in heads))
    for step in evidence.steps:
        error = step.predicted_s / step.measured_s - 1
        print(
            f"{'':8}{step.chunk_tokens:12,}{step.prefix_tokens:12,.0f}{step.batch:12}"
            f"{1e3 * step.measured_s:12.2f}{1e3 * step.predicted_s:12.2f}{error:12.1%}"
        )
    print(
        f"left out one by one: prefill {evidence.prefill_left_out_error:.1%}, decode "
        f"{evidence.decode_left_out_error:.1%} in the mean, {evidence.worst_left_out_error:.1%} at worst; "
        f"steps {evidence.steps_left_out_error:.1%}"
    )
