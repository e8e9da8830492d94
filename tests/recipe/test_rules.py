"""Each rule that joins several keys, by its name."""

from helpers import errors, read

from camshaft.recipe.rules import RULES

M = "module: {_target_: net.Net}\n"
GOOD = f"{M}max_epochs: 1\n"


def test_every_rule_has_a_test():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {rule.__name__ for rule in RULES} <= tested


def test_a_run_has_an_end(project):
    assert errors(M) == (
        "r.yaml:1: none of max_epochs, max_steps and max_time is given.\n"
        "  The run would never end. Add for example 'max_epochs: 10'."
    )
    read(f"{M}max_time: 2 hours\n")
    read(f"{M}fast_dev_run: true\n")


def test_counts_are_positive(project):
    assert errors(f"{M}max_steps: 0\n") == (
        "r.yaml:2: max_steps is 0, and must be at least 1.\n  Nothing would ever be trained or shown."
    )
    assert "accumulate is -2" in errors(f"{GOOD}accumulate: -2\n")
    assert errors(f"{GOOD}launch: {{num_processes: 0, max_restarts: -1}}\nvalidate: {{sanity_batches: -1}}\n") == (
        "r.yaml has 3 mistakes.\n"
        "r.yaml:3: launch.num_processes is 0, and must be at least 1.\n"
        "r.yaml:3: launch.max_restarts is -1, and must be at least 0.\n"
        "r.yaml:4: validate.sanity_batches is -1, and must be at least 0."
    )
    read(f"{GOOD}launch: {{max_restarts: 0}}\nvalidate: {{sanity_batches: 0}}\n")


def test_a_seed_fits_every_stream(project):
    assert errors(f"{GOOD}seed: -1\n") == (
        "r.yaml:3: seed is -1.\n"
        "  Random streams of torch take no such seed. Use a whole number from 0 to 9223372036854775807."
    )
    assert "callbacks.seed.seed is 9223372036854775808." in errors(
        f"{GOOD}callbacks: {{seed: {{seed: 9223372036854775808}}}}\n"
    )
    read(f"{GOOD}seed: 9223372036854775807\n")


def test_limits_are_counts_or_shares(project):
    assert errors(f"{GOOD}limit_train_batches: 1.5\n") == (
        "r.yaml:3: limit_train_batches is 1.5.\n  Give a number of batches, or a share between 0.0 and 1.0."
    )
    read(f"{GOOD}limit_train_batches: 0.5\nlimit_test_batches: 3\n")


def test_batches_divide_into_micro_batches(project):
    assert errors(f"{GOOD}batch_size: 10\naccumulate: 4\n") == (
        "r.yaml:3: batch_size is 10, which accumulate (4) does not divide.\n"
        "  Micro-batches would differ in size. Use 8 or 12."
    )


def test_a_shorthand_excludes_its_callback(project):
    assert errors(f"{GOOD}checkpoint: {{keep_last: 2}}\ncallbacks: {{checkpoint: {{keep_last: 3}}}}\n") == (
        "r.yaml:4: checkpoint and callbacks.checkpoint are both given.\n"
        "  They say the same thing twice, and one would be ignored. Remove one; checkpoint is also set by r.yaml:3."
    )


def test_a_scheduler_needs_an_optimizer(project):
    assert errors(f"{GOOD}scheduler: {{name: cosine}}\n") == (
        "r.yaml:3: scheduler is given without optimizer.\n"
        "  The module then configures its optimizers, and schedulers with them. Add optimizer, or remove scheduler."
    )


def test_plateau_watches_a_metric(project):
    assert "scheduler plateau has no metric to monitor" in errors(
        f"{GOOD}optimizer: {{name: sgd}}\nscheduler: {{name: plateau}}\n"
    )
    read(f"{GOOD}optimizer: {{name: sgd}}\nscheduler: {{name: plateau, monitor: val/loss}}\n")


def test_times_are_lengths_of_time(project):
    assert errors(f"{M}max_time: 3 epochs\n") == (
        "r.yaml:2: max_time is '3 epochs', and must be a length of time.\n"
        "  Write for example '90 minutes' or '2 hours'."
    )
    assert "launch.hang_timeout is 'long'" in errors(f"{GOOD}launch: {{hang_timeout: long}}\n")


def test_intervals_can_be_due(project):
    assert errors(f"{M}max_steps: 100\nvalidate: 500 steps\n") == (
        "r.yaml:3: validate is due every 500 steps, and max_steps is 100.\n"
        "  It would never run. Shorten the interval, or lengthen the run."
    )
    assert "callbacks.f is due every 5 epochs, and max_epochs is 1." in errors(
        f"{GOOD}callbacks: {{f: {{_target_: net.Freeze, depth: 1, every: 5 epochs}}}}\n"
    )
    read(f"{GOOD}validate: {{every: 1 epoch, at_start: true}}\n")


def test_a_name_is_one_directory(project):
    assert errors(f"{GOOD}name: ../up\n") == (
        "r.yaml:3: name is '../up'.\n  The run's directory has this name, inside runs_dir. "
        "Use letters, digits and . _ -, at most 100, starting with a letter or digit."
    )


def test_open_values_are_given(project):
    assert "max_steps is left open" in errors(f"{M}max_steps: ???\n")


def test_a_device_is_known(project):
    assert errors(f"{GOOD}device: gpu\n") == (
        "r.yaml:3: device is 'gpu'.\n  No machine has one. Use auto, cpu, cuda, cuda:0, mps or tpu."
    )
    read(f"{GOOD}device: cuda:1\n")


def test_what_is_resumed_is_there(project):
    assert errors(f"{GOOD}resume: runs/x\n") == (
        "r.yaml:3: resume is 'runs/x', and there is no such path.\n"
        "  The run would start anew. Give the directory of a run or checkpoint, auto or never."
    )
    (project / "runs" / "x").mkdir(parents=True)
    read(f"{GOOD}resume: runs/x\n")
    read(f"{GOOD}resume: s3://bucket/x\n")


def test_machines_find_each_other(project):
    assert errors(f"{GOOD}launch: {{num_machines: 2}}\n") == (
        "r.yaml:3: launch.num_machines is 2, and nothing says where machine 0 is.\n"
        "  The machines would wait for each other. Give launch.main_process_ip, or launch.rdzv_endpoint."
    )
    assert "launch.machine_rank is 3 of 1 machines." in errors(f"{GOOD}launch: {{machine_rank: 3}}\n")
    read(f"{GOOD}launch: {{num_machines: 2, main_process_ip: 10.0.0.1, machine_rank: 1}}\n")


def test_secrets_stay_out(project):
    text = errors(f"{GOOD}loggers: {{x: {{_target_: net.Logger, api_key: hunter2hunter2}}}}\n")
    assert "loggers.x.api_key holds a secret." in text
    assert "hunter2" not in text


def test_an_interval_that_a_constructor_takes_is_its_own_to_judge(project):
    read(f"{GOOD}callbacks: {{o: {{_target_: net.Often, every: 5 epochs}}}}\n")
