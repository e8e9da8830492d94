"""21 samples on two ranks are 21 samples: none is counted twice, none is left out, and nobody waits."""

import pytest
from uneven import MAKERS, train_all

from camshaft.testing import run_processes

pytestmark = pytest.mark.distributed
NAMES = [name for name in MAKERS if name != "single"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_processes(2, train_all, str(tmp_path_factory.mktemp("runs")), timeout_s=150)


@pytest.mark.parametrize("name", NAMES)
def test_logged_means_sums_and_metric_objects_equal_those_of_one_process(ranks, name):
    expected, _ = ranks[0]["single"]
    assert expected["val/count"] == 21
    assert expected["val/metric"] == pytest.approx(expected["val/loss"], rel=1e-6)
    for rank in ranks:
        found, _ = rank[name]
        assert found["val/count"] == 21
        assert found["val/loss"] == pytest.approx(expected["val/loss"], rel=1e-5)
        assert found["val/metric"] == pytest.approx(expected["val/metric"], rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_short_last_windows_weigh_their_samples_as_on_one_process(ranks, name):
    _, expected = ranks[0]["single"]
    _, found = ranks[0][name]
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        assert float((found[key] - weight).norm() / weight.norm()) <= 1e-5, key
