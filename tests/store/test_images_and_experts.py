"""Logs of rollouts with images and routed experts: an image takes its bytes once, layers are cut without decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import PAD, assert_same, per_row
from tensordict import TensorDict

from maskpack import PackedBatch, compress, decompress, report
from maskpack.packed.report import FieldReport
from maskpack.store import RolloutLog

ROWS, IMAGES = 64, 8
PROMPT, LAYERS, TOP = 6, 48, 8


def batch(seed: int, rows: int = ROWS, width: int = 10, **fields: Any) -> TensorDict:
    """Padded rows with responses of lengths of their own, up to `width`."""
    rng = torch.Generator().manual_seed(seed)
    prompt = torch.arange(PROMPT) >= torch.randint(0, PROMPT, (rows, 1), generator=rng)
    response = torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=rng)
    mask = torch.cat([prompt, response], 1)
    ids = torch.randint(1, 1000, mask.shape, generator=rng).where(mask, PAD)
    experts = torch.randint(0, 128, (*mask.shape, LAYERS, TOP), generator=rng)
    made = {
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "attention_mask": mask.long(),
        "routed_experts": experts.to(torch.int16).where(mask[..., None, None], 0),
    }
    return TensorDict({**made, **fields}, batch_size=[rows])


def images() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (48, 64, 3), np.uint8) for _ in range(IMAGES)]


def shown(seed: int) -> Any:
    """For each row an object with two images, in arrays of its own, and a text; every image is shown."""
    rng, known = np.random.default_rng(seed), images()
    return per_row(
        [
            {
                "pixels": [known[row % IMAGES].copy(), torch.from_numpy(known[rng.integers(IMAGES)].copy())],
                "text": f"r{row}",
            }
            for row in range(ROWS)
        ]
    )


def counts(folder: Path) -> list[int]:
    """How often each image stands in the segments of a log."""
    data = b"".join(file.read_bytes() for file in sorted(folder.glob("*.seg")))
    return [data.count(image.tobytes()) for image in images()]


@pytest.mark.parametrize("deleted", ["all", "half of each append", "all but the last append"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("pickled", [False, True])
def test_images_of_deleted_rows_are_freed(deleted: str, shared: bool, pickled: bool, tmp_path: Path) -> None:
    """Their bytes are all but all of the log, so they decide which segments are written again, and how much is freed.
    Appends of four rows with an image each; if they share one, the last append has it, too."""
    own = [np.random.default_rng(row).bytes(1 << 16) for row in range(48)]
    common = np.frombuffer(np.random.default_rng(48).bytes(1 << 16), np.uint8)
    with RolloutLog(tmp_path, segment_bytes=1 << 20, pad_token_id=PAD, allow_pickle=True) as log:
        for begin in range(0, 48, 4):
            held = [{"image": np.frombuffer(own[row], np.uint8)} for row in range(begin, begin + 4)]
            for one in held:
                one |= ({"common": common} if shared else {}) | ({"set": {1}} if pickled else {})
            log.append(TensorDict({"row": torch.arange(begin, begin + 4), "o": per_row(held)}, [4]))
        assert log.segments == 4  # the last has no image
        log.append(TensorDict({"row": torch.arange(48, 49), "o": per_row([{"common": common}])}, [1]))
        gone = {
            "all": range(48),
            "half of each append": [row for row in range(48) if row % 4 < 2],
            "all but the last append": range(44),
        }[deleted]
        log.delete(gone)
        freed = log.compact(0.0 if pickled else 0.25)  # in a pickle, nothing tells the images of a row
        data = b"".join(file.read_bytes() for file in sorted(tmp_path.glob("*.seg")))
        assert [data.count(image) for image in own] == [int(row not in gone) for row in range(48)]
        assert data.count(common.tobytes()) == 1
        assert len(gone) << 16 <= freed < (len(gone) + 1) << 16
        assert log.compact(0.0) == log.compact(0.25) == 0
        for row in log.rows.tolist()[:-1]:
            assert decompress(log[[row]])["o"].tolist()[0]["image"].tobytes() == own[row]


@pytest.mark.parametrize("segment_bytes", [1 << 12, 1 << 30])
def test_an_image_is_stored_once(segment_bytes: int, tmp_path: Path) -> None:
    rows = [batch(seed, images=shown(seed)).exclude("routed_experts") for seed in range(3)]
    nbytes = sum(image.nbytes for image in images())
    alone = len(compress(rows[0].exclude("images"), pad_token_id=PAD).to_bytes())
    with RolloutLog(tmp_path, segment_bytes=segment_bytes, pad_token_id=PAD) as log:
        log.append(rows[0])
        assert counts(tmp_path) == [1] * IMAGES
        before = log.nbytes
        assert nbytes < before < 1.5 * nbytes + alone
        log.append(rows[1])
        assert log.nbytes - before < nbytes / 4 + alone
        log.append(rows[2])
        assert counts(tmp_path) == [1] * IMAGES
    with RolloutLog(tmp_path, segment_bytes=segment_bytes, pad_token_id=PAD) as log:  # another process knows them, too
        log.append(rows[1])
        assert counts(tmp_path) == [1] * IMAGES
        for number, expected in enumerate([*rows, rows[1]]):
            seen = decompress(log[range(ROWS * number, ROWS * (number + 1))])
            assert_same(seen, expected)
        log.delete(range(ROWS))
        log.compact(0)
        assert counts(tmp_path) == [1] * IMAGES
        assert_same(decompress(log[[ROWS + 5, ROWS + 2]]), rows[1][[5, 2]])
        reader = RolloutLog(tmp_path, mode="r")
        assert_same(decompress(reader.take([ROWS + 5], "images")), rows[1][[5]].select("images"))


def test_layers_are_cut_from_the_log(tmp_path: Path) -> None:
    """Those of a pipeline stage: the columns stay as they were encoded, across appends, too."""
    parts = [batch(seed, 16, 300) for seed in range(2)]
    whole = torch.cat(parts)

    def experts(packed: PackedBatch) -> FieldReport:
        return next(field for field in report(packed).fields if field.path == ("routed_experts",))

    with RolloutLog(tmp_path, pad_token_id=PAD) as log:
        for part in parts:
            log.append(part)
        for first, rows in ((0, range(16)), (42, [3, 20, 31, 16, 0]), (6, range(32))):
            seen = log[rows].narrow("routed_experts", first, 6)
            expected = whole[torch.tensor(list(rows))]
            expected["routed_experts"] = expected["routed_experts"][:, :, first : first + 6]
            assert_same(decompress(seen), expected)
            packed = compress(whole, pad_token_id=PAD).take(list(rows)).narrow("routed_experts", first, 6)
            assert_same(decompress(seen), decompress(packed))
        stored, cut = experts(log[:16]), experts(log[:16].narrow("routed_experts", 6, 6))
        assert stored.encoding.startswith("columns")
        assert cut.encoding.startswith("columns")
        assert cut.wire_bytes == pytest.approx(stored.wire_bytes * 6 / LAYERS, rel=0.02)
