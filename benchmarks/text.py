"""Text to fine-tune on where no data set is at hand: the sources of Python and of the packages installed beside it.

    python benchmarks/text.py FOLDER [--megabytes 30] [--vocabulary 32000]

Out: FOLDER/text.jsonl, one file of source code a line, in a shuffled order, and FOLDER/tokenizer, a byte-level BPE
trained on it, as `AutoTokenizer.from_pretrained` reads it.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast


def main() -> None:
    """Collect the text, train the tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=float, default=30.0)
    parser.add_argument("--vocabulary", type=int, default=32000)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    files = sorted({path for place in ("stdlib", "purelib") for path in Path(sysconfig.get_path(place)).rglob("*.py")})
    random.Random(0).shuffle(files)
    texts: list[str] = []
    left = options.megabytes * 1e6
    for path in files:
        if (text := path.read_text(encoding="utf-8", errors="ignore")) and left > 0:
            texts.append(text)
            left -= len(text)
    (options.folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, options.vocabulary, show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer).save_pretrained(options.folder / "tokenizer")


if __name__ == "__main__":
    main()
