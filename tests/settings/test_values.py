"""Numbers as people write them."""

from __future__ import annotations

import pytest

from app.settings.values import parse_count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("1g", 10**9),
        ("1G", 2**30),
        ("512MiB", 512 * 2**20),
        ("512MB", 512 * 10**6),
        ("1.5g", 1_500_000_000),
        ("100B", 100),
    ],
)
def test_size_is_read_as_vllm_and_people_write_it(text: str, count: int) -> None:
    """A single letter has vLLM's meaning; MiB and MB have everyone's."""
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "abc", "1e3", "-1", "1.5", "0.0001k", "5iB", "1 2"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    """Rather than rounded or guessed."""
    with pytest.raises(ValueError, match="not a"):
        parse_count(text)
