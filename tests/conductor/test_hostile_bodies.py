"""Every list and map that a client may send has a bound, and whatever a field is filled with costs little.

The walk of the schemas is that of `bench.hostile`, which sends the same bodies, as long as they may be, to a
running conductor and measures times. Here are counts: lines that ran, bytes that were held.
"""

import tracemalloc
from contextlib import suppress

import grpc
import pytest
from google.protobuf.message import DecodeError

from base.errors import InvalidRequestError
from base.message_bounds import MAX_FIELDS
from base.message_bounds import excess as message_excess
from bench.hostile_bodies import FILLINGS, filled, fillings_of, http_sites, repeated
from bench.hostile_messages import MESSAGE_FILLINGS, grpc_sites, message
from conductor.api.body_bounds import MAX_TEXTS, MAX_VALUES, excess
from conductor.api.openai_schema import read_body
from conductor.api.routes import ROUTES
from conductor.api.service import MAX_ELEMENTS
from tests.conductor.fakes import serving, spoken
from tests.effort import counting

SITES = list(http_sites())
BODIES = {route.path: route.body for route in ROUTES if route.body is not None}
LISTS = [site for site in SITES if site.kind in ("list", "map")]
PLACES = [place for place in grpc_sites() if place.path.endswith("/Generate")]
SHORT_BYTES = 6_000
MESSAGE_BYTES = 1_200
LONG_BYTES = 1 << 20
MAX_LINES = 400
MAX_LINES_A_BYTE = 0.02
"""Elements of a list that our own code looks at are at least 2 bytes each: this is none of them."""
MAX_SMALL_BYTES = 1 << 18
MAX_GROWTH = 10
MAX_REFUSAL_CHARS = 500
MAX_LINES_OF_A_FIELD = 45


def named(site) -> str:
    return f"{site.path} {site.name}"


def taken(body: type, raw: bytes) -> InvalidRequestError | None:
    """Read a body as a call does; return how it is refused."""
    if excess(raw):
        return InvalidRequestError("parts")
    try:
        read_body(raw, body)
    except InvalidRequestError as error:
        return error
    return None


@pytest.mark.parametrize("site", LISTS, ids=named)
def test_each_list_and_map_has_a_bound(site):
    assert site.bound is not None, "Field(max_length=...) in conductor/api/openai_schema.py"
    assert site.bound <= MAX_VALUES


@pytest.mark.parametrize("site", [site for site in LISTS if site.bound < MAX_TEXTS], ids=named)
def test_one_element_more_than_the_bound_is_refused_and_named(site):
    if site.kind == "map":
        keys = ",".join(f'"{key}":1' for key in range(site.bound + 1))
        made = b"{%b}" % keys.encode()
    else:
        made = repeated(site.element)((len(site.element) + 1) * (site.bound + 1) + 1)
    refused = taken(BODIES[site.path], site.before + made + site.after)
    assert refused is not None
    assert refused.param == site.name


@pytest.mark.parametrize("site", SITES, ids=named)
def test_a_field_filled_with_anything_costs_little(site):
    body = BODIES[site.path]
    for filling in fillings_of(site):
        raw = filled(site, filling, SHORT_BYTES)
        with counting() as effort:
            refused = taken(body, raw)
        assert effort.lines <= MAX_LINES + MAX_LINES_A_BYTE * len(raw), filling.name
        assert effort.peak_bytes <= MAX_SMALL_BYTES + MAX_GROWTH * len(raw), filling.name
        assert refused is None or len(str(refused)) <= MAX_REFUSAL_CHARS, filling.name


@pytest.mark.parametrize("filling", FILLINGS, ids=lambda filling: filling.name)
def test_the_parts_of_a_long_body_are_counted_in_little_memory(filling):
    site = next(site for site in SITES if site.name == "?")
    raw = filled(site, filling, LONG_BYTES)
    with counting() as effort:
        excess(raw)
    assert effort.lines <= MAX_LINES
    assert effort.peak_bytes <= MAX_GROWTH * len(raw)


def test_each_list_of_a_message_has_a_bound():
    lists = {place.name for place in PLACES if place.field is not None and place.field.is_repeated}
    assert lists == MAX_ELEMENTS.keys(), "conductor/api/service.py"


SMALLEST = {"token_ids.ids": "numbers, packed", "stop.token_ids": "numbers, packed"}
SMALLEST["sampling.logit_bias"] = "entries"


@pytest.mark.parametrize("name", MAX_ELEMENTS)
async def test_more_elements_than_a_list_of_a_message_may_have_are_refused(model, name):
    place = next(place for place in PLACES if place.name == name)
    filling = MESSAGE_FILLINGS[SMALLEST.get(name, "ones of a letter")]
    if place.field.message_type is not None and name not in SMALLEST:
        filling = MESSAGE_FILLINGS["empty ones"]
    # At most 20 bytes for each: the smallest of any kind.
    data = place.wrap(filling(place.number, 20 * (MAX_ELEMENTS[name] + 1)))
    async with (
        serving(model, lambda request: spoken(model, "no"), max_body_mib=8) as api,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        call = channel.unary_stream("/conductor.v1.Inference/Generate")(data)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "at most" in await call.details() or "more than" in await call.details()
        assert not api.dispatcher.requests


@pytest.mark.parametrize("name", MESSAGE_FILLINGS)
def test_the_parts_of_a_message_filled_with_anything_are_counted_in_little_memory(name):
    for place in PLACES:
        data = message(place, name, MESSAGE_BYTES)
        tracemalloc.start()
        with suppress(DecodeError):
            message_excess(data, place.root)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes <= MAX_SMALL_BYTES + MAX_GROWTH * len(data), place.name


def test_fields_are_counted_to_their_bound_and_no_further():
    place = next(place for place in PLACES if place.name == "sampling.logit_bias")
    data = message(place, "empty ones", LONG_BYTES)
    with counting() as effort:
        assert message_excess(data, place.root)
    assert effort.lines <= MAX_LINES_OF_A_FIELD * MAX_FIELDS
