"""Handwritten digits as small coloured pictures, and the words that name them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

IMAGE_SIZE = 32
"""Height and width of a picture, in pixels; the digit keeps to the middle 24 of them."""

PROMPT_TOKENS = 12
"""Every prompt is padded or cut to this many tokens, the begin and end marks included."""

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

INKS: dict[str, tuple[float, float, float]] = {
    "red": (1.0, 0.16, 0.12),
    "green": (0.16, 0.85, 0.25),
    "blue": (0.25, 0.45, 1.0),
    "yellow": (1.0, 0.85, 0.15),
    "purple": (0.78, 0.30, 0.95),
    "white": (1.0, 1.0, 1.0),
}
"""Ink name -> red, green and blue in 0..1."""

TEMPLATES = (
    "a handwritten {digit} in {ink}",
    "a handwritten {digit} in {ink} ink",
    "a {ink} handwritten {digit}",
    "the digit {digit} in {ink} ink",
    "a {ink} {digit}",
    "{digit} in {ink}",
)

_MARKS = ("<pad>", "<bos>", "<eos>", "<unk>")


@dataclass(frozen=True)
class Digits:
    """The data set: `strokes` (N, 1, 32, 32) float32 in 0..1, `labels` (N,) int64 in 0..9."""

    strokes: torch.Tensor
    labels: torch.Tensor


def load() -> Digits:
    """Return all 1797 digits of scikit-learn, smoothed, sharpened and set in a black margin."""
    from sklearn.datasets import load_digits  # needed to train only, not to draw

    source = load_digits()
    small = torch.from_numpy(source.images.astype(np.float32))[:, None] / 16
    # One empty source pixel on each side first: strokes that touch the frame then end round, not cut.
    padded = functional.pad(small, (1, 1, 1, 1))
    large = functional.interpolate(padded, scale_factor=3, mode="bicubic", align_corners=False).clamp(0, 1)
    low, high = torch.sigmoid(torch.tensor([-0.45, 0.55]) * 9)
    crisp = ((torch.sigmoid((large - 0.45) * 9) - low) / (high - low)).clamp(0, 1)
    margin = (IMAGE_SIZE - crisp.shape[-1]) // 2
    strokes = functional.pad(crisp, (margin, margin, margin, margin))
    return Digits(strokes, torch.from_numpy(source.target.astype(np.int64)))


def colour(strokes: torch.Tensor, inks: torch.Tensor) -> torch.Tensor:
    """Paint strokes (N, 1, H, W) in 0..1 with inks (N, 3) in 0..1: pictures (N, 3, H, W) in -1..1."""
    return strokes * inks[:, :, None, None] * 2 - 1


def ink_table() -> torch.Tensor:
    """Return the inks (6, 3) in 0..1, in the order of `INKS`."""
    return torch.tensor(list(INKS.values()))


def vocabulary() -> list[str]:
    """Return every word the tokenizer knows, in the order of its token numbers."""
    plain = {word for template in TEMPLATES for word in template.split() if "{" not in word}
    numerals = [str(value) for value in range(len(DIGIT_WORDS))]
    return [*_MARKS, *DIGIT_WORDS, *numerals, *INKS, *sorted(plain)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the whole-word tokenizer; a word it does not know becomes `<unk>`."""
    numbers = {word: number for number, word in enumerate(vocabulary())}
    core = Tokenizer(WordLevel(numbers, unk_token="<unk>"))
    core.normalizer = Lowercase()
    core.pre_tokenizer = Whitespace()
    core.post_processor = TemplateProcessing(
        single="<bos> $A <eos>",
        special_tokens=[("<bos>", numbers["<bos>"]), ("<eos>", numbers["<eos>"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=PROMPT_TOKENS,
    )


def prompts(digit: int, ink: str) -> list[str]:
    """Return every wording of one digit in one ink, the numeral forms last."""
    return [template.format(digit=name, ink=ink) for name in (DIGIT_WORDS[digit], str(digit)) for template in TEMPLATES]


def unusable(prompt: str) -> str | None:
    """Say in one line why `prompt` can ask for no digit; None when it can."""
    words = prompt.lower().split()
    if not words:
        return "the prompt is empty; try 'a handwritten seven in red'"
    if not any(word.strip(".,!?'\"") in (*DIGIT_WORDS, *map(str, range(10))) for word in words):
        return f"the prompt {prompt!r} names no digit; use one of {', '.join(DIGIT_WORDS)} (or 0 to 9)"
    return None
