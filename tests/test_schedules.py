"""Schedules: the curves that their formulas describe, as functions of the step alone."""

from typing import Any

import pytest
from optimizers import options

from wangen.generator.errors import UsageError
from wangen.runtime.training.schedules import depends_on_length, make_schedule

# Factors at steps of a run of 100 with 10 of warm-up, from the formulas in the libraries' documentation.
CURVES = [
    ({"lr_scheduler": "constant"}, {0: 0.0, 5: 0.5, 10: 1.0, 99: 1.0}),
    ({"lr_scheduler": "linear"}, {5: 0.5, 55: 0.5, 100: 0.0}),
    ({"lr_scheduler": "cosine"}, {10: 1.0, 55: 0.5, 100: 0.0}),
    ({"lr_scheduler": "cosine_with_restarts", "lr_scheduler_num_cycles": 3}, {10: 1.0, 40: 1.0, 55: 0.5}),
    ({"lr_scheduler": "polynomial", "lr_scheduler_power": 2.0}, {10: 1.0, 55: 0.25 + 0.75e-5, 100: 1e-5}),
    ({"lr_scheduler": "inverse_sqrt"}, {5: 0.5, 10: 1.0, 40: 0.5, 90: 1 / 3}),
    ({"lr_scheduler": "inverse_sqrt", "lr_scheduler_timescale": 30}, {10: 1.0, 100: 0.5}),
    ({"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_min_lr_ratio": 0.2}, {10: 1.0, 55: 0.6, 100: 0.2}),
    (
        {"lr_scheduler": "warmup_stable_decay", "lr_decay_steps": "20%", "lr_scheduler_min_lr_ratio": 0.1},
        {10: 1.0, 79: 1.0, 90: 0.55, 100: 0.1},
    ),
    ({"lr_scheduler": "rex"}, {5: 0.5, 10: 1.0, 55: 0.5 / (0.1 + 0.45), 100: 0.0}),
    ({"lr_scheduler": "rex", "lr_scheduler_min_lr_ratio": 0.5}, {0: 0.5, 5: 0.75, 10: 1.0, 100: 0.5}),
    ({"lr_scheduler": "adafactor"}, {0: 1.0, 99: 1.0}),
]


@pytest.mark.parametrize(("changes", "points"), CURVES, ids=lambda v: "-".join(map(str, v.values())))
def test_schedules_follow_their_formulas(changes: dict[str, Any], points: dict[int, float]) -> None:
    factor = make_schedule(options(lr_warmup_steps="10", **changes), 100)
    assert {step: factor(step) for step in points} == pytest.approx(points, abs=1e-9)
    assert [factor(step) for step in points] == [factor(step) for step in points]  # nothing is counted inside


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr_warmup_steps": "soon"}, "takes steps"),
        ({"lr_warmup_steps": "200%"}, "outside the run"),
        ({"lr_warmup_steps": "-1"}, "outside the run"),
        ({"lr_warmup_steps": "nan"}, "outside the run"),
        ({"lr_warmup_steps": "2.5"}, "neither"),
        (
            {"lr_scheduler": "warmup_stable_decay", "lr_decay_steps": "0.9", "lr_warmup_steps": "20"},
            "more than the run",
        ),
        ({"lr_scheduler": "polynomial", "learning_rate": 1e-8}, "polynomial"),
    ],
)
def test_schedules_outside_the_run_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_schedule(options(**changes), 100)


def test_which_schedules_depend_on_the_length() -> None:
    endless = ({"lr_scheduler": "constant"}, {"lr_scheduler": "constant", "lr_warmup_steps": "100"},
               {"lr_scheduler": "inverse_sqrt"}, {"lr_warmup_steps": "0%"}, {"lr_warmup_steps": "0.0%"},
               {"lr_scheduler": "adafactor", "lr_warmup_steps": "5%"})  # fmt: skip
    bound = ({"lr_scheduler": "cosine"}, {"lr_scheduler": "rex"}, {"lr_warmup_steps": "0.1"}, {"lr_warmup_steps": "5%"},
             {"lr_scheduler": "warmup_stable_decay", "lr_decay_steps": "10"})  # fmt: skip
    assert not any(depends_on_length(options(**changes)) for changes in endless)
    assert all(depends_on_length(options(**changes)) for changes in bound)
    for changes in endless:
        assert [make_schedule(options(**changes), 50)(step) for step in range(50)] == [
            make_schedule(options(**changes), 500)(step) for step in range(50)
        ]


@pytest.mark.parametrize(("warmup", "decay"), [("50%", "50%"), ("0.3", "0.7"), ("10%", "90%")])
def test_shares_that_make_up_the_run_are_taken_whatever_its_length(warmup: str, decay: str) -> None:
    given = options(lr_scheduler="warmup_stable_decay", lr_warmup_steps=warmup, lr_decay_steps=decay)
    for length in range(2, 60):
        assert make_schedule(given, length)(length) == pytest.approx(0, abs=1e-9)


def test_shares_that_need_no_rounding_are_taken_as_they_are() -> None:
    given = options(lr_scheduler="warmup_stable_decay", lr_warmup_steps="50%", lr_decay_steps="50%")
    factor = make_schedule(given, 10)
    assert factor(5) == 1
    assert factor(6) < 1
