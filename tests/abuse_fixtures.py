"""What the abuse tests have in common; a test file asks for it with `pytest_plugins`."""

import pytest
from abuse_cases import Words, place_of
from tiny import TinyRun


@pytest.fixture(scope="module")
def known(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Words:
    """Values with which the steps work, and all that they need at once, so that no process loads it again."""
    from wangen.runtime import (  # fmt: skip
        cache_latents,
        cache_text,
        caption,
        check_cache,
        evaluate,
        export,
        generate,
        preprocess,
        report,
        train,
        world_model,
    )

    assert all((cache_latents, cache_text, caption, check_cache, evaluate, export, generate, preprocess, report, train,
                world_model))  # fmt: skip
    from wangen.generator.session import execute

    out = tmp_path_factory.mktemp("trained")
    assert execute(tiny_run.options(out, max_train_steps=1)) == 0
    return {**place_of(tiny_run), "lora_weight": out / "lora.safetensors"}
