"""Which part of the caching work a process takes, from its flag or from its environment."""

import pytest

from wangen.generator.errors import UsageError
from wangen.runtime.shards import Shard


def slurm(number: int, count: int, first: int, step: int) -> dict[str, str]:
    values = {"ID": number, "COUNT": count, "MIN": first, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(("numbers", "step"), [(range(4), 1), (range(2, 6), 1), (range(1, 10, 4), 4)])
def test_a_slurm_array_is_a_whole_wherever_it_begins_and_however_it_steps(numbers: range, step: int):
    count, first = len(numbers), numbers[0]
    parts = [Shard.parse("auto", slurm(number, count, first, step)) for number in numbers]
    assert parts == [Shard(index, count) for index in range(count)]


@pytest.mark.parametrize("environment", [{"RANK": "a", "WORLD_SIZE": "3"}, {"RANK": "3", "WORLD_SIZE": "3"}, {}])
def test_what_is_no_part_is_a_usage_error(environment: dict[str, str]):
    with pytest.raises(UsageError, match="--shard"):
        Shard.parse("auto", environment)
