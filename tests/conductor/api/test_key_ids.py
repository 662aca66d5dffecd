"""Ids of keys in a file that was written by hand."""

import dataclasses

import pytest

from base.errors import ConfigError
from conductor.api.keys import KeyFile, Quota, change_keys, made_key, read_keys


@pytest.mark.parametrize("key_id", ["", "a-b", "a b", "é", "a\n", "of-another"])
def test_an_id_by_which_no_key_is_found_is_refused_with_its_line(tmp_path, key_id):
    path = tmp_path / "keys.json"
    (first, _), (second, _) = made_key("one", "a"), made_key("two", "a")
    wrong = dataclasses.replace(second, id=first.id if key_id == "of-another" else key_id)
    change_keys(path, lambda: KeyFile({"a": Quota()}, (first, wrong)))
    line = [number for number, text in enumerate(path.read_text().splitlines(), 1) if '"id"' in text][1]
    with pytest.raises(ConfigError, match=f"{path}:{line}: .*conductor keys add"):
        read_keys(path)
