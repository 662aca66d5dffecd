"""`conductor advise`: how many nodes a traffic needs, how much they carry, and what bounds them."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from bench.papers.advise import (
    MOST_TIMES,
    PARTS,
    advice,
    bottleneck,
    fewest,
    furthest,
    hastened,
    improved,
    main,
    too_few,
)
from bench.papers.splits import (
    Case,
    Served,
    best_split,
    halves,
    neighbours,
    other_beginnings,
    other_chunks,
    said_of_splits,
    said_of_steps,
    split,
)
from bench.trace_file import write_trace
from conductor.placing.cost_model import CostModel
from conductor.profiles.reader import load_profile
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.simulate import Plan
from conductor.replay.trace import Trace, TraceRequest
from tests.conductor.replay.builders import small_trace

PROFILE = load_profile("h200-llama8b")


class Needing:
    """Replays of a traffic that so many nodes serve; counts them."""

    def __init__(self, nodes: float) -> None:
        self.asked: list[tuple[int, float]] = []
        self._nodes = nodes

    def __call__(self, nodes, times, profile=None):
        self.asked.append((nodes, times))
        share = min(1.0, nodes / (self._nodes * times))
        return Served(Case(halves(nodes), times), share, 10_000, share)


@pytest.mark.parametrize("needed", [1, 2, 3, 10, 31, 32])
def test_the_fewest_nodes_that_serve_enough_are_found(needed) -> None:
    serve = Needing(needed)
    assert fewest(32, serve, 0.99).nodes == needed
    assert len(serve.asked) <= 6
    assert len(set(serve.asked)) == len(serve.asked)


def test_where_the_most_nodes_do_not_serve_enough_fewer_are_not_tried() -> None:
    serve = Needing(40)
    assert fewest(32, serve, 0.99).share == 0.8
    assert serve.asked == [(32, 1.0)]


@pytest.mark.parametrize("times", [1.0, 1.1, 2.0, 7.3])
def test_how_much_nodes_carry_is_found_to_a_twentieth(times) -> None:
    serve = Needing(4 / times)
    far = furthest(serve(4, 1.0), serve, 1.0)
    assert far.share == 1.0
    assert times / 1.06 <= far.times <= times


def test_nodes_that_carry_anything_are_asked_up_to_a_bound() -> None:
    serve = Needing(1e-6)
    assert MOST_TIMES / 1.5 <= furthest(serve(4, 1.0), serve, 1.0).times <= MOST_TIMES


def test_nodes_begin_in_halves() -> None:
    assert [tuple(halves(number)) for number in (1, 2, 5)] == [(0, 0, 1), (1, 1, 0), (3, 2, 0)]


def test_each_part_is_twice_as_good_and_nothing_else() -> None:
    for part, fields in PARTS.items():
        better = improved(PROFILE, part)
        for name, times in fields.items():
            assert getattr(better, name) == getattr(PROFILE, name) * times
        assert replace(better, **{name: getattr(PROFILE, name) for name in fields}) == PROFILE


def served(share: float, requests: int = 10_000) -> Served:
    return Served(Case(halves(4), 1.25), share, requests, share)


def test_what_helps_most_is_the_bottleneck_as_far_as_so_many_requests_can_show() -> None:
    better = {"prefill": served(0.95), "decode": served(0.9498), "memory": served(0.9), "links": served(0.9)}
    assert bottleneck(served(0.9), better) == "prefill or decode"
    assert bottleneck(served(0.9), {**better, "decode": served(0.92)}) == "prefill"
    assert bottleneck(served(0.95), better).startswith("none of prefill, decode, memory, links")
    twice, once = (Case(halves(4), times) for times in (2.0, 1.0))
    said = advice(served(1.0), served(0.99)._replace(case=twice), served(0.9), better)
    assert "up to 0.99 where it is 2.00 times as much" in said
    assert "beginning as 2P2D" in said
    assert "and hardly more of it" in advice(
        served(1.0), served(1.0)._replace(case=once), served(0.9), better
    )
    assert "4, 2P2D, roles fixed" in advice(served(1.0), served(1.0), served(0.9), better, follows=False)


def test_less_than_half_is_warned_of() -> None:
    better = dict.fromkeys(PARTS, served(0.6))
    assert "warning: 2P2D, the best that was tried, serves less than half" in too_few(served(0.49), better)
    assert "warning" not in too_few(served(0.51), better)


class Best:
    """Replays of which one split of the nodes serves most, and those near it nearly as many; counts them."""

    def __init__(self, prefill: int, flat: int = 0) -> None:
        self.asked: list[Case] = []
        self._prefill, self._flat = prefill, flat

    def __call__(self, case: Case) -> Served:
        self.asked.append(case)
        off = max(0, abs(case.nodes.prefill - self._prefill) - self._flat)
        return Served(case, max(0.0, 0.95 - 0.05 * off), 1_000, 1.0, 1.0 + off)


@pytest.mark.parametrize("num_nodes", [2, 3, 8, 16, 61])
def test_the_best_split_is_climbed_to_in_few_steps(num_nodes: int) -> None:
    for prefill in range(1, num_nodes):
        replayed = Best(prefill)
        best = best_split(Case(halves(num_nodes)), replayed)
        assert best.case.nodes == split(num_nodes, prefill)
        assert len(set(replayed.asked)) <= 24


def test_a_split_that_serves_enough_is_not_bettered_and_one_node_has_none() -> None:
    replayed = Best(12)
    assert best_split(Case(halves(16)), replayed, enough=0.5).share >= 0.5
    assert len(replayed.asked) < 4
    assert best_split(Case(halves(1)), replayed).case.roles == "1C"


def test_splits_are_tied_as_far_as_so_many_requests_can_show() -> None:
    replayed = Best(5, flat=1)
    best = best_split(Case(halves(16), 1.5), replayed)
    said = said_of_splits(best, neighbours(best, replayed), follows=False)
    tied, less = said.split("; less by ")
    assert tied.startswith(f"split {best.case.roles}: 95.0%; tied with ")
    assert {"4P12D", "5P11D", "6P10D"} == {word for word in tied.replace(":", "").split() if "P" in word}
    assert {"3P13D", "7P9D"} >= {word for word in less.replace(",", "").split() if "P" in word}
    beginnings = other_beginnings(replayed(Case(halves(16))), replayed)
    assert [run.case.roles for run in beginnings] == ["4P12D", "12P4D"]
    assert "more by 4P12D" in said_of_splits(replayed(Case(halves(16))), beginnings, follows=True)


def test_steps_that_serve_more_are_named() -> None:
    def in_steps(share: float, tokens: int) -> Served:
        return served(share)._replace(case=Case(halves(4), 1.25, chunk_tokens=tokens))

    less, more, *_ = other_chunks(load_profile("h200-llama8b"))
    base, others = served(0.9), [in_steps(0.9001, less), in_steps(0.95, more)]
    assert f"{more} serves more" in said_of_steps(base, others)
    assert "no other serves more" in said_of_steps(base, others[:1])
    whole = served(0.96)._replace(case=Case(halves(4), 1.25, whole_chunks=True))
    assert "whole chunks serves more" in said_of_steps(base, [*others, whole])


@pytest.mark.parametrize(("name", "usual"), [("h200-llama8b", 8192), ("cpu-smollm2", 512)])
def test_steps_that_are_tried_lie_around_those_of_the_profiles_device(name: str, usual: int) -> None:
    assert other_chunks(load_profile(name)) == [usual // 4, usual // 2, 2 * usual, 4 * usual]


def test_more_traffic_is_more_sessions_a_faster_rate_or_a_faster_trace() -> None:
    plan = Plan(small_trace(5), CostModel(PROFILE), ClusterOptions(1, 1, 512), 2.0)
    assert hastened(plan, 1.5).speed == 3.0
    assert hastened(replace(plan, session_rate=2.0), 1.5) == replace(plan, session_rate=3.0)
    assert hastened(replace(plan, sessions=4), 1.5) == replace(plan, sessions=6)


def alike(tmp_path, input_tokens: int, output_tokens: int, every_s: float):
    """A trace of requests of one length that share nothing."""
    blocks = -(-input_tokens // 512)
    rows = [
        TraceRequest(
            every_s * number, input_tokens, output_tokens, range(number * blocks, (number + 1) * blocks)
        )
        for number in range(120)
    ]
    file = tmp_path / "trace.jsonl"
    write_trace(Trace("alike", 512, rows), file)
    return file


@pytest.mark.parametrize(
    ("load", "bounds", "part"),
    [
        ((8_192, 8, 0.12), ("2", "0.05"), "prefill"),
        ((256, 512, 0.07), ("2", "0.007"), "decode"),
    ],
)
def test_what_bounds_nodes_is_named(tmp_path, capsys, load, bounds, part) -> None:
    command = [str(alike(tmp_path, *load)), "--profile", "h200-llama8b", "--most", "8"]
    assert main([*command, "--slo-ttft", bounds[0], "--slo-tbt", bounds[1]]) == 0
    out = capsys.readouterr().out
    assert "fewest nodes: " in out
    assert f"bounded by: {part}\n" in out


def test_what_was_tried_is_drawn_with_what_is_said(tmp_path, capsys) -> None:
    page = tmp_path / "out.html"
    file = tmp_path / "t.jsonl"
    write_trace(small_trace(60), file)
    assert main([str(file), "--most", "6", "--share", "0.9", "--html", str(page)]) == 0
    said = capsys.readouterr().out.splitlines()
    root = ElementTree.fromstring(page.read_text().partition("\n")[2])
    shown = [each.text for each in root.iter("p")]
    assert shown == said[-len(shown) :]
    assert shown[0].startswith("fewest nodes: ")
    assert any(line.startswith("beginning as ") for line in shown)
    assert any(line.startswith("tokens of a step: ") for line in shown)
    assert len(list(root.iter("polyline"))) >= 3


def test_fixed_roles_are_judged_by_their_best_split(tmp_path, capsys) -> None:
    file = alike(tmp_path, 8_192, 8, 0.12)
    command = [str(file), "--profile", "h200-llama8b", "--most", "8", "--roles", "fixed"]
    assert main([*command, "--slo-ttft", "2", "--slo-tbt", "0.05"]) == 0
    out = capsys.readouterr().out
    assert ", roles fixed" in out
    assert "split " in out
    assert "whole chunks" in out


def test_too_few_nodes_say_so_and_what_bounds_them(tmp_path, capsys) -> None:
    file = alike(tmp_path, 8_192, 8, 0.05)
    assert main([str(file), "--most", "1", "--profile", "h200-llama8b", "--slo-ttft", "2"]) == 0
    out = capsys.readouterr().out
    assert "too few: 1 serves" in out
    assert "bounded by: prefill\n" in out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--nodes", "2P2D"], "--nodes"),
        (["--policy", "all"], "--policy all"),
        (["--stages", "2"], "--stages"),
        (["--json"], "--json"),
        (["--paper", "fig5"], "--paper"),
    ],
)
def test_an_option_that_has_no_meaning_here_is_refused(tmp_path, capsys, arguments, word) -> None:
    file = tmp_path / "t.jsonl"
    write_trace(small_trace(10), file)
    assert main([str(file), *arguments]) == 2
    assert word in capsys.readouterr().err


def test_a_page_that_could_not_be_written_is_refused_before_a_run(tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "t.jsonl"
    write_trace(small_trace(10), file)
    monkeypatch.setattr("bench.papers.advise.simulate", pytest.fail)
    assert main([str(file), "--html", str(tmp_path / "missing" / "out.html")]) == 2
    assert "--html" in capsys.readouterr().err


def test_wrong_option_is_reported_once(tmp_path, capsys) -> None:
    file = tmp_path / "t.jsonl"
    write_trace(small_trace(10), file)
    with pytest.raises(SystemExit) as ended:
        main([str(file), "--sped", "2"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("--sped") == 1
