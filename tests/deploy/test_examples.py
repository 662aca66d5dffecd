import dataclasses
import itertools
from pathlib import Path

import yaml

from base.config import ClusterConfig
from deploy.config_file import read_cluster_config

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "deploy" / "cluster.example.yaml"


def as_tables(value):
    """Tuples as lists, the way YAML has them."""
    if isinstance(value, dict):
        return {key: as_tables(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def test_the_example_lists_every_key_with_its_default():
    assert yaml.safe_load(EXAMPLE.read_text()) == as_tables(dataclasses.asdict(ClusterConfig()))


def test_the_example_can_be_read():
    assert read_cluster_config(EXAMPLE) == ClusterConfig()


def test_every_key_of_the_example_is_explained_where_it_first_stands():
    lines = EXAMPLE.read_text().splitlines()
    explained = set()
    for above, line in itertools.pairwise(lines):
        key = line.strip().partition(":")[0]
        opens_a_table = line.endswith(":")
        if line.strip() and not line.lstrip().startswith("#") and not opens_a_table and key not in explained:
            # one comment may stand over the first key of a table
            assert above.lstrip().startswith("#") or above.endswith(":"), f"nothing is said of {key}"
            explained.add(key)
