"""What the cache lacks is encoded in memory by all processes, each its share, and trained on by all."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from cache_entries import CONTENT, LATENT, TEXT
from test_on_the_fly import found, options, without_cache
from test_together import alone, losses, run, torchrun
from test_together_failures import faulty
from tiny import TinyRun

from wangen.generator.launch import Launch
from wangen.runtime import cache_text, encoding, shared_encoding
from wangen.runtime.cache import Folder, Verdict
from wangen.runtime.loader import cache_use
from wangen.runtime.needs import Need
from wangen.runtime.shared_encoding import Held, Place, exchange, share_of
from wangen.runtime.training.ranks import Ranks


class Talking(Ranks):
    """Processes that are threads: what one gives, all get."""

    def __init__(self, number: int, barrier: Barrier, said: list[Any]) -> None:
        super().__init__(Launch(number, barrier.parties))
        self.barrier, self.said = barrier, said
        self.rounds = 0

    def gathered(self, value: Any) -> list[Any]:
        self.rounds += 1
        self.said[self.number] = value
        self.barrier.wait(20)
        values = list(self.said)
        self.barrier.wait(20)
        return values


def entry(number: int) -> tuple[Place, Held]:
    batch = torch.arange(1000.0).view(10, 100) + 1000 * number
    name = f"{number:020}"
    return (Path("cache"), name), Held(name, name, Path("cache", name), {"latent": batch[number % 10]})


@pytest.mark.parametrize("limit_bytes", [1, 1 << 28])
@pytest.mark.parametrize("shares", [[3, 0, 2], [0, 0, 0], [1]])
def test_all_get_what_all_have_made_in_small_pieces(shares: Sequence[int], limit_bytes: int, monkeypatch):
    monkeypatch.setattr(shared_encoding, "PIECE_BYTES", limit_bytes)
    made = [dict(entry(10 * rank + number) for number in range(count)) for rank, count in enumerate(shares)]
    whole = {place: held.tensors["latent"].tolist() for part in made for place, held in part.items()}
    barrier, said = Barrier(len(shares)), [None] * len(shares)
    ranks = [Talking(rank, barrier, said) for rank in range(len(shares))]
    with ThreadPoolExecutor(len(shares)) as threads:
        list(threads.map(exchange, made, ranks))
    for held in made:
        assert {place: one.tensors["latent"].tolist() for place, one in held.items()} == whole
    if len(shares) == 1:
        assert ranks[0].rounds == 0
    elif limit_bytes == 1:
        assert ranks[0].rounds == max(shares) + 1


def test_a_part_of_a_batch_is_sent_without_the_batch(monkeypatch):
    sent: list[dict[Place, Held]] = []
    ranks = Ranks(Launch(0, 2))
    monkeypatch.setattr(ranks, "gathered", lambda piece: sent.append(piece) or [piece, {}])
    exchange(dict([entry(3)]), ranks)
    (held,) = sent[0].values()
    assert held.tensors["latent"].untyped_storage().nbytes() == 100 * 4


def test_a_share_has_all_entries_of_a_file_and_as_many_files_as_the_others(tmp_path: Path):
    def needs_of(source: str) -> list[Need]:
        recipes = [replace(LATENT, content=CONTENT | {"source": source, "width": width}) for width in (64, 128)]
        return [Need(None, recipe, Folder(tmp_path), Verdict("missing", "")) for recipe in recipes]  # type: ignore[arg-type]

    text = Need(None, TEXT, Folder(tmp_path), Verdict("missing", ""))  # type: ignore[arg-type]
    needs = [*(need for number in range(5) for need in needs_of(f"{number:064x}")), text]
    shares = [share_of(needs, Ranks(Launch(rank, 3))) for rank in range(3)]
    assert sorted(map(len, shares)) == [3, 4, 4]
    assert sorted(needs.index(need) for share in shares for need in share) == list(range(len(needs)))
    sources = [{str(need.recipe.content.get("source")) for need in share} for share in shares]
    assert len(set.union(*sources)) == sum(map(len, sources))


def test_what_no_other_has_made_is_encoded_after_all(tiny_run: TinyRun, tmp_path: Path, monkeypatch):
    """A machine that sees less of the cache than the others: they did not count these entries."""
    rank = Ranks(Launch(0, 2))
    monkeypatch.setattr(rank, "gathered", lambda value: [value, {}])
    monkeypatch.setattr(rank, "any", lambda flag: flag)
    counts = counted(monkeypatch)
    given = options(tiny_run, tmp_path, dataset_config=without_cache(tiny_run, tmp_path), cache_latents=True)
    monkeypatch.setattr("test_on_the_fly.find_entries", with_ranks(rank))
    whole = cache_use(found(tiny_run, given))
    assert whole.from_cache == 0
    assert sum(counts) == whole.computed
    assert len(counts) == 4
    assert all(count < whole.computed / 2 + 1 for count in counts)


def with_ranks(ranks: Ranks) -> Any:
    from wangen.runtime.loader import find_entries

    return lambda *words: find_entries(*words, ranks)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries each call of the encoding loops is to make."""
    counts: list[int] = []
    for module in (encoding, cache_text):

        def noted(*words: Any, encode: Any = module.encode) -> int:
            counts.append(len(words[-1].missing))
            return encode(*words)

        monkeypatch.setattr(module, "encode", noted)
    return counts


NOTED = """
from wangen.runtime import cache_text, encoding
for module in (encoding, cache_text):
    def noted(*words, encode=module.encode):
        print(*(need.recipe.content_key for need in words[-1].missing), file=open({file!r}, "a"))
        return encode(*words)
    module.encode = noted
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{"cache_latents": True}, {"cache_mode": "auto"}])
def test_two_processes_encode_each_its_share_and_train_as_with_a_cache(
    tiny_run: TinyRun, tmp_path: Path, mode: dict[str, Any]
):
    cached = tiny_run.options(tmp_path / "cached", gradient_accumulation_steps=2)
    assert run(alone(cached)).returncode == 0
    given = options(tiny_run, tmp_path, dataset_config=without_cache(tiny_run, tmp_path), **mode)
    done = run(torchrun(given, 2), **faulty(tmp_path / "hook", 1, NOTED.format(file=str(tmp_path / "keys"))))
    assert done.returncode == 0, done.stderr
    assert losses(given.output_dir) == pytest.approx(losses(cached.output_dir), abs=1e-5)
    of_second = (tmp_path / "keys").read_text().split()
    whole = cache_use(found(tiny_run, replace(given, cache_mode="realtime", cache_latents=False))).computed
    assert 0 < len(of_second) < whole
    assert f"{whole} were encoded here" in done.stderr
    assert not list(tmp_path.rglob("*.latent.safetensors"))
