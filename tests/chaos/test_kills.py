"""kill -9 at any moment costs nothing: the run goes on exactly, and never fails to.

The short battery runs with the other tests; the long one with ``pytest -m long tests/chaos``.
"""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file

from camshaft.checkpoint import Store
from camshaft.rundir import read_status
from camshaft.verify_resume import compare, first_step, last_step, read_digest, sizes

sys.path.insert(0, str(Path(__file__).parent))

from zygote import EVERY, STEPS

# In each phase, how often its moment comes in a whole run: micro-batches, blocks written, renames, deletions.
MOMENTS = {"step": 2 * STEPS, "write": 5 * STEPS // EVERY, "rename": STEPS // EVERY, "prune": STEPS // EVERY - 2}
PHASES = (*MOMENTS, "in a background save", "anywhere")


class Zygote:
    """The process that forks runs."""

    def __init__(self):
        script = Path(__file__).with_name("zygote.py")
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, place, **order):
        place.mkdir(parents=True, exist_ok=True)
        self.process.stdin.write(json.dumps({"place": str(place), "background": False, **order}) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def zygote():
    made = Zygote()
    yield made
    made.close()


@pytest.fixture(scope="module")
def whole(zygote, tmp_path_factory):
    """Train once without a kill."""
    place = tmp_path_factory.mktemp("whole")
    assert zygote.run(place) == 0, (place / "error").read_text()
    return digests(place), weights(place)


def digests(place):
    return {"": read_digest(place / "digest")}


def weights(place):
    # A kill before the recipe was written leaves a directory that nothing can be continued from.
    (path,) = (place / "chaos").glob(f"*/checkpoints/step_{STEPS:08}*")
    return {file.name: load_file(file) for file in sorted(path.glob("*.safetensors"))}


def newest(place):
    """Return the step of the newest whole checkpoint; 0 when there is none."""
    steps = [0]
    # A start that was killed before its first checkpoint leaves a directory that nothing continues.
    for folder in place.glob("chaos/*/checkpoints"):
        with Store(folder, read_only=True) as store:
            found = store.latest()
        steps += [] if found is None else [found.manifest.step]
    return max(steps)


def is_finished(place):
    """Say whether the run came to its end; a kill can still come after that, and the next start is another run."""
    return any(read_status(path).get("state") == "finished" for path in place.glob("chaos/*"))


def run_on(zygote, place, **order):
    """Start or continue a run; return its code once the first step it made is the one after its newest checkpoint."""
    digest, step = place / "digest", newest(place)
    before = sizes(digest)
    code = zygote.run(place, **order)
    # A run that silently began anew would come to the same end.
    assert first_step(digest, before, step + 1) == step + 1, (step, order)
    return code


def order_of(phase, chosen):
    """Return where a run is to be killed."""
    if phase == "anywhere":
        return {"delay": chosen.uniform(0.0, 0.6), "background": chosen.random() < 0.5}
    if phase == "in a background save":
        where = chosen.choice(["write", "rename", "renamed"])
        return {"phase": where, "count": chosen.randrange(25), "background": True}
    # What a run does after it was continued is less than a whole one does.
    count = chosen.randrange(max(1, MOMENTS[phase] // 2))
    if phase == "rename":
        phase = chosen.choice(["rename", "renamed"])
    return {"phase": phase, "count": count}


def battery(zygote, whole, place, kills, seed):
    """Kill so often in every phase, over as many runs as it takes; return the counts."""
    chosen, counts, number, same = random.Random(seed), Counter(), 0, 0
    while min(counts[phase] for phase in PHASES) < kills:
        number += 1
        assert number < 60 * kills, counts
        run = place / str(number)
        for _ in range(8):
            phase = min(PHASES, key=lambda name: (counts[name], chosen.random()))
            code = run_on(zygote, run, **order_of(phase, chosen))
            if code != 0:
                assert code == -9, (phase, (run / "error").read_text())
                # A death before the first step proves nothing.
                counts[phase] += last_step(run / "digest") > 0
            if is_finished(run):
                break
        assert is_finished(run) or run_on(zygote, run) == 0, (run / "error").read_text()
        difference = compare(whole[0], digests(run), STEPS)
        assert difference is None, difference
        for file, tensors in whole[1].items():
            found = weights(run)[file]
            assert found.keys() == tensors.keys()
            assert all(found[name].equal(tensor) for name, tensor in tensors.items()), file
        same += 1
    return counts, same


def test_runs_that_are_killed_end_as_if_they_had_not_been(zygote, whole, tmp_path):
    counts, same = battery(zygote, whole, tmp_path, kills=4, seed=0)
    print(dict(counts), f"{same} runs")
    assert sum(counts.values()) >= 20


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_hundred_kills(zygote, whole, tmp_path):
    counts, same = battery(zygote, whole, tmp_path, kills=40, seed=1)
    print(dict(counts), f"{same} runs")
    assert sum(counts.values()) >= 200
