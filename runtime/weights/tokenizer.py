"""The umT5 tokenizer: from the files that come with the weights, or from the weights themselves."""

import json
import logging
import tempfile
import types
import warnings
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from wangen.generator.errors import WangenError, many
from wangen.generator.files import naming
from wangen.generator.tokenizer_file import carried_tokenizer, find_tokenizer
from wangen.runtime.prompts import clean_prompt

log = logging.getLogger("wangen")

ANOTHER = "fetch umT5's with: wangen models download tokenizer; or name it with --tokenizer"
MAX_PROMPT_TOKENS = 512
UNKNOWN = 3
"""The id of `<unk>` in umT5; in T5, whose tokenizer looks the same, it is 2."""


def load_tokenizer(path: Path) -> Tokenizer:
    """The umT5 tokenizer, without truncation or padding; it ends every text with `</s>`.

    `AutoTokenizer` is avoided: its present form gives umT5 the unknown token of another model.

    Args:
        path: the T5 weights (the tokenizer is looked for beside and inside them), a folder, `tokenizer.json` or
            `spiece.model`.

    Raises:
        WangenError: none found, with the places looked at, or the file is no tokenizer.
    """
    file = find_tokenizer(Path(path))
    readers = {".json": _tokenizer_from_json, ".model": _tokenizer_from_spiece}
    tokenizer = readers.get(file.suffix, _tokenizer_from_weights)(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.encode("a").tokens[-1:] != ["</s>"] or tokenizer.token_to_id("<unk>") != UNKNOWN:
        raise WangenError(f"not umT5's tokenizer: that ends a text with </s>, and its <unk> is {UNKNOWN}",
                          where=str(file), cure=ANOTHER)  # fmt: skip
    return tokenizer


def token_ids(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """The ids that the encoder gets for each prompt: cleaned, cut at 512, always with `</s>` at the end.

    Args:
        tokenizer: from `load_tokenizer`.
        prompts: raw texts; the empty text is `</s>` alone.
    """
    texts = [encoding.ids for encoding in tokenizer.encode_batch([clean_prompt(prompt) for prompt in prompts])]
    cut = [f"{prompt[:40]!r}…" for prompt, ids in zip(prompts, texts, strict=True) if len(ids) > MAX_PROMPT_TOKENS]
    if cut:
        log.warning("  %s longer than umT5's %d tokens, what follows is not seen: %s", many(len(cut), "text"),
                    MAX_PROMPT_TOKENS, ", ".join(cut[:5]) + (" and more" if len(cut) > 5 else ""))  # fmt: skip
    return [[*ids[:-1][: MAX_PROMPT_TOKENS - 1], ids[-1]] for ids in texts]


def _tokenizer_from_json(file: Path) -> Tokenizer:
    # The library raises a bare Exception for a file it cannot parse, so what it must hold is checked before.
    with naming(file):
        text = file.read_text("utf-8", errors="replace")
    try:
        model = json.loads(text)["model"]
        sound = model["type"] == "Unigram" and all(isinstance(piece, str) for piece, _ in model["vocab"])
    except (ValueError, TypeError, KeyError, RecursionError):
        sound = False
    if not sound:
        raise WangenError("not umT5's tokenizer.json: no Unigram model with a vocabulary, or cut short",
                          where=str(file), cure=ANOTHER)  # fmt: skip
    return Tokenizer.from_str(text)


def _tokenizer_from_spiece(file: Path) -> Tokenizer:
    """A fast tokenizer from a SentencePiece model alone, through the converter of transformers."""
    import sentencepiece
    from transformers.convert_slow_tokenizer import T5Converter

    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError) as error:
        raise WangenError(f"not a SentencePiece model ({error})", where=str(file)) from error
    # The converter asks its tokenizer for these three things only.
    source = types.SimpleNamespace(vocab_file=str(file), _extra_ids=0, convert_tokens_to_ids=pieces.piece_to_id)
    with warnings.catch_warnings():
        # umT5 was trained with bytes as fallback, but its official fast tokenizer does without them too.
        warnings.filterwarnings("ignore", message="The sentencepiece tokenizer that you are converting")
        tokenizer: Tokenizer = T5Converter(source).converted()
    tokenizer.add_special_tokens([pieces.id_to_piece(pieces.unk_id())])  # as in the official tokenizer.json
    return tokenizer


def _tokenizer_from_weights(file: Path) -> Tokenizer:
    """From the SentencePiece model that ComfyUI stores inside a text encoder's checkpoint."""
    with tempfile.TemporaryDirectory() as folder:  # the converter reads a file
        spiece = Path(folder, "spiece.model")
        spiece.write_bytes(carried_tokenizer(file) or b"")
        try:
            return _tokenizer_from_spiece(spiece)
        except WangenError as error:
            raise WangenError(f"the tokenizer inside these weights: {error.found}", where=str(file),
                              cure="name another with --tokenizer") from error  # fmt: skip
